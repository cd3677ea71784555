"""What a fused operation must get right on GPUs, as functions of a mesh.

One process may drive all GPUs, or each its own: every comparison happens on the devices and ends in one replicated
number.
"""

import dataclasses
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
from benchmarks.shapes import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER, MatmulShape

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


def up_to(size: int, world: int) -> int:
    """The next size that so many ranks divide."""
    return -(-size // world) * world


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """A fused product.

    Attributes:
      function: of two operands and an axis name.
      in_specs, out_spec: of the operands and the result, on an axis "tp".
      axis: the name of the keyword that says which dimension is gathered or scattered.
      listed: the shapes of its benchmarks.
    """

    function: Callable
    in_specs: tuple[P, P]
    out_spec: P
    axis: str
    listed: tuple[MatmulShape, ...]

    @property
    def name(self) -> str:
        return self.function.__name__

    def sizes(self, m: int, k: int, n: int, world: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of whole operands; each sharded size is rounded up to what the ranks divide."""
        rows, columns = up_to(m, world), up_to(n, world) if self is GATHER else n
        contracted = k if self is GATHER else up_to(k, world)
        return (rows, contracted), (contracted, columns)


GATHER = Operation(
    function=jtf.all_gather_matmul,
    in_specs=(P("tp", None), P(None, "tp")),
    out_spec=P(None, "tp"),
    axis="axis",
    listed=ALL_GATHER_MATMUL,
)
SCATTER = Operation(
    function=jtf.matmul_reduce_scatter,
    in_specs=(P(None, "tp"), P("tp", None)),
    out_spec=P("tp"),
    axis="scatter_dimension",
    listed=MATMUL_REDUCE_SCATTER,
)


def mesh_of(
    devices: Sequence[jax.Device], shape: tuple[int, ...], names: tuple[str, ...], axis_type=AxisType.Auto
) -> Mesh:
    return Mesh(np.array(devices).reshape(shape), names, axis_types=(axis_type,) * len(names))


def normal(key: int, shape: tuple[int, ...], dtype, mesh: Mesh, spec: P) -> jax.Array:
    make = jax.jit(lambda k: jax.random.normal(k, shape, dtype), out_shardings=NamedSharding(mesh, spec))
    return make(jax.random.key(key))


def operands(
    m: int, k: int, n: int, dtype, mesh: Mesh, key: int = 0, operation: Operation = GATHER
) -> tuple[jax.Array, jax.Array]:
    """lhs [m, k] and rhs [k, n] as the operation wants them sharded."""
    lhs, rhs = operation.sizes(m, k, n, mesh.shape["tp"])
    return (
        normal(key, lhs, dtype, mesh, operation.in_specs[0]),
        normal(key + 1, rhs, dtype, mesh, operation.in_specs[1]),
    )


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


def errors(
    mesh: Mesh, cases: Sequence[tuple], *, operation: Operation = GATHER, axes="tp", check_vma: bool = True
) -> list[float]:
    """The relative error of the fused kernel for each case (m, k, n, dtype), all in one program."""
    names = (axes,) if isinstance(axes, str) else axes
    world = int(np.prod([mesh.shape[name] for name in names]))

    def local() -> jax.Array:
        found = []
        for i, (m, k, n, dtype) in enumerate(cases):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(i), lax.axis_index(names)))
            lhs, rhs = (
                jax.random.normal(key, [size // world if name else size for size, name in zip(sizes, spec)], dtype)
                for key, sizes, spec in zip(keys, operation.sizes(m, k, n, world), operation.in_specs)
            )
            call = functools.partial(operation.function, lhs, rhs, axes, precision="highest")
            result = call(implementation="fused").astype(jnp.float32)
            # In f32, because XLA adds up partial products that it has rounded to the operands' type.
            expected = call(implementation="xla", preferred_element_type=jnp.float32)
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


def check_listed_shapes(mesh: Mesh, operation: Operation) -> None:
    """The shapes of the benchmarks."""
    for shape in operation.listed:
        check_cases(mesh, [(shape.m, shape.k, shape.n, jnp.bfloat16)], operation=operation, check_vma=False)


def check_odd_shapes(mesh: Mesh, operation: Operation) -> None:
    """Sizes that nothing divides, in every dtype."""
    cases = [(*shape, dtype) for shape in ODD_SHAPES for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)]
    check_cases(mesh, cases, operation=operation)


def check_random_shapes(mesh: Mesh, operation: Operation, count: int = 20, seed: int = 0) -> None:
    """Sizes drawn at random, small and large."""
    draw = random.Random(seed)
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    cases = [(*(round(2 ** draw.uniform(0, 11.5)) for _ in range(3)), draw.choice(dtypes)) for _ in range(count)]
    check_cases(mesh, cases, operation=operation, check_vma=False)


def check_gather_is_exact(mesh: Mesh) -> None:
    """Times the identity, the product is the gathered lhs, bit for bit; and so is what `return_gathered` gives."""
    for dtype, rows in itertools.product((jnp.float32, jnp.bfloat16), (64, 1024)):
        lhs, _ = operands(rows, 256, 256, dtype, mesh)
        identity = jax.device_put(jnp.eye(256, dtype=dtype), NamedSharding(mesh, P(None, "tp")))
        found = gather_matmul(mesh, precision="highest", implementation="fused")(lhs, identity)
        assert bool(jax.jit(jnp.array_equal)(found, lhs)), f"{dtype} {rows}"

        def local(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            call = functools.partial(jtf.all_gather_matmul, lhs, rhs, "tp", implementation="fused")
            _, gathered = call(return_gathered=True)
            wrong = jnp.any(gathered != lax.all_gather(lhs, "tp", tiled=True))
            return lax.psum(wrong.astype(jnp.int32), "tp")

        program = jax.shard_map(local, mesh=mesh, in_specs=GATHER.in_specs, out_specs=P(), check_vma=False)
        assert int(jax.jit(program)(lhs, identity)) == 0, f"{dtype} {rows}"


def check_sum_is_rounded_once(mesh: Mesh) -> None:
    """Of small integers every sum is exact in f32, so the result is their sum as bf16, bit for bit."""

    def local(rows: int) -> jax.Array:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(0), lax.axis_index("tp")))
        sizes = ((up_to(rows, mesh.shape["tp"]), 384), (384, 256))
        lhs, rhs = (jax.random.randint(key, size, -4, 5).astype(jnp.bfloat16) for key, size in zip(keys, sizes))
        found = jtf.matmul_reduce_scatter(lhs, rhs, "tp", implementation="fused")
        total = lax.psum_scatter(jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32), "tp", tiled=True)
        return lax.psum(jnp.sum(found != total.astype(jnp.bfloat16)), "tp")

    for rows in (64, 1024):
        count = functools.partial(local, rows)
        program = jax.shard_map(count, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
        assert int(jax.jit(program)()) == 0, f"{rows} rows"


def check_repetition(mesh: Mesh, m: int, k: int, n: int, times: int, operation: Operation = GATHER) -> None:
    """Call after call with changing operands gives what the first call with those operands gave, bit for bit."""
    lhs = [operands(m, k, n, jnp.bfloat16, mesh, key, operation)[0] for key in (0, 1, 2)]
    rhs = operands(m, k, n, jnp.bfloat16, mesh, operation=operation)[1]

    def local(rhs: jax.Array, *lhs: jax.Array) -> jax.Array:
        call = functools.partial(operation.function, axis_name="tp", implementation="fused")
        lhs = jnp.stack(lhs)
        first = jnp.stack([call(x, rhs) for x in lhs])

        def step(i: jax.Array, wrong: jax.Array) -> jax.Array:
            same = jnp.array_equal(call(lhs[i % 3], rhs), first[i % 3])
            return wrong + jnp.where(same, 0, 1)

        return lax.psum(lax.fori_loop(0, times, step, jnp.int32(0)), "tp")

    lhs_spec, rhs_spec = operation.in_specs
    program = jax.shard_map(local, mesh=mesh, in_specs=(rhs_spec, *[lhs_spec] * 3), out_specs=P(), check_vma=False)
    assert int(jax.jit(program)(rhs, *lhs)) == 0


def check_independent_calls(mesh: Mesh, operation: Operation) -> None:
    """Calls that share a region and depend on nothing of each other, also when XLA replays them as a CUDA graph."""
    lhs = [operands(m, 512, 512, jnp.float32, mesh, key, operation)[0] for m in (64, 1024) for key in range(4)]
    rhs = operands(64, 512, 512, jnp.float32, mesh, 9, operation)[1]

    def run(implementation: str) -> Callable:
        def local(rhs: jax.Array, *lhs: jax.Array) -> list[jax.Array]:
            call = functools.partial(operation.function, precision="highest", implementation=implementation)
            return [call(x, rhs, "tp") for x in lhs]

        lhs_spec, rhs_spec = operation.in_specs
        specs = (rhs_spec, *[lhs_spec] * len(lhs))
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=operation.out_spec, check_vma=False))

    expected, program = run("xla")(rhs, *lhs), run("fused")
    for _ in range(5):
        for result, want in zip(program(rhs, *lhs), expected, strict=True):
            assert error(result, want) < TOLERANCE["float32"]


def check_mixture(mesh: Mesh) -> None:
    """Both operations at two shapes, and XLA collectives, take turns in a loop of one program."""
    up, down = operands(64, 512, 512, jnp.float32, mesh)[1], operands(64, 512, 512, jnp.float32, mesh, 5, SCATTER)[1]
    large, small = operands(1024, 512, 512, jnp.float32, mesh)[0], operands(4, 512, 512, jnp.float32, mesh, 7)[0]

    def local(a: jax.Array, c: jax.Array, up: jax.Array, down: jax.Array, implementation: str) -> jax.Array:
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
        specs = (P("tp"), P("tp"), P(None, "tp"), P("tp"))
        program = functools.partial(local, implementation=implementation)
        return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=False))(
            large, small, up, down
        )

    wrong = error(run("fused"), run("xla"))
    assert wrong < 1e-3, f"error {wrong}"


def check_meshes(devices: Sequence[jax.Device], operation: Operation = GATHER) -> None:
    """Permuted devices, one axis of two, both axes as one, Explicit axes."""
    world = len(devices)
    check = functools.partial(check_cases, operation=operation)
    small, large = (100, 64, 48, jnp.float32), (520, 64, 48, jnp.bfloat16)
    check(mesh_of(devices[::-1], (world,), ("tp",)), [small, large])
    shuffled = [devices[i] for i in random.Random(1).sample(range(world), world)]
    check(mesh_of(shuffled, (world,), ("tp",)), [small, large])
    check(mesh_of(devices, (world,), ("tp",), AxisType.Explicit), [small, large])
    if world % 2 == 0:
        pairs = mesh_of(shuffled, (2, world // 2), ("dp", "tp"))
        check(pairs, [small], axes=("dp", "tp"))
        check(pairs, [large], axes=("tp", "dp"))
        check_data_parallel(pairs, operation)


def check_data_parallel(mesh: Mesh, operation: Operation = GATHER) -> None:
    """Each row of a ("dp", "tp") mesh works on its own."""
    lhs_spec, rhs_spec = operation.in_specs
    lhs = normal(0, (2, 120, 64), jnp.float32, mesh, P("dp", *lhs_spec))
    rhs = normal(1, (64, 96), jnp.float32, mesh, rhs_spec)

    def run(implementation: str) -> jax.Array:
        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            return operation.function(
                x, w, "tp", precision="highest", implementation=implementation, **{operation.axis: 1}
            )

        specs, out_spec = (P("dp", *lhs_spec), rhs_spec), P("dp", *operation.out_spec)
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_spec))(lhs, rhs)

    wrong = error(run("fused"), run("xla"))
    assert wrong < TOLERANCE["float32"], f"error {wrong}"


def check_gradients(mesh: Mesh, operation: Operation) -> None:
    """The gradients of one operation."""
    for m, n in ((60, 36), (1028, 260)):
        lhs, rhs = operands(m, 129, n, jnp.float32, mesh, operation=operation)

        def gradients(implementation: str, lhs: jax.Array = lhs, rhs: jax.Array = rhs) -> tuple:
            call = on_mesh(operation, mesh, precision="highest", implementation=implementation)
            return jax.jit(jax.grad(lambda a, b: jnp.sum(jnp.sin(call(a, b))), (0, 1)))(lhs, rhs)

        for found, want in zip(gradients("fused"), gradients("xla"), strict=True):
            assert error(found, want) < 1e-4


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
    return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(layer(*args))), (0, 1, 2)))(*operands)


def check_gradients_of_an_mlp(mesh: Mesh) -> None:
    """Forward and backward of both halves of a layer, and of both with the gathered operand."""
    for m, k, f in ((60, 129, 132), (2048, 512, 1024)):
        x, up = operands(m, k, f, jnp.float32, mesh)
        down = operands(m, f, k, jnp.float32, mesh, 5, SCATTER)[1]
        wanted = mlp_gradients(mesh, "xla", False, x, up / 20, down / 20)
        for return_gathered in (False, True):
            found = mlp_gradients(mesh, "fused", return_gathered, x, up / 20, down / 20)
            for mine, xla_s in zip(found, wanted, strict=True):
                assert error(mine, xla_s) < 1e-4


def _of(operation: Operation, *checks: Callable) -> list[Callable]:
    return [functools.partial(check, operation=operation) for check in checks]


CHECKS = (
    *_of(GATHER, check_odd_shapes, check_random_shapes, check_independent_calls, check_gradients, check_listed_shapes),
    *_of(SCATTER, check_odd_shapes, check_random_shapes, check_independent_calls, check_gradients, check_listed_shapes),
    check_gather_is_exact,
    check_sum_is_rounded_once,
    check_gradients_of_an_mlp,
    check_mixture,
)


def name_of(check: Callable) -> str:
    """For the name of a test."""
    if isinstance(check, functools.partial):
        return f"{check.func.__name__}-{check.keywords['operation'].name}"
    return check.__name__


def check_all(devices: Sequence[jax.Device], repetitions: int = 1000) -> None:
    """Everything above, on a mesh of one axis unless it says otherwise."""
    mesh = mesh_of(devices, (len(devices),), ("tp",))
    for check in CHECKS:
        check(mesh)
    for operation in (GATHER, SCATTER):
        check_meshes(devices, operation)
        check_repetition(mesh, 16, 1024, 2048, repetitions, operation)
        check_repetition(mesh, 1024, 1024, 2048, repetitions, operation)
