"""What a fused operation must get right on GPUs, as functions of a mesh.

One process may drive all GPUs, or each its own: every comparison happens on the devices and ends in replicated numbers.
Operands are made where they are used. Compiling takes longest, so programs of many cases compile side by side.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops import register
from jaxtaxfree.ops.shapes import MatmulShape
from jaxtaxfree.teams import vary

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
    (100, 264, 224),
]
# Rows, and sizes of a token in the model and in the hidden layer. Checks that share them share compiled kernels.
MLPS = [(64, 129, 40), (1032, 129, 264)]
REPEATED_SHAPES = [(16, 1024, 2048), (128, 1024, 2048), (1024, 1024, 2048), (2048, 8192, 8192)]


def up_to(size: int, world: int) -> int:
    """The next size that so many ranks divide."""
    return -(-size // world) * world


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """A fused product.

    Attributes:
      name: in jaxtaxfree, of a function of two operands and an axis name.
      in_specs, out_spec: of the operands and the result, on an axis "tp".
      axis: the name of the keyword that says which dimension is gathered or scattered, if there is one.
      listed: the shapes of its benchmarks.
      awaited: what a rank waits for in a small call.
    """

    name: str
    in_specs: tuple[P, ...]
    out_spec: P
    axis: str | None
    listed: tuple[MatmulShape, ...]
    awaited: str = "signal arrived["

    @property
    def function(self) -> Callable:
        return getattr(jtf, self.name)

    def sizes(self, m: int, k: int, n: int, world: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of whole operands; each sharded size is rounded up to what the ranks divide."""
        rows, columns = m if self is REDUCE else up_to(m, world), up_to(n, world) if self is GATHER else n
        contracted = k if self is GATHER else up_to(k, world)
        return (rows, contracted), (contracted, columns)


# By name, what is to be known of a product besides the register; see `Operation`.
PRODUCTS: dict[str, dict[str, Any]] = {
    "all_gather_matmul": {"axis": "axis"},
    "matmul_reduce_scatter": {"axis": "scatter_dimension"},
    "matmul_all_reduce": {"axis": None, "awaited": "message partials["},
}


def _product(entry: register.Operation) -> Operation:
    return Operation(
        name=entry.name,
        in_specs=entry.in_specs("tp"),
        out_spec=entry.out_spec("tp"),
        listed=entry.shapes,
        **PRODUCTS[entry.name],
    )


OPERATIONS = tuple(_product(entry) for name, entry in register.OPERATIONS.items() if name in PRODUCTS)
GATHER, SCATTER, REDUCE = OPERATIONS


def mesh_of(
    devices: Sequence[jax.Device], shape: tuple[int, ...], names: tuple[str, ...], axis_type=AxisType.Auto
) -> Mesh:
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(axis_type,) * len(names))


def operands(
    m: int, k: int, n: int, dtype, mesh: Mesh, key: int = 0, operation: Operation = GATHER
) -> tuple[jax.Array, jax.Array]:
    """lhs [m, k] and rhs [k, n] as the operation wants them sharded."""
    sizes = operation.sizes(m, k, n, mesh.shape["tp"])
    shardings = tuple(NamedSharding(mesh, spec) for spec in operation.in_specs)
    make = jax.jit(
        lambda key: tuple(jax.random.normal(key, size, dtype) for key, size in zip(jax.random.split(key), sizes)),
        out_shardings=shardings,
    )
    return make(jax.random.key(key))


def local_operands(operation: Operation, key: int, m: int, k: int, n: int, dtype, axes="tp") -> list[jax.Array]:
    """A rank's parts of such operands, inside `shard_map`."""
    world = lax.axis_size(axes)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(key), lax.axis_index(axes)))
    return [
        jax.random.normal(
            key, [size // world if name else size for size, name in itertools.zip_longest(sizes, spec)], dtype
        )
        for key, sizes, spec in zip(keys, operation.sizes(m, k, n, world), operation.in_specs)
    ]


def program(mesh: Mesh, local: Callable[[], jax.Array], *, check_vma: bool = False) -> Callable[[], jax.Array]:
    """A program of no operands, of which every rank returns the same."""
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P(), check_vma=check_vma))


def on_ranks(mesh: Mesh, local: Callable[[], jax.Array], *, check_vma: bool = False) -> np.ndarray:
    """What every rank returns alike."""
    return np.asarray(program(mesh, local, check_vma=check_vma)())


def run_all(programs: Sequence[Callable[[], jax.Array]]) -> list[np.ndarray]:
    """What programs return. They are compiled side by side, which takes longest, and run one after the other.

    Processes meet while they compile: all begin with the same programs, so none waits for one that nobody has begun.
    """
    with concurrent.futures.ThreadPoolExecutor(16 // jax.process_count()) as pool:
        compiled = list(pool.map(lambda each: each.lower().compile(), programs))
    return [np.asarray(each()) for each in compiled]


def on_mesh(operation: Operation, mesh: Mesh, **kwargs) -> Callable:
    """The operation on global arrays."""
    call = functools.partial(operation.function, axis_name="tp", **kwargs)
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=operation.in_specs, out_specs=operation.out_spec))


def gather_matmul(mesh: Mesh, **kwargs) -> Callable:
    """all_gather_matmul on global arrays."""
    return on_mesh(GATHER, mesh, **kwargs)


@jax.jit
def _error(result: jax.Array, expected: jax.Array) -> jax.Array:
    result, expected = result.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(result - expected) / jnp.maximum(jnp.linalg.norm(expected), 1e-30)


def error(result: jax.Array, expected: jax.Array) -> float:
    """Relative Frobenius error; NaN if there is one."""
    return float(_error(result, expected))


def relative_error(result: jax.Array, expected: jax.Array, axes) -> jax.Array:
    """The same of what the ranks have, all or parts of it, inside `shard_map`."""
    squares = lax.psum(vary(jnp.stack([jnp.sum((result - expected) ** 2), jnp.sum(expected**2)]), axes), axes)
    return jnp.sqrt(squares[0] / squares[1])


def errors(
    mesh: Mesh, cases: Sequence[tuple], *, operation: Operation = GATHER, axes="tp", check_vma: bool = True
) -> list[float]:
    """The relative error of the fused kernel for each case (m, k, n, dtype)."""
    names = (axes,) if isinstance(axes, str) else axes

    def local(key: int, m: int, k: int, n: int, dtype) -> jax.Array:
        call = functools.partial(operation.function, *local_operands(operation, key, m, k, n, dtype, axes), axes)
        call = functools.partial(call, precision="highest")
        result = call(implementation="fused").astype(jnp.float32)
        # In f32, because XLA adds up partial products that it has rounded to the operands' type.
        expected = call(implementation="xla", preferred_element_type=jnp.float32)
        return relative_error(result, expected, names)

    programs = [program(mesh, functools.partial(local, i, *case), check_vma=check_vma) for i, case in enumerate(cases)]
    return [float(each) for each in run_all(programs)]


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


def check_listed_shapes(mesh: Mesh, operation: Operation) -> None:
    """The shapes of the benchmarks."""
    cases = [(shape.m, shape.k, shape.n, jnp.bfloat16) for shape in operation.listed]
    check_cases(mesh, cases, operation=operation, check_vma=False)


def check_odd_shapes(mesh: Mesh, operation: Operation) -> None:
    """Sizes that nothing divides; few rows in every dtype, the others in one."""
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    cases = [
        (*shape, dtype) for i, shape in enumerate(ODD_SHAPES) for j, dtype in enumerate(dtypes) if i == 0 or j == i % 3
    ]
    check_cases(mesh, cases, operation=operation)


def check_random_shapes(mesh: Mesh, operation: Operation, count: int = 6, seed: int = 0) -> None:
    """Sizes drawn at random, small and large."""
    draw = random.Random(seed)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    cases = [(*(round(2 ** draw.uniform(0, 11.5)) for _ in range(3)), draw.choice(dtypes)) for _ in range(count)]
    check_cases(mesh, cases, operation=operation, check_vma=False)


def check_gather_is_exact(mesh: Mesh) -> None:
    """Times the identity, the product is the gathered lhs, bit for bit; and so is what `return_gathered` gives."""

    def local() -> jax.Array:
        wrong = []
        columns = 256 // mesh.shape["tp"]
        for dtype, rows in itertools.product((jnp.float32, jnp.bfloat16), (64, 1024)):
            lhs, _ = local_operands(GATHER, 0, rows, 256, 256, dtype)
            expected = lax.all_gather(lhs, "tp", tiled=True)
            first = lax.axis_index("tp") * columns
            identity = lax.dynamic_slice_in_dim(jnp.eye(256, dtype=dtype), first, columns, axis=1)
            call = functools.partial(jtf.all_gather_matmul, lhs, identity, "tp", precision="highest")
            results = [call(implementation="fused"), *call(implementation="fused", return_gathered=True)]
            own = lax.dynamic_slice_in_dim(expected, first, columns, axis=1)
            wrong += [jnp.sum(found != want) for found, want in zip(results, (own, own, expected))]
        return lax.psum(jnp.stack(wrong), "tp")

    wrong = on_ranks(mesh, local)
    assert not wrong.any(), wrong


def check_reduce_scatter_rounds_once(mesh: Mesh) -> None:
    """Of small integers every sum is exact in f32, so the result is their sum as bf16, bit for bit.

    Also of many rows, if f32 is what they ask for.
    """

    def local() -> jax.Array:
        wrong = []
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), lax.axis_index("tp")))
        for rows, config in ((64, None), (1024, {"exact_wire": True})):
            sizes = ((up_to(rows, mesh.shape["tp"]), 384), (384, 256))
            lhs, rhs = (jax.random.randint(key, size, -4, 5).astype(jnp.bfloat16) for key, size in zip(keys, sizes))
            found = jtf.matmul_reduce_scatter(lhs, rhs, "tp", implementation="fused", config=config)
            total = lax.psum_scatter(jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32), "tp", tiled=True)
            wrong.append(jnp.sum(found != total.astype(jnp.bfloat16)))
        return lax.psum(jnp.stack(wrong), "tp")

    wrong = on_ranks(mesh, local)
    assert not wrong.any(), wrong


def check_all_reduce_is_the_same_everywhere(mesh: Mesh) -> None:
    """Every rank has the same bits, and of small integers their sum as bf16, in forms that do not round parts."""
    few = [{"kernel": "few", "apart": apart, "linger": apart} for apart in (False, True)]
    small = [
        (rows, {"shots": shots, "exact_wire": exact, **kernel})
        for rows, shots in ((13, 1), (100, 1), (100, 2))
        for exact in (True, False)
        for kernel in (*few, {})
    ]
    forms = [*small, (1024, {"exact_wire": True}), (1024, {"exact_wire": False}), (1024, {})]

    def local(rows: int, config: dict) -> jax.Array:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), lax.axis_index("tp")))
        call = functools.partial(jtf.matmul_all_reduce, axis_name="tp", implementation="fused", config=config)
        whole = [jax.random.randint(key, size, -4, 5) for key, size in zip(keys, ((rows, 384), (384, 200)))]
        lhs, rhs = (x.astype(jnp.bfloat16) for x in whole)
        total = lax.psum(jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32), "tp")
        wrong = jnp.int32(0)
        if config.get("exact_wire"):
            wrong += jnp.sum(call(lhs, rhs) != total.astype(jnp.bfloat16))
        lhs, rhs = (jax.random.normal(key, x.shape, jnp.bfloat16) for key, x in zip(keys, whole))
        of_ranks = lax.all_gather(call(lhs, rhs, preferred_element_type=jnp.float32), "tp")
        return lax.psum(wrong + jnp.sum(of_ranks != of_ranks[0]), "tp")

    found = run_all([program(mesh, functools.partial(local, *form)) for form in forms])
    wrong = [(form, count) for form, count in zip(forms, found) if count]
    assert not wrong, wrong


def three_calls(
    operation: Operation, m: int, k: int, n: int, **keywords
) -> tuple[Callable, jax.Array, jax.Array, jax.Array]:
    """A call of the kernel, three lhs and an rhs for it, and what it gives of each lhs, inside `shard_map`."""
    call = functools.partial(operation.function, axis_name="tp", implementation="fused", **keywords)
    made = [local_operands(operation, key, m, k, n, jnp.bfloat16) for key in (0, 1, 2)]
    lhs, rhs = jnp.stack([lhs for lhs, _ in made]), made[0][1]
    return call, lhs, rhs, jnp.stack([call(x, rhs) for x in lhs])


COLUMN_SHAPES = [(60, 136, 40), (300, 264, 200), (257, 640, 264), (1000, 1024, 520), (2100, 1536, 1032)]


def check_columns(mesh: Mesh) -> None:
    """Ranks have columns of lhs, or get columns of the sum, by every kernel that takes them, many times over."""
    world = mesh.shape["tp"]

    def local(key: int, name: str, m: int, k: int, n: int, dtype: Any, kernel: str, again: bool) -> jax.Array:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(key), lax.axis_index("tp")))
        wide, tall = (world * k, n), (k, world * n)
        gathers = name == "all_gather_matmul"
        lhs, rhs = (
            jax.random.normal(key, shape, dtype) for key, shape in zip(keys, ((m, k), wide if gathers else tall))
        )
        dimension = {"axis": 1} if gathers else {"scatter_dimension": 1}
        call = functools.partial(getattr(jtf, name), axis_name="tp", precision="highest", **dimension)
        fused = functools.partial(call, implementation="fused", config={"kernel": kernel})
        expected = call(lhs, rhs, implementation="xla", preferred_element_type=jnp.float32)
        first = fused(lhs, rhs)
        if not again:
            return relative_error(first.astype(jnp.float32), expected, ("tp",))

        def step(_: int, different: jax.Array) -> jax.Array:
            return different + jnp.sum(fused(lax.optimization_barrier(lhs), rhs) != first)

        return lax.psum(lax.fori_loop(0, 200, step, vary(jnp.int32(0), ("tp",))), "tp")

    on_hopper = mesh.devices.flat[0].compute_capability == "9.0" if mesh.devices.flat[0].platform == "gpu" else False
    cases = [
        (name, *shape, dtype, kernel)
        for name in ("all_gather_matmul", "matmul_reduce_scatter")
        for kernel, dtypes in (
            ("portable", ("float32", "bfloat16")),
            *((("hopper", ("bfloat16",)),) if on_hopper else ()),
        )
        for dtype in dtypes
        for shape in COLUMN_SHAPES
        if kernel == "portable" or name == "matmul_reduce_scatter" or shape[1] % 64 == 0
    ]
    found = run_all([program(mesh, functools.partial(local, i, *case, False)) for i, case in enumerate(cases)])
    for case, error in zip(cases, found, strict=True):
        assert error < TOLERANCE[case[4]], f"{case}: {error}"
    large = [case for case in cases if case[1] > 2000]
    for case, different in zip(
        large, run_all([program(mesh, functools.partial(local, 0, *case, True)) for case in large])
    ):
        assert different == 0, f"{case}: {different} elements of 200 calls are not the first call's"


SEVERAL_SHAPES = [  # rows of a rank, K, columns of each rhs of a rank
    (8, 1024, (1024, 128, 128)),
    (9, 264, (200, 8, 72)),
    (3, 129, (37, 1, 130)),
    (100, 512, (520, 64)),
    (300, 264, (40, 8, 264, 16)),
    (1030, 1024, (1024, 136, 128)),
]


def check_several(mesh: Mesh) -> None:
    """Products by several rhs, with biases and activations, by every kernel that takes them, many times over."""
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    on_hopper = on_gpu and mesh.devices.flat[0].compute_capability == "9.0"

    def local(m: int, k: int, widths: tuple[int, ...], dtype: Any, kernel: str, again: bool) -> jax.Array:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), lax.axis_index("tp")), 2 + len(widths))
        lhs, *rhs = (
            jax.random.normal(key, shape, dtype) for key, shape in zip(keys, ((m, k), *((k, n) for n in widths)))
        )
        bias = jax.random.normal(keys[-1], (widths[1],), dtype)
        others = (None,) * (len(widths) - 2)
        call = functools.partial(
            jtf.all_gather_matmul,
            axis_name="tp",
            bias=(None, bias, *others),
            activation=("silu", None, *others),
            precision="highest",
        )
        fused = functools.partial(call, implementation="fused", config={"kernel": kernel})
        if again:
            first = fused(lhs, tuple(rhs))

            def step(_: int, different: jax.Array) -> jax.Array:
                outs = fused(lax.optimization_barrier(lhs), tuple(rhs))
                return different + sum(jnp.sum(out != one) for out, one in zip(outs, first, strict=True))

            return lax.psum(lax.fori_loop(0, 200, step, vary(jnp.int32(0), ("tp",))), "tp")
        gathers = kernel != "hopper_few"
        wide = {"implementation": "xla", "preferred_element_type": jnp.float32}
        expected = jax.tree.leaves(call(lhs, tuple(rhs), return_gathered=gathers, **wide))
        found = jax.tree.leaves(fused(lhs, tuple(rhs), return_gathered=gathers))
        pairs = zip(found, expected, strict=True)
        return jnp.stack([relative_error(out.astype(jnp.float32), want, ("tp",)) for out, want in pairs]).max()

    cases = [
        (*shape, dtype, kernel)
        for kernel in ("portable", "few", *(("hopper_few", "hopper") if on_hopper else ()))
        for dtype in (("bfloat16",) if kernel.startswith("hopper") else ("float32", "bfloat16"))
        for shape in SEVERAL_SHAPES
        if not kernel.startswith("hopper") or all(size % 8 == 0 for size in (shape[1], *shape[2]))
        if "few" not in kernel or shape[0] <= 100
    ]
    found = run_all([program(mesh, functools.partial(local, *case, False)) for case in cases])
    for case, error in zip(cases, found, strict=True):
        assert error < TOLERANCE[case[3]], f"{case}: {error}"
    often = [case for case in cases if case[0] in (8, 1030) and case[3] == "bfloat16"]
    for case, different in zip(
        often, run_all([program(mesh, functools.partial(local, *case, True)) for case in often]), strict=True
    ):
        assert different == 0, f"{case}: {different} elements of 200 calls are not the first call's"


def check_repetition(mesh: Mesh, operation: Operation, times: int = 1000) -> None:
    """Call after call with changing operands gives what the first call with those operands gave, bit for bit."""

    def count(m: int, k: int, n: int) -> jax.Array:
        call, lhs, rhs, first = three_calls(operation, m, k, n)

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            same = jnp.array_equal(call(lhs[i % 3], rhs), first[i % 3])
            return wrong + jnp.where(same, 0, 1)

        return lax.fori_loop(0, times, step, jnp.int32(0))

    def local() -> jax.Array:
        return lax.psum(jnp.stack([count(*shape) for shape in REPEATED_SHAPES]), "tp")

    wrong = on_ranks(mesh, local)
    assert not wrong.any(), wrong
    jtf.heap.check()


def check_independent_calls(mesh: Mesh, operation: Operation) -> None:
    """Calls that share a region and depend on nothing of each other, also when XLA replays them as a CUDA graph."""

    def run(implementation: str) -> Callable:
        def local() -> list[jax.Array]:
            call = functools.partial(operation.function, precision="highest", implementation=implementation)
            rhs = local_operands(operation, 9, 64, 512, 512, jnp.float32)[1]
            made = [local_operands(operation, i, m, 512, 512, jnp.float32) for m in (64, 1024) for i in range(4)]
            # All operands first, so that nothing but calls is between the calls.
            return [call(lhs, rhs, "tp") for lhs, _ in lax.optimization_barrier(made)]

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=operation.out_spec, check_vma=False))

    expected, program = run("xla")(), run("fused")
    worst = jax.jit(lambda found, wanted: jnp.max(jnp.stack([_error(x, y) for x, y in zip(found, wanted)])))
    for _ in range(5):
        assert float(worst(program(), expected)) < TOLERANCE["float32"]


def check_mixture_with_reduce_scatter(mesh: Mesh) -> None:
    """Both operations at two shapes, and XLA collectives, take turns in a loop of one program."""

    def local(implementation: str) -> jax.Array:
        a, up = local_operands(GATHER, 0, 1024, 512, 512, jnp.float32)
        c, _ = local_operands(GATHER, 1, 4, 512, 512, jnp.float32)
        _, down = local_operands(SCATTER, 2, 64, 512, 512, jnp.float32)
        keywords = {"axis_name": "tp", "precision": "highest", "implementation": implementation}

        def layer(x: jax.Array) -> jax.Array:
            return jtf.matmul_reduce_scatter(jtf.all_gather_matmul(x, up, **keywords) / 22, down, **keywords) / 22

        def step(state: tuple) -> tuple:
            i, a, c = state
            big = layer(a)
            total = lax.psum(jnp.mean(layer(c)), "tp")
            turned = lax.all_to_all(jtf.all_gather_matmul(c, up, **keywords), "tp", 0, 1, tiled=True)
            return i + 1, jnp.tanh(big + total), jnp.tanh(turned / 22 + layer(c) + jnp.mean(a))

        _, a, c = lax.while_loop(lambda state: state[0] < 50, step, (0, a, c))
        return jnp.concatenate([a, c])

    def run(implementation: str) -> jax.Array:
        program = functools.partial(local, implementation)
        return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=(), out_specs=P("tp"), check_vma=False))()

    wrong = error(run("fused"), run("xla"))
    assert wrong < 1e-3, f"error {wrong}"


def check_meshes(devices: Sequence[jax.Device], operation: Operation = GATHER) -> None:
    """Permuted devices, one axis of two, both axes as one, Explicit axes."""
    world = len(devices)
    check = functools.partial(check_cases, operation=operation)
    small, large = (100, 64, 48, jnp.float32), (520, 64, 48, jnp.bfloat16)
    shuffled = [devices[i] for i in random.Random(1).sample(range(world), world)]
    for order in {tuple(shuffled), tuple(devices[::-1])} - {tuple(devices)}:
        check(mesh_of(order, (world,), ("tp",)), [small, large])
    check(mesh_of(devices, (world,), ("tp",), AxisType.Explicit), [small, large])
    if world % 2 == 0:
        pairs = mesh_of(shuffled, (2, world // 2), ("dp", "tp"))
        check(pairs, [small], axes=("dp", "tp"))
        check(pairs, [large], axes=("tp", "dp"))
        check_data_parallel(pairs, operation)


def check_data_parallel(mesh: Mesh, operation: Operation = GATHER) -> None:
    """Each row of a ("dp", "tp") mesh works on its own, with the same second operand."""

    def local() -> jax.Array:
        lhs, rhs = local_operands(operation, 1, 120, 64, 96, jnp.float32)
        lhs = lhs + lax.axis_index("dp").astype(jnp.float32)
        dimension = {operation.axis: 1} if operation.axis else {}
        call = functools.partial(operation.function, lhs[None], rhs, "tp", precision="highest", **dimension)
        return relative_error(call(implementation="fused"), call(implementation="xla"), ("dp", "tp"))

    wrong = on_ranks(mesh, local, check_vma=True)
    assert wrong < TOLERANCE["float32"], f"error {wrong}"


def _global_errors(mesh: Mesh, compare: Callable[[], list[jax.Array]]) -> None:
    """Runs a program on global arrays; none of its results may be large."""
    program = jax.jit(lambda: jnp.stack(compare()), out_shardings=NamedSharding(mesh, P()))
    found = np.asarray(program())
    assert (found < 1e-4).all(), found
    jtf.heap.check()


def _random(mesh: Mesh, key: int, size: tuple[int, ...], spec: P) -> jax.Array:
    return lax.with_sharding_constraint(jax.random.normal(jax.random.key(key), size), NamedSharding(mesh, spec))


def check_gradients(mesh: Mesh, operation: Operation) -> None:
    """The gradients of one operation."""

    def gradients(implementation: str, *operands: jax.Array) -> tuple[jax.Array, ...]:
        call = on_mesh(operation, mesh, precision="highest", implementation=implementation)
        return jax.grad(lambda a, b: jnp.sum(jnp.sin(call(a, b))), (0, 1))(*operands)

    def compare() -> list[jax.Array]:
        found = []
        for m, k, f in MLPS:
            sizes = operation.sizes(m, *((k, f) if operation is GATHER else (f, k)), mesh.shape["tp"])
            arrays = [_random(mesh, i, size, spec) for i, (size, spec) in enumerate(zip(sizes, operation.in_specs))]
            found += map(_error, gradients("fused", *arrays), gradients("xla", *arrays))
        return found

    _global_errors(mesh, compare)


def mlp_gradients(
    mesh: Mesh, implementation: str, return_gathered: bool, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Of a tensor-parallel MLP, with respect to x [M, K], up [K, F] and down [F, K]."""

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        keywords = {"axis_name": "tp", "precision": "highest", "implementation": implementation}
        hidden = jtf.all_gather_matmul(x, up, return_gathered=return_gathered, **keywords)
        hidden = jax.nn.silu(hidden[0] if return_gathered else hidden)
        return jtf.matmul_reduce_scatter(hidden, down, **keywords)

    specs = (P("tp"), P(None, "tp"), P("tp"))
    layer = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tp"))
    return jax.grad(lambda *args: jnp.sum(jnp.sin(layer(*args))), (0, 1, 2))(*operands)


def check_gradients_of_an_mlp(mesh: Mesh) -> None:
    """Forward and backward of both halves of a layer, and of both with the gathered operand."""

    def compare() -> list[jax.Array]:
        found = []
        for m, k, f in MLPS:
            x, up = _random(mesh, 0, (m, k), P("tp")), _random(mesh, 1, (k, f), P(None, "tp"))
            operands = x, up / 20, _random(mesh, 2, (f, k), P("tp")) / 20
            wanted = mlp_gradients(mesh, "xla", False, *operands)
            for return_gathered in (False, True):
                found += map(_error, mlp_gradients(mesh, "fused", return_gathered, *operands), wanted)
        return found

    _global_errors(mesh, compare)


EPILOGUES = (
    {"bias": True, "activation": "silu", "residual": True},
    {"activation": "gelu_tanh"},
    {"activation": "gelu_exact"},
    {"gate": True, "activation": "silu"},
    {"gate": True, "bias": True, "activation": "gelu_exact", "residual": True},
)


WITHOUT_RESIDUAL = (
    {"bias": True, "activation": "gelu_exact"},
    {"gate": True},
    {"gate": True, "bias": True, "activation": "silu"},
)


def check_epilogues(mesh: Mesh) -> None:
    """Bias, activation, gate and residual, of few rows in f32 and of many in bf16; and in kernels for Hopper."""
    sizes = (*MLPS[0], jnp.float32), (*MLPS[1], jnp.bfloat16)
    cases = [
        (operation, size, given)
        for operation, size, given in itertools.product(OPERATIONS, sizes, EPILOGUES)
        if operation is GATHER or "gate" not in given
    ]
    # Sizes for which kernels for Hopper are the default; with half tiles.
    for rows, dtype in ((2176, jnp.bfloat16), (2176, jnp.float16), (12, jnp.bfloat16), (128, jnp.float16)):
        size = (rows, 1056, 10016, dtype)
        cases += [(GATHER, size, given) for given in (WITHOUT_RESIDUAL if rows > 128 else EPILOGUES)]
        cases += [(SCATTER, size, given) for given in EPILOGUES if rows > 128 and "gate" not in given]

    def error_of(operation: Operation, size: tuple, given: dict) -> jax.Array:
        lhs, rhs = local_operands(operation, 0, *size)
        call = functools.partial(operation.function, lhs, rhs, "tp", precision="highest")
        shape = jax.eval_shape(functools.partial(call, implementation="xla")).shape
        if operation is REDUCE:
            lhs, rhs = lax.psum((lhs, rhs), "tp")  # what is added to the result is the same on all ranks
        others = {"gate": rhs[::-1], "bias": lhs[0, :1] + rhs[0], "residual": jnp.resize(lhs, shape)}
        call = functools.partial(call, **{name: others.get(name, value) for name, value in given.items()})
        expected = call(implementation="xla", preferred_element_type=jnp.float32)
        return relative_error(call(implementation="fused").astype(jnp.float32), expected, "tp")

    found = run_all([program(mesh, functools.partial(error_of, *case)) for case in cases])
    wrong = [
        f"{operation.name} {size[:3]} {', '.join(map(str, given))}: error {error}"
        for (operation, size, given), error in zip(cases, found, strict=True)
        if not error < TOLERANCE[jnp.dtype(size[3]).name]
    ]
    assert not wrong, wrong
    jtf.heap.check()


def check_gradients_of_a_gated_mlp(mesh: Mesh) -> None:
    """A SwiGLU layer with its residual: gradients of x [M, K], up and gate [K, F], and down [F, K]."""

    def gradients(implementation: str, *operands: jax.Array) -> tuple[jax.Array, ...]:
        def local(x: jax.Array, up: jax.Array, gate: jax.Array, down: jax.Array) -> jax.Array:
            keywords = {"axis_name": "tp", "precision": "highest", "implementation": implementation}
            hidden = jtf.all_gather_matmul(x, up, gate=gate, activation="silu", **keywords)
            return jtf.matmul_reduce_scatter(hidden, down, residual=x, **keywords)

        specs = (P("tp"), P(None, "tp"), P(None, "tp"), P("tp"))
        layer = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tp"))
        return jax.grad(lambda *args: jnp.sum(jnp.sin(layer(*args))), (0, 1, 2, 3))(*operands)

    def compare() -> list[jax.Array]:
        found = []
        for m, k, f in MLPS:
            x, down = _random(mesh, 0, (m, k), P("tp")), _random(mesh, 3, (f, k), P("tp")) / 20
            up, gate = (_random(mesh, key, (k, f), P(None, "tp")) / 20 for key in (1, 2))
            found += map(_error, gradients("fused", x, up, gate, down), gradients("xla", x, up, gate, down))
        return found

    _global_errors(mesh, compare)


CHECKS = (
    *(
        functools.partial(check, operation=operation)
        for operation in OPERATIONS
        for check in (
            check_odd_shapes,
            check_random_shapes,
            check_independent_calls,
            check_gradients,
            check_listed_shapes,
        )
    ),
    check_gather_is_exact,
    check_reduce_scatter_rounds_once,
    check_all_reduce_is_the_same_everywhere,
    check_gradients_of_an_mlp,
    check_columns,
    check_several,
    check_epilogues,
    check_gradients_of_a_gated_mlp,
    check_mixture_with_reduce_scatter,
)


def name_of(check: Callable) -> str:
    """For the name of a test."""
    if isinstance(check, functools.partial):
        return f"{check.func.__name__}-{check.keywords['operation'].name}"
    return check.__name__
