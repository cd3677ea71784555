"""What a fused operation must get right on GPUs, as functions of a mesh.

One process may drive all GPUs, or each its own: every comparison happens on the devices and ends in one replicated
number.
"""

import functools
import itertools
import random
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks.shapes import ALL_GATHER_MATMUL

# Two summation orders in f32, then one rounding to the result's type.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-3, "float16": 5e-4}
ODD_SHAPES = [
    (60, 129, 37),
    (4, 1, 1),
    (12, 17, 130),
    (260, 264, 100),
    (1000, 516, 777),
    (2052, 1023, 513),
    (132, 4096, 96),
]


def mesh_of(
    devices: Sequence[jax.Device], shape: tuple[int, ...], names: tuple[str, ...], axis_type=AxisType.Auto
) -> Mesh:
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(axis_type,) * len(names))


def normal(key: int, shape: tuple[int, ...], dtype, mesh: Mesh, spec: P) -> jax.Array:
    make = jax.jit(lambda k: jax.random.normal(k, shape, dtype), out_shardings=NamedSharding(mesh, spec))
    return make(jax.random.key(key))


def operands(m: int, k: int, n: int, dtype, mesh: Mesh, key: int = 0) -> tuple[jax.Array, jax.Array]:
    """lhs [m, k] sharded on rows and rhs [k, n] on columns."""
    return normal(key, (m, k), dtype, mesh, P("tp")), normal(key + 1, (k, n), dtype, mesh, P(None, "tp"))


def gather_matmul(mesh: Mesh, **kwargs) -> Callable:
    """all_gather_matmul on global arrays."""
    call = functools.partial(jtf.all_gather_matmul, axis_name="tp", **kwargs)
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")))


@jax.jit
def _error(result: jax.Array, expected: jax.Array) -> jax.Array:
    result, expected = result.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(result - expected) / jnp.maximum(jnp.linalg.norm(expected), 1e-30)


def error(result: jax.Array, expected: jax.Array) -> float:
    """Relative Frobenius error; NaN if there is one."""
    return float(_error(result, expected))


def errors(mesh: Mesh, cases: Sequence[tuple], *, axes="tp", check_vma: bool = True) -> list[float]:
    """The relative error of the fused kernel for each case (m, k, n, dtype), all in one program."""
    names = (axes,) if isinstance(axes, str) else axes
    world = int(np.prod([mesh.shape[name] for name in names]))

    def local() -> jax.Array:
        found = []
        for i, (m, k, n, dtype) in enumerate(cases):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(i), lax.axis_index(names)))
            lhs = jax.random.normal(keys[0], (-(-m // world), k), dtype)
            rhs = jax.random.normal(keys[1], (k, -(-n // world)), dtype)
            call = functools.partial(jtf.all_gather_matmul, lhs, rhs, axes, precision="highest")
            result, expected = (call(implementation=name).astype(jnp.float32) for name in ("fused", "xla"))
            squares = lax.psum(jnp.stack([jnp.sum((result - expected) ** 2), jnp.sum(expected**2)]), names)
            found.append(jnp.sqrt(squares[0] / squares[1]))
        return jnp.stack(found)

    program = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(), check_vma=check_vma)
    return np.asarray(jax.jit(program)()).tolist()


def check_cases(mesh: Mesh, cases: Sequence[tuple], **kwargs) -> None:
    """Each case (m, k, n, dtype) agrees with the reference; m and n are rounded up to what the mesh divides."""
    found = errors(mesh, cases, **kwargs)
    wrong = [
        f"{case[:3]} {jnp.dtype(case[3]).name}: error {error}"
        for case, error in zip(cases, found, strict=True)
        if not error < TOLERANCE[jnp.dtype(case[3]).name]
    ]
    assert not wrong, wrong
    jtf.heap.check()


def check_listed_shapes(mesh: Mesh) -> None:
    """The shapes of the benchmarks."""
    for shape in ALL_GATHER_MATMUL:
        check_cases(mesh, [(shape.m, shape.k, shape.n, jnp.bfloat16)], check_vma=False)


def check_odd_shapes(mesh: Mesh) -> None:
    """Sizes that nothing divides, in every dtype."""
    check_cases(mesh, [(*shape, dtype) for shape in ODD_SHAPES for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)])


def check_random_shapes(mesh: Mesh, count: int = 20, seed: int = 0) -> None:
    """Sizes drawn at random, small and large."""
    draw = random.Random(seed)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    cases = [(*(round(2 ** draw.uniform(0, 11.5)) for _ in range(3)), draw.choice(dtypes)) for _ in range(count)]
    check_cases(mesh, cases, check_vma=False)


def check_gather_is_exact(mesh: Mesh) -> None:
    """Times the identity, the product is the gathered lhs, bit for bit."""
    for dtype, rows in itertools.product((jnp.float32, jnp.bfloat16), (64, 1024)):
        lhs, _ = operands(rows, 256, 256, dtype, mesh)
        identity = jax.device_put(jnp.eye(256, dtype=dtype), NamedSharding(mesh, P(None, "tp")))
        found = gather_matmul(mesh, precision="highest", implementation="fused")(lhs, identity)
        assert bool(jax.jit(jnp.array_equal)(found, lhs)), f"{dtype} {rows}"


def check_repetition(mesh: Mesh, m: int, k: int, n: int, times: int) -> None:
    """Call after call with changing operands gives what the first call with those operands gave, bit for bit."""
    lhs = [operands(m, k, n, jnp.bfloat16, mesh, key=key)[0] for key in (0, 1, 2)]
    rhs = operands(m, k, n, jnp.bfloat16, mesh)[1]

    def local(rhs: jax.Array, *lhs: jax.Array) -> jax.Array:
        call = functools.partial(jtf.all_gather_matmul, axis_name="tp", implementation="fused")
        lhs = jnp.stack(lhs)
        first = jnp.stack([call(x, rhs) for x in lhs])

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            same = jnp.array_equal(call(lhs[i % 3], rhs), first[i % 3])
            return wrong + jnp.where(same, 0, 1)

        return lax.psum(lax.fori_loop(0, times, step, jnp.int32(0)), "tp")

    program = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "tp"), *[P("tp")] * 3), out_specs=P(), check_vma=False)
    assert int(jax.jit(program)(rhs, *lhs)) == 0


def check_independent_calls(mesh: Mesh) -> None:
    """Calls that share a region and depend on nothing of each other, also when XLA replays them as a CUDA graph."""
    lhs = [operands(m, 512, 512, jnp.float32, mesh, key=key)[0] for m in (64, 1024) for key in range(4)]
    rhs = operands(64, 512, 512, jnp.float32, mesh, key=9)[1]

    def run(implementation: str) -> Callable:
        def local(rhs: jax.Array, *lhs: jax.Array) -> list[jax.Array]:
            call = functools.partial(jtf.all_gather_matmul, precision="highest", implementation=implementation)
            return [call(x, rhs, "tp") for x in lhs]

        specs = (P(None, "tp"), *[P("tp")] * len(lhs))
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"), check_vma=False))

    expected, program = run("xla")(rhs, *lhs), run("fused")
    for _ in range(5):
        for result, want in zip(program(rhs, *lhs), expected, strict=True):
            assert error(result, want) < TOLERANCE["float32"]


def check_mixture(mesh: Mesh) -> None:
    """Two shapes and an XLA collective take turns in a loop of one program."""
    a, b = operands(256, 512, 512, jnp.float32, mesh)
    c, d = operands(4, 512, 512, jnp.float32, mesh, key=5)

    def local(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, implementation: str) -> jax.Array:
        call = functools.partial(
            jtf.all_gather_matmul, axis_name="tp", precision="highest", implementation=implementation
        )

        def step(state: tuple) -> tuple:
            i, a, c = state
            big = lax.all_to_all(call(a, b), "tp", 0, 1, tiled=True)
            small = lax.psum(call(c, d), "tp")
            a = jnp.tanh(big / 20 + jnp.mean(small))
            c = jnp.tanh(lax.all_to_all(call(c, d), "tp", 0, 1, tiled=True) / 20 + jnp.mean(a))
            return i + 1, a, c

        _, a, c = lax.while_loop(lambda state: state[0] < 50, step, (0, a, c))
        return jnp.concatenate([a, c])

    def run(implementation: str) -> jax.Array:
        specs = (P("tp"), P(None, "tp"), P("tp"), P(None, "tp"))
        program = functools.partial(local, implementation=implementation)
        return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=False))(
            a, b, c, d
        )

    wrong = error(run("fused"), run("xla"))
    assert wrong < 1e-3, f"error {wrong}"


def check_meshes(devices: Sequence[jax.Device]) -> None:
    """Permuted devices, one axis of two, both axes as one, Explicit axes."""
    world = len(devices)
    small, large = (100, 64, 48, jnp.float32), (520, 64, 48, jnp.bfloat16)
    check_cases(mesh_of(devices[::-1], (world,), ("tp",)), [small, large])
    shuffled = [devices[i] for i in random.Random(1).sample(range(world), world)]
    check_cases(mesh_of(shuffled, (world,), ("tp",)), [small, large])
    check_cases(mesh_of(devices, (world,), ("tp",), AxisType.Explicit), [small, large])
    if world % 2 == 0:
        pairs = mesh_of(shuffled, (2, world // 2), ("dp", "tp"))
        check_cases(pairs, [small], axes=("dp", "tp"))
        check_cases(pairs, [large], axes=("tp", "dp"))
        check_data_parallel(pairs)


def check_data_parallel(mesh: Mesh) -> None:
    """Each row of a ("dp", "tp") mesh works on its own."""
    lhs = normal(0, (2, 120, 64), jnp.float32, mesh, P("dp", "tp"))
    rhs = normal(1, (64, 96), jnp.float32, mesh, P(None, "tp"))

    def run(implementation: str) -> jax.Array:
        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            return jtf.all_gather_matmul(x, w, "tp", axis=1, precision="highest", implementation=implementation)

        specs = (P("dp", "tp"), P(None, "tp"))
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("dp", None, "tp")))(lhs, rhs)

    wrong = error(run("fused"), run("xla"))
    assert wrong < TOLERANCE["float32"], f"error {wrong}"


def check_gradients(mesh: Mesh) -> None:
    """The gradients of a program whose forward half is fused."""
    lhs, rhs = operands(60, 129, 36, jnp.float32, mesh)

    def gradients(implementation: str) -> tuple:
        call = gather_matmul(mesh, precision="highest", implementation=implementation)
        return jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(call(a, b))), (0, 1)))(lhs, rhs)

    for found, want in zip(gradients("fused"), gradients("xla"), strict=True):
        assert error(found, want) < 1e-4


CHECKS = (
    check_odd_shapes,
    check_random_shapes,
    check_gather_is_exact,
    check_mixture,
    check_independent_calls,
    check_gradients,
    check_listed_shapes,
)


def check_all(devices: Sequence[jax.Device], repetitions: int = 1000) -> None:
    """Everything above, on a mesh of one axis unless it says otherwise."""
    mesh = mesh_of(devices, (len(devices),), ("tp",))
    for check in CHECKS:
        check(mesh)
    check_meshes(devices)
    check_repetition(mesh, 16, 1024, 2048, repetitions)
    check_repetition(mesh, 1024, 1024, 2048, repetitions)
