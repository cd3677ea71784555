"""Compiles the kernels of a command of benchmarks/run.py into Triton's cache, and runs nothing; needs no GPU.

python benchmarks/runs/lower.py OP --world W --shapes ... --implementations ... (as run.py has them)
"""

import os, sys, time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
import numpy as np
import jax
import benchmarks.run as run
import benchmarks.measure as measure
from tests.helpers import rehearsal

KIND = os.environ.get("LOWER_FOR", "NVIDIA H100 80GB HBM3")
SMALL = 1 << 24
started = time.time()


class Shape:
    """In place of an array that is too large to be made."""

    def __init__(self, like):
        self.shape, self.dtype = like.shape, like.dtype

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: int(np.prod(self.shape)))
    __mul__ = __rmul__ = lambda self, other: self

    def astype(self, dtype):
        return Shape(jax.ShapeDtypeStruct(self.shape, dtype))

    def struct(self):
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def structs(tree):
    return jax.tree.map(lambda x: x.struct() if isinstance(x, Shape) else x, tree)


jit = jax.jit


class Done(Exception):
    pass


class Lowered:
    def compile(self, **_):
        raise Done


class Jitted:
    def __init__(self, f, **how):
        self.real, self.how = jit(f, **how), how

    def __call__(self, *args):
        leaves = jax.tree.leaves(args)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return self.real(*args)
        out = jax.eval_shape(self.real, *structs(args))
        big = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(out) if hasattr(x.dtype, "itemsize")) > SMALL
        if big or any(isinstance(x, Shape) for x in leaves):
            return jax.tree.map(Shape, out)
        return self.real(*args)

    def lower(self, *args):
        text = self.real.trace(*structs(args)).lower(lowering_platforms=("cuda",)).as_text()
        print(f"[{time.time() - started:5.0f}] {text.count('triton_kernel_call')} kernels", flush=True)
        return Lowered()

    def __getattr__(self, name):
        return getattr(self.real, name)


def abstract_jit(f=None, **how):
    return (lambda f: Jitted(f, **how)) if f is None else Jitted(f, **how)


def lower_shape(operation, shape, implementations, mesh, *, modes=(), l2="usual", **_):
    world = mesh.shape[measure.AXIS]
    operation.check_shape(shape, world)
    calls = operation.calls_per_program(shape, world)
    rounds = operation.rounds(shape, world)
    ours = [each for each in implementations if measure.is_written_by_hand(each) or each.name.startswith("fused")]
    jax.jit = abstract_jit
    try:
        operands = operation.operands(shape, mesh, calls, operation.turns(shape, world, calls, l2))
        steps = (
            [each for each in map(operation.stepwise, ours) if each is not None]
            if any(m in measure.STEPWISE for m in modes)
            else []
        )
        for each in [*ours, *steps]:
            xs, ys = operands.of(each)
            print(
                f"[{time.time() - started:5.0f}] {shape.name} {each.name} {'stepwise' if each in steps else ''}",
                flush=True,
            )
            for variant in measure.variants(each):
                try:
                    (variant.compile or measure._compile)(variant, mesh, xs, ys, rounds)
                except Done:
                    pass
                except Exception as error:
                    print("FAULT", each.name, type(error).__name__, str(error)[:300], flush=True)
    finally:
        jax.jit = jit
    return []


run.bench_shape = lower_shape
run.summarize = lambda *_: ((), ())
with rehearsal.rehearsing(KIND):
    from benchmarks.operation import Operation

    run.measure.__globals__["math"]
    for op in set(type(o) for o in run.OPERATIONS.values()):
        op.ceilings = lambda self, *_: {}
    run.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
