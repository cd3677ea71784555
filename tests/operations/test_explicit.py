"""`jax.shard_map` over some axes of an Explicit mesh, with arrays that are sharded along the other ones."""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import primitive
from jaxtaxfree.primitive import Unsupported
from tests.conftest import MeshFactory
from tests.helpers.support import TRITON_CALL, fails, lower_for_cuda

B, S, K, N = 4, 8, 16, 12


@dataclasses.dataclass(frozen=True)
class Case:
    """A call, by which the axis "dp" is left over.

    Attributes:
      call: of this rank's operands, along "tp".
      plain: the same of whole operands, on one device.
      shapes: of the whole operands.
      specs: how they are sharded along both axes.
      out_spec: the same of the result.
    """

    call: Callable[..., jax.Array]
    plain: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    out_spec: P


CASES = {
    "psum": Case(
        functools.partial(jtf.psum, axis_name="tp"),
        lambda x: x[:, :S] + x[:, S:],
        ((B, 2 * S, K),),
        (P("dp", "tp"),),
        P("dp"),
    ),
    "all_gather": Case(
        functools.partial(jtf.all_gather, axis_name="tp", axis=1, tiled=True),
        lambda x: jnp.concatenate([x, x], axis=-1),
        ((B, 2 * S, K),),
        (P("dp", "tp"),),
        P("dp", None, "tp"),
    ),
    "all_gather-new": Case(
        functools.partial(jtf.all_gather, axis_name="tp", axis=1),
        lambda x: jnp.concatenate([x.reshape(B, 2, S, K)] * 2, axis=-1),
        ((B, 2 * S, K),),
        (P("dp", "tp"),),
        P("dp", None, None, "tp"),
    ),
    "psum_scatter": Case(
        functools.partial(jtf.psum_scatter, axis_name="tp", scatter_dimension=1, tiled=True),
        lambda x: x[:, :S] + x[:, S:],
        ((B, 2 * S, K),),
        (P("dp", "tp"),),
        P("dp", "tp"),
    ),
    "all_to_all": Case(
        functools.partial(jtf.all_to_all, axis_name="tp", split_axis=1, concat_axis=1, tiled=True),
        lambda x: x.reshape(B, 2, 2, S // 2, K).swapaxes(1, 2).reshape(B, 2 * S, K),
        ((B, 2 * S, K),),
        (P("dp", "tp"),),
        P("dp", "tp"),
    ),
    "all_gather_matmul": Case(
        functools.partial(jtf.all_gather_matmul, axis_name="tp", axis=1, precision="highest"),
        jnp.matmul,
        ((B, S, K), (K, N)),
        (P("dp", "tp"), P(None, "tp")),
        P("dp", None, "tp"),
    ),
    "all_gather_matmul-first": Case(
        functools.partial(jtf.all_gather_matmul, axis_name="tp", precision="highest"),
        jnp.matmul,
        ((S, B, K), (K, N)),
        (P("tp", "dp"), P(None, "tp")),
        P(None, "dp", "tp"),
    ),
    "all_gather_matmul-columns": Case(
        functools.partial(jtf.all_gather_matmul, axis_name="tp", axis=1, precision="highest"),
        jnp.matmul,
        ((B, S, K), (K, 2 * N)),
        (P(None, "tp"), P(None, ("tp", "dp"))),
        P(None, None, ("tp", "dp")),
    ),
    "all_gather_matmul-epilogue": Case(
        lambda x, w, gate, bias, residual, **keywords: jtf.all_gather_matmul(
            x,
            w,
            "tp",
            axis=1,
            gate=gate,
            bias=bias,
            residual=residual,
            activation="silu",
            precision="highest",
            **keywords,
        ),
        lambda x, w, gate, bias, residual: jax.nn.silu(x @ gate) * (x @ w + bias) + residual,
        ((B, S, K), (K, N), (K, N), (N,), (B, S, N)),
        (P("dp", "tp"), P(None, "tp"), P(None, "tp"), P("tp"), P(None, None, "tp")),
        P("dp", None, "tp"),
    ),
    "all_gather_matmul-gathered": Case(
        lambda x, w, **keywords: jnp.concatenate(
            jtf.all_gather_matmul(x, w, "tp", axis=1, return_gathered=True, precision="highest", **keywords), axis=-1
        ),
        lambda x, w: jnp.concatenate([x @ w[:, :6], x, x @ w[:, 6:], x], axis=-1),
        ((B, S, K), (K, N)),
        (P("dp", "tp"), P(None, "tp")),
        P("dp", None, "tp"),
    ),
    "matmul_reduce_scatter": Case(
        functools.partial(jtf.matmul_reduce_scatter, axis_name="tp", scatter_dimension=1, precision="highest"),
        jnp.matmul,
        ((B, S, K), (K, N)),
        (P("dp", None, "tp"), P("tp")),
        P("dp", "tp"),
    ),
    "matmul_reduce_scatter-epilogue": Case(
        lambda x, w, bias, residual, **keywords: jtf.matmul_reduce_scatter(
            x, w, "tp", scatter_dimension=1, bias=bias, residual=residual, precision="highest", **keywords
        ),
        lambda x, w, bias, residual: x @ w + bias + residual,
        ((B, S, K), (K, N), (N,), (B, S, N)),
        (P("dp", None, "tp"), P("tp"), P(), P("dp", "tp")),
        P("dp", "tp"),
    ),
    "matmul_all_reduce": Case(
        functools.partial(jtf.matmul_all_reduce, axis_name="tp", precision="highest"),
        jnp.matmul,
        ((B, S, K), (K, N)),
        (P("dp", None, "tp"), P("tp")),
        P("dp"),
    ),
    "matmul_all_reduce-epilogue": Case(
        lambda x, w, bias, **keywords: jtf.matmul_all_reduce(
            x, w, "tp", bias=bias, activation="silu", precision="highest", **keywords
        ),
        lambda x, w, bias: jax.nn.silu(x @ w + bias),
        ((B, S, K), (K, N), (N,)),
        (P("dp", None, "tp"), P("tp"), P()),
        P("dp"),
    ),
    "matmul_all_reduce-columns": Case(
        functools.partial(jtf.matmul_all_reduce, axis_name="tp", precision="highest"),
        jnp.matmul,
        ((B, S, K), (K, N)),
        (P(None, None, "tp"), P("tp", "dp")),
        P(None, None, "dp"),
    ),
    "matmul_reduce_scatter-columns": Case(
        functools.partial(jtf.matmul_reduce_scatter, axis_name="tp", scatter_dimension=1, precision="highest"),
        jnp.matmul,
        ((B, S, K), (K, N)),
        (P(None, None, "tp"), P("tp", "dp")),
        P(None, "tp", "dp"),
    ),
    "decode_attention": Case(
        functools.partial(jtf.decode_attention, axis_name="tp"),
        jax.nn.dot_product_attention,
        ((B, 1, 4, 16), (B, 2 * S, 2, 16), (B, 2 * S, 2, 16)),
        (P("dp"), P("dp", "tp"), P("dp", "tp")),
        P("dp"),
    ),
    "decode_attention-lengths": Case(
        lambda query, key, value, **keywords: jtf.decode_attention(
            query, key, value, "tp", key_value_seq_lengths=jnp.array([3, 16, 9, 12]), **keywords
        ),
        lambda query, key, value: jax.nn.dot_product_attention(
            query, key, value, key_value_seq_lengths=jnp.array([3, 16, 9, 12])
        ),
        ((B, 1, 4, 16), (B, 2 * S, 2, 16), (B, 2 * S, 2, 16)),
        (P("dp"), P("dp", "tp"), P("dp", "tp")),
        P("dp"),
    ),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def explicit(shape: tuple[int, ...], names: tuple[str, ...] = ("dp", "tp"), kinds: Any = None) -> Mesh:
    devices = np.array(jax.devices("cpu")[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, names, axis_types=kinds or (AxisType.Explicit,) * len(names))


@pytest.fixture
def mesh() -> Mesh:
    return explicit((2, 2))


def only_tp(spec: P) -> P:
    return P(*("tp" if "tp" in (entry if isinstance(entry, tuple) else (entry,)) else None for entry in spec))


def program(mesh: Mesh | None, case: Case, check_vma: bool = True, **keywords: Any) -> Callable[..., jax.Array]:
    return jax.shard_map(
        functools.partial(case.call, **keywords),
        mesh=mesh,
        in_specs=tuple(map(only_tp, case.specs)),
        out_specs=only_tp(case.out_spec),
        axis_names={"tp"},
        check_vma=check_vma,
    )


def operands(case: Case) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape in case.shapes]


def on(mesh: Mesh, arrays: Sequence[np.ndarray], specs: Sequence[P]) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def gradients(f: Callable, given: Sequence[Any], argnums: Sequence[int] | None = None) -> Any:
    argnums = range(len(given)) if argnums is None else argnums
    return jax.jit(jax.grad(lambda *given: jnp.sum(jnp.sin(f(*given))), tuple(argnums)))(*given)


@pytest.mark.covers(1)
@each_case
@pytest.mark.parametrize("implementation", (None, "simulate"))
def test_values(mesh: Mesh, case: Case, implementation: str | None) -> None:
    arrays = operands(case)
    found = jax.jit(program(mesh, case, implementation=implementation))(*on(mesh, arrays, case.specs))
    assert_close(found, jax.jit(case.plain)(*arrays))
    assert jax.typeof(found).sharding.spec == P(*case.out_spec, *[None] * (found.ndim - len(case.out_spec)))


@pytest.mark.usefixtures("no_code")
@each_case
def test_one_kernel(mesh: Mesh, case: Case) -> None:
    given = on(mesh, operands(case), case.specs)
    assert lower_for_cuda(program(mesh, case, implementation="fused"), *given).count(TRITON_CALL) == 1


@each_case
def test_gradients(mesh: Mesh, case: Case) -> None:
    arrays = operands(case)
    given = on(mesh, arrays, case.specs)
    found = gradients(program(mesh, case), given)
    for x, like, wanted in zip(found, given, gradients(case.plain, arrays), strict=True):
        assert jax.typeof(x) == jax.typeof(like)
        assert_close(x, wanted)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_each_operand_alone(mesh: Mesh, name: str) -> None:
    case, arrays = CASES[name], operands(CASES[name])
    given = on(mesh, arrays, case.specs)
    for i, wanted in enumerate(gradients(case.plain, arrays)):
        (found,) = gradients(program(mesh, case, check_vma=False), given, [i])
        assert_close(found, wanted)


# What `jax.vmap` maps: all operands of what takes no weights, otherwise lhs.
def mapped(name: str, case: Case) -> list[bool]:
    return [i == 0 or "matmul" not in name for i in range(len(case.shapes))]


@pytest.mark.covers(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sharded", ("examples", "rows"))
def test_vmap(mesh: Mesh, name: str, sharded: str) -> None:
    """The examples are sharded along the axis that is left over, or what the case says, in each of them."""
    case, of = CASES[name], mapped(name, CASES[name])

    def spec_of(spec: P, maps: bool) -> P:
        if sharded == "rows":
            return P(None, *spec) if maps else spec
        return P("dp", *only_tp(spec)) if maps else only_tp(spec)

    rng = np.random.default_rng(0)
    shapes = [(2, *shape) if maps else shape for shape, maps in zip(case.shapes, of)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    in_axes = tuple(0 if maps else None for maps in of)
    call = jax.vmap(functools.partial(case.call, implementation="simulate"), in_axes=in_axes)
    specs = [spec_of(spec, maps) for spec, maps in zip(case.specs, of)]
    on_mesh = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=tuple(map(only_tp, specs)),
        out_specs=P(None, *only_tp(case.out_spec)),
        axis_names={"tp"},
    )
    found = jax.jit(on_mesh)(*on(mesh, arrays, specs))
    assert_close(found, jax.vmap(case.plain, in_axes=in_axes)(*arrays))
    assert jax.typeof(found).sharding.spec[0] == ("dp" if sharded == "examples" else None)


def test_vmap_over_queries_of_the_same_keys_that_are_sharded(mesh: Mesh) -> None:
    case = CASES["decode_attention"]
    query, key, value = operands(case)
    call = jax.vmap(functools.partial(case.call, implementation="simulate"), in_axes=(0, None, None))
    on_mesh = jax.shard_map(
        call, mesh=mesh, in_specs=(P(), P(None, "tp"), P(None, "tp")), out_specs=P(), axis_names={"tp"}
    )
    with fails(Unsupported, "decode_attention", "queries of the same keys", "sharded along 'dp'"):
        on_mesh(*on(mesh, [np.stack([query] * 2), key, value], (P("dp"), P(None, "tp"), P(None, "tp"))))


def test_a_paged_cache(mesh: Mesh) -> None:
    """Of which each rank has two pages of four positions for a sequence; only the tables are of sequences."""
    query, key, value = operands(CASES["decode_attention"])
    pages = [np.moveaxis(x.reshape(B, 2, 2, 4, 2, 16), 1, 0).reshape(4 * B, 4, 2, 16) for x in (key, value)]
    given = on(
        mesh,
        [query, *pages, np.arange(2 * B, dtype=np.int32).reshape(B, 2)],
        (P("dp"), P("tp"), P("tp"), P("dp")),
    )

    def attention(implementation: str | None) -> Callable[..., jax.Array]:
        return jax.shard_map(
            lambda query, key, value, tables: jtf.decode_attention(
                query, key, value, "tp", block_tables=tables, implementation=implementation
            ),
            mesh=mesh,
            in_specs=(P(), P("tp"), P("tp"), P()),
            out_specs=P(),
            axis_names={"tp"},
        )

    for implementation in (None, "simulate"):
        found = jax.jit(attention(implementation))(*given)
        assert_close(found, jax.nn.dot_product_attention(query, key, value))
    (found,) = gradients(attention(None), given, [0])
    assert_close(found, gradients(jax.nn.dot_product_attention, (query, key, value))[0])
    assert lower_for_cuda(attention("fused"), *given).count(TRITON_CALL) == 1


def layers(x: jax.Array, w: jax.Array, gate: jax.Array, v: jax.Array, implementation: str | None) -> jax.Array:
    def layer(x: jax.Array, weights: Any) -> Any:
        w, gate, v = weights
        how: dict[str, Any] = {"precision": "highest", "implementation": implementation}
        h = jtf.all_gather_matmul(x, w, "tp", axis=1, gate=gate, activation="silu", **how)
        return jtf.matmul_reduce_scatter(h, v, "tp", scatter_dimension=1, residual=x, **how), None

    return jax.lax.scan(jax.checkpoint(layer), x, (w, gate, v))[0]


def plain_layers(x: Any, w: Any, gate: Any, v: Any) -> Any:
    for i in range(len(w)):
        x = (jax.nn.silu(x @ gate[i]) * (x @ w[i])) @ v[i] + x
    return x


LAYERS = Case(
    layers,
    plain_layers,
    ((B, S, K), (2, K, N), (2, K, N), (2, N, K)),
    (P("dp", "tp"), P(None, None, "tp"), P(None, None, "tp"), P(None, "tp")),
    P("dp", "tp"),
)


@pytest.mark.parametrize(
    ("shape", "names", "over"),
    (
        ((2, 2), ("tp", "dp"), "dp"),
        ((2, 1, 2), ("tp", "one", "dp"), "dp"),
        ((2, 2, 2), ("ep", "tp", "dp"), ("dp", "ep")),
    ),
)
def test_layers(shape: tuple[int, ...], names: tuple[str, ...], over: Any) -> None:
    """In any order of the axes, along several, and where one has a single device."""
    mesh = explicit(shape, names)
    arrays = [x / 4 for x in operands(LAYERS)]
    given = on(mesh, arrays, (P(over, "tp"), *LAYERS.specs[1:]))
    with jax.set_mesh(mesh):
        call = program(None, LAYERS, implementation="simulate")
        assert_close(jax.jit(call)(*given), plain_layers(*arrays))
        for x, wanted in zip(gradients(call, given), gradients(plain_layers, arrays), strict=True):
            assert_close(x, wanted)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="shard_map of JAX 0.11 wants reduced axes in in_specs")
@pytest.mark.parametrize("name", ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"))
def test_weights_whose_gradients_are_added_up_later(mesh: Mesh, name: str) -> None:
    """Those that are `reduced` along the axis have terms of a sum for their gradient."""
    case, arrays = CASES[name], operands(CASES[name])
    call = program(None, case, implementation="simulate")

    def of_reduced(x: jax.Array, w: jax.Array) -> jax.Array:
        return call(x, jax.reshard(w, P(*case.specs[1], reduced={"dp"})))

    with jax.set_mesh(mesh):
        (found,) = gradients(of_reduced, on(mesh, arrays, case.specs), [1])
    assert_close(found, gradients(case.plain, arrays)[1])


def test_kernels_of_a_gradient(mesh: Mesh) -> None:
    """Of a layer's forward pass two, and of its backward pass, which repeats it, two more."""
    given = on(mesh, operands(LAYERS), LAYERS.specs)
    call = program(mesh, LAYERS, implementation="fused")
    backward = jax.grad(lambda *given: jnp.sum(call(*given)), (0, 1, 2, 3))
    assert lower_for_cuda(call, *given).count(TRITON_CALL) == 2
    assert lower_for_cuda(backward, *given).count(TRITON_CALL) == 5


# By name of the case, how its operands are sharded instead, and which dimension is in the way.
INSEPARABLE = {
    "all_gather": ((P(None, ("tp", "dp")),), "dimension 1 of an operand of 3"),
    "psum_scatter": ((P(None, ("tp", "dp")),), "dimension 1 of an operand of 3"),
    "all_gather_matmul": ((P(None, ("tp", "dp")), P(None, "tp")), "dimension 1 of an operand of 3"),
    "all_gather_matmul-first": ((P("tp", None, "dp"), P(None, "tp")), "dimension 2 of an operand of 3"),
    "all_gather_matmul-columns": ((P(None, "tp"), P("dp", "tp")), "dimension 0 of an operand of 2"),
    "matmul_reduce_scatter": ((P(None, "dp", "tp"), P("tp")), "dimension 1 of an operand of 3"),
    "matmul_reduce_scatter-epilogue": (
        (P(None, None, ("tp", "dp")), P("tp"), P(), P(None, "tp")),
        "dimension 2 of an operand of 3",
    ),
    "matmul_all_reduce": ((P(None, None, "tp"), P(("tp", "dp"))), "dimension 0 of an operand of 2"),
    "decode_attention": ((P(), P(None, "tp"), P(None, ("tp", "dp"))), "dimension 1 of an operand of 4"),
}


@pytest.mark.parametrize("name", INSEPARABLE)
def test_a_dimension_that_a_kernel_needs_whole(mesh: Mesh, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (specs, dimension), case = INSEPARABLE[name], CASES[name]
    arrays = operands(case)
    given = on(mesh, arrays, specs)
    why = "leaves the mesh axis 'dp' over", dimension, "needs it whole", "jax.reshard the operand"
    for implementation, platform in (("simulate", "cpu"), ("fused", "cuda")):
        with fails(Unsupported, name.partition("-")[0], *why):
            lower_for_cuda(program(mesh, case, implementation=implementation), *given, platforms=(platform,))
    primitive.forget_warnings()
    with caplog.at_level(logging.WARNING, "jaxtaxfree"):
        assert_close(jax.jit(program(mesh, case))(*given), case.plain(*arrays))
    (message,) = caplog.messages
    assert all(part in message for part in why)
    primitive.forget_warnings()


# The same, where a program in plain `lax` has no type either, because JAX does not choose where a sum lies.
NO_TYPE = {
    "all_gather_matmul": ((P(None, "tp", "dp"), P("dp", "tp")), "dimension 2 of an operand of 3"),
    "matmul_reduce_scatter": ((P(None, None, ("tp", "dp")), P(("tp", "dp"))), "dimension 2 of an operand of 3"),
    "matmul_all_reduce": ((P(None, None, ("tp", "dp")), P(("tp", "dp"))), "dimension 2 of an operand of 3"),
    "decode_attention": ((P(), P(None, ("tp", "dp")), P(None, ("tp", "dp"))), "dimension 1 of an operand of 4"),
}


@pytest.mark.parametrize("name", NO_TYPE)
def test_a_sum_along_an_axis_that_is_left_over(mesh: Mesh, name: str) -> None:
    (specs, dimension), case = NO_TYPE[name], CASES[name]
    given = on(mesh, operands(case), specs)
    with fails(ValueError, f"{name} cannot take these operands", "'dp' over", dimension, "jax.reshard the operand"):
        jax.eval_shape(program(mesh, case), *given)


def test_operands_that_are_sharded_along_different_axes() -> None:
    mesh = explicit((2, 2, 2), ("dp", "ep", "tp"))
    case = CASES["matmul_reduce_scatter-epilogue"]
    given = on(mesh, operands(case), (P("dp", None, "tp"), P("tp"), P(), P("ep", "tp")))
    with fails(ValueError, "matmul_reduce_scatter", "'ep' over", "needs it sharded along 'dp', as another operand is"):
        jax.eval_shape(program(mesh, case), *given)


def test_an_axis_that_is_automatic_besides() -> None:
    mesh = explicit((2, 2, 2), ("dp", "auto", "tp"), (AxisType.Explicit, AxisType.Auto, AxisType.Explicit))
    case = CASES["psum"]
    given = on(mesh, operands(case), case.specs)
    with fails(Unsupported, "psum", "['dp', 'auto']", "make all axes manual", "axis_names is left out"):
        lower_for_cuda(program(mesh, case, implementation="fused"), *given)


def test_an_operation_that_does_not_say_what_its_dimensions_are(mesh: Mesh) -> None:
    def double(x: jax.Array, *, axes: tuple[str, ...], **_: Any) -> list[jax.Array]:
        return [jax.lax.psum(x, axes)]

    sums_p = primitive.collective("sums", reference=double, fused=double, slower=lambda *_, **__: None)
    how = {"axes": ("tp",), "implementation": "fused", "config": ()}
    call = Case(lambda x: sums_p.bind(x, **how)[0], lambda x: x, ((B, S, K),), (P("dp", "tp"),), P("dp"))
    with fails(Unsupported, "sums", "['dp']", "make all axes manual"):
        lower_for_cuda(program(mesh, call), *on(mesh, operands(call), call.specs))


def check_on_devices(mesh: Mesh, case: Case) -> None:
    """Values and gradients of the kernel, on the devices of this process."""
    arrays = operands(case)
    given = on(mesh, arrays, case.specs)
    call = program(mesh, case, implementation="fused")
    with jax.default_matmul_precision("highest"):
        found = jax.jit(call)(*given), *gradients(call, given)
        wanted = case.plain(*arrays), *gradients(case.plain, arrays)
    for x, y in zip(found, wanted, strict=True):
        for part in x.addressable_shards:
            assert_close(part.data, np.asarray(y)[part.index], 1e-3)


@each_case
@pytest.mark.parametrize(
    "shape", (pytest.param((1, 2), marks=pytest.mark.gpu(2)), pytest.param((2, 2), marks=pytest.mark.gpu(4)))
)
def test_on_gpus(gpu_mesh: MeshFactory, case: Case, shape: tuple[int, int]) -> None:
    mesh = gpu_mesh(shape, ("dp", "tp"))
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    check_on_devices(mesh, case)
