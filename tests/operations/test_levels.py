"""Teams that span hosts: kernels inside of hosts, XLA across. One process plays all hosts; no GPU needed."""

import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import levels, primitive
from jaxtaxfree.heap import Place
from jaxtaxfree.levels import Split
from jaxtaxfree.ops import levels as forms
from jaxtaxfree.ops.collectives import all_gather_p, psum_p, psum_scatter_p
from jaxtaxfree.ops.matmul_all_reduce.common import EXACT_SIZE
from jaxtaxfree.teams import ArrangementError, Team
from tests.conftest import MeshFactory
from tests.helpers import levels_parity
from tests.helpers.support import TRITON_CALL, assert_fused, fails, lower_for_cuda, one_program

ORDERS = (("data", "model"), ("model", "data"))
HOSTS = {(2, 4): "aaaabbbb", (4, 2): "aabbccdd"}
each_order = pytest.mark.parametrize("axes", ORDERS, ids="-".join)


class Hosts:
    """Where devices are believed to be, a letter for each host, and how often that was asked."""

    def __init__(self, letters: str):
        self.letters, self.asked = letters, 0

    def places(self, team: Team) -> tuple[list[int], Mapping[int, Place]]:
        self.asked += 1
        return [device.id for device in team.devices], {
            i: Place(host, host, host) for i, host in enumerate(self.letters)
        }


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Hosts]:
    def believe(letters: str) -> Hosts:
        found = Hosts(letters)
        monkeypatch.setattr(levels, "may_span", lambda team, exported: True)
        monkeypatch.setattr(levels, "places", found.places)
        return found

    return believe


def whole_numbers(*shape: int, seed: int = 0, dtype: Any = "float32") -> np.ndarray:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def products(lhs: Any, rhs: Any, bias: Any, residual: Any, axes: Any, module: Any, **how: Any) -> list[jax.Array]:
    """Products with three rows, which 2 and 4 ranks do not divide, with and without an epilogue."""
    if module is jtf:
        reduce = functools.partial(jtf.matmul_all_reduce, lhs, rhs, axes, **how)
        return [reduce(), reduce(bias=bias, residual=residual)]
    product = lax.psum(lhs @ rhs, axes)
    return [product, product + bias + residual]


def collectives(x: Any, axes: Any, module: Any, **how: Any) -> list[jax.Array]:
    """Of x [5, 16, 3], whose size no number of ranks divides in a sum, tiled and not."""
    return [
        module.psum(x[:, 0], axes, **how),
        *(module.all_gather(x[:2], axes, axis=1, tiled=tiled, **how) for tiled in (True, False)),
        module.psum_scatter(x, axes, scatter_dimension=1, tiled=True, **how),
        module.psum_scatter(x[:, :8], axes, scatter_dimension=1, **how),
    ]


def checked(mesh: Mesh, local: Callable, operands: Sequence[Any], specs: Any, check_vma: bool, axes: Any) -> None:
    """Values and gradients, simulated inside of hosts, are those of `lax` alone. All numbers are whole, so exact."""

    def of(module: Any, **how: Any) -> Any:
        def rank(*arrays: Any) -> Any:
            found = local(*arrays, axes, module, **how)
            return [lax.all_gather(y, mesh.axis_names) for y in found]

        everybodys = jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

        def weighed(*arrays: Any) -> jax.Array:
            def loss(*parts: Any) -> Any:
                found = local(*parts, axes, module, **how)
                weights = [1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) % 5 for y in found]
                return sum(jnp.sum(y * w) for y, w in zip(found, weights))[None]

            total = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P(mesh.axis_names), check_vma=check_vma)
            return total(*arrays).sum()

        return jax.jit(lambda *x: (everybodys(*x), jax.grad(weighed, argnums=tuple(range(len(x))))(*x)))(*operands)

    jax.tree.map(np.testing.assert_array_equal, of(jtf, implementation="simulate"), of(lax))


@pytest.mark.covers(1)
@each_order
@pytest.mark.parametrize("shape, check_vma", (((2, 4), True), ((4, 2), False)))
def test_values_and_gradients(
    cpu_mesh: MeshFactory, hosts: Any, shape: tuple[int, ...], axes: tuple[str, ...], check_vma: bool
) -> None:
    believed = hosts(HOSTS[shape])
    mesh = cpu_mesh(shape, ("data", "model"))
    x = whole_numbers(40, 16, 3)
    checked(mesh, collectives, [x], (P(axes),), check_vma, axes)
    lhs, rhs = whole_numbers(3, 64), whole_numbers(64, 8, seed=1)
    others = [whole_numbers(8, seed=2), whole_numbers(3, 8, seed=3)]
    checked(mesh, products, [lhs, rhs, *others], (P(None, axes), P(axes), P(), P()), check_vma, axes)
    assert believed.asked


@pytest.mark.parametrize("axes", (("pod", "model", "data"), ("model", "data", "pod")), ids="-".join)
@pytest.mark.parametrize("letters", ("abababab", "aabbaabb", "abcdabcd"))
def test_order_of_ranks_along_three_axes(
    cpu_mesh: MeshFactory, hosts: Any, axes: tuple[str, ...], letters: str
) -> None:
    hosts(letters)
    mesh = cpu_mesh((2, 2, 2), ("pod", "data", "model"))

    def both(x: Any, module: Any, **how: Any) -> Any:
        return [
            module.all_gather(x[0], axes, axis=1, tiled=True, **how)[None],
            module.psum_scatter(x, axes, scatter_dimension=1, tiled=True, **how),
        ]

    x = whole_numbers(8, 16, 3)
    run = functools.partial(one_program, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    found = run(functools.partial(both, module=jtf, implementation="simulate"))
    jax.tree.map(np.testing.assert_array_equal, found(x), run(functools.partial(both, module=lax))(x))
    text = found.lower(x).as_text()
    assert text.count("stablehlo.reduce_scatter") == 1  # of XLA's, that across hosts


@pytest.mark.soak  # other tests here check the same
def test_what_gpus_have_to_pass(cpu_mesh: MeshFactory, hosts: Any) -> None:
    hosts("aabb")
    levels_parity.check(cpu_mesh((2, 2), ORDERS[0]), "simulate", most=1000)


def operands_of(text: str, collective: str) -> list[str]:
    """The types of what XLA's collectives of a kind take."""
    found = re.findall(rf'"stablehlo.{collective}"\((?:.|\n)*?: \(tensor<([^>]*)>\) ->', text)
    assert len(found) == text.count(f'"stablehlo.{collective}"'), text
    return found


def psum_text(mesh: Mesh, size: int, dtype: Any, implementation: str | None = "fused", **how: Any) -> str:
    """The program of a sum over all ranks; a simulated one is lowered for the CPU, which compiles no kernel."""
    axes = mesh.axis_names

    def local(x: Any) -> Any:
        return jtf.psum(x[0], axes, implementation=implementation, **how)

    call = jax.shard_map(local, mesh=mesh, in_specs=P(axes), out_specs=P())
    x = jax.ShapeDtypeStruct((mesh.devices.size, size), dtype)
    return lower_for_cuda(call, x, platforms=("cpu",) if implementation == "simulate" else ("cuda",))


@pytest.mark.parametrize(
    "size, dtype, wanted",
    (
        (EXACT_SIZE, "bfloat16", f"{EXACT_SIZE // 4}xf32"),
        (EXACT_SIZE + 4, "bfloat16", f"{EXACT_SIZE // 4 + 1}xbf16"),
        (EXACT_SIZE, "int16", f"{EXACT_SIZE // 4}xi16"),
        (5, "float16", "2xf32"),
    ),
)
def test_few_partial_sums_cross_hosts_as_f32(cpu_mesh: MeshFactory, hosts: Any, size: int, dtype: str, wanted: str):
    hosts("aaaabbbb")
    text = psum_text(cpu_mesh((2, 4), ORDERS[0]), size, dtype, "simulate")
    assert operands_of(text, "all_reduce") == [wanted]
    # JAX 0.12 names the axes.
    groups = 'axes = [#stablehlo.axis_ref<name = "data">]', "replica_groups = dense<[[0, 4], [1, 5], [2, 6], [3, 7]]>"
    assert any(group in text for group in groups)


@pytest.mark.parametrize(
    "rows, preferred, crosses, gathered",
    ((4, None, "1x256xf32", "bf16"), (96, None, "24x256xbf16", "bf16"), (96, "float32", "24x256xf32", "f32")),
)
def test_products_cross_hosts(
    cpu_mesh: MeshFactory, hosts: Any, rows: int, preferred: Any, crosses: str, gathered: str
) -> None:
    hosts("aaaabbbb")
    axes = ORDERS[0]

    def local(lhs: Any, rhs: Any) -> Any:
        return jtf.matmul_all_reduce(lhs, rhs, axes, implementation="simulate", preferred_element_type=preferred)

    call = jax.shard_map(local, mesh=cpu_mesh((2, 4), axes), in_specs=(P(None, axes), P(axes)), out_specs=P())
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 1024), (1024, 256)))
    text = lower_for_cuda(call, lhs, rhs, platforms=("cpu",))
    assert operands_of(text, "all_reduce") == [crosses]
    assert f"-> tensor<{rows}x256x{gathered}>" in text


def test_products_with_scales_cross_hosts(cpu_mesh: MeshFactory, hosts: Any) -> None:
    """Six rows, which four ranks do not divide, and the scales of each. Each rank has 128 of K."""
    hosts("aaaabbbb")
    axes = ORDERS[0]

    def local(*operands: Any) -> Any:
        lhs, rhs, bias, lhs_scale, rhs_scale = operands
        scales = {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale, "rhs_transposed": True}
        return jtf.matmul_all_reduce(lhs, rhs, axes, bias=bias, implementation="simulate", **scales)

    specs = (P(None, axes), P(None, axes), P(), P(None, axes), P())
    call = jax.shard_map(local, mesh=cpu_mesh((2, 4), axes), in_specs=specs, out_specs=P(), check_vma=False)
    shapes = ((6, 1024), "int8"), ((256, 1024), "int8"), ((256,), "float32"), ((6, 8), "float32"), ((), "float32")
    text = lower_for_cuda(call, *(jax.ShapeDtypeStruct(*each) for each in shapes), platforms=("cpu",))
    assert operands_of(text, "all_reduce") == ["2x256xf32"]
    assert "-> tensor<6x256xbf16>" in text and "dot_general" not in text


def test_no_partial_sum_of_few_is_rounded_before_the_last(cpu_mesh: MeshFactory, hosts: Any) -> None:
    """1 + 2 ** -9 has no bf16: of the sum of one such term and seven of 0, each rank of a host has a part."""
    hosts("aaaabbbb")
    mesh = cpu_mesh((2, 4), ORDERS[0])
    terms = np.zeros((8, 6), jnp.bfloat16)
    terms[0], terms[1], terms[4] = 1, 2.0**-9, -1

    def local(x: Any) -> Any:
        return jtf.psum(x[0], mesh.axis_names, implementation="simulate")

    run = one_program(local, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P())
    np.testing.assert_array_equal(np.asarray(run(terms), np.float32), np.full(6, 2.0**-9))


class TestChoice:
    """What None takes, as a program is lowered for CUDA."""

    @pytest.fixture(autouse=True)
    def warnings(self, caplog: pytest.LogCaptureFixture) -> None:
        primitive.forget_warnings()
        caplog.set_level(logging.DEBUG, "jaxtaxfree")

    def test_two_levels_where_fewer_bytes_leave_a_host(self, cpu_mesh: MeshFactory, hosts: Any) -> None:
        hosts("aaaabbbb")
        text = psum_text(cpu_mesh((2, 4), ORDERS[0]), 1000, "float32", None)
        assert text.count(TRITON_CALL) == 2 and operands_of(text, "all_reduce") == ["250xf32"]

    @pytest.mark.parametrize("size, dtype, own, ring", ((1, "float32", 16, 7), (1000, "bfloat16", 4000, 3500)))
    def test_xla_where_more_bytes_do(
        self, cpu_mesh: MeshFactory, hosts: Any, caplog: Any, size: int, dtype: str, own: int, ring: int
    ) -> None:
        hosts("aaaabbbb")
        text = psum_text(cpu_mesh((2, 4), ORDERS[0]), size, dtype, None)
        assert TRITON_CALL not in text and len(operands_of(text, "all_reduce")) == 1
        assert f"would send {own} bytes in two levels, and {ring} in XLA's ring" in caplog.text
        assert {record.levelname for record in caplog.records} == {"DEBUG"}

    def test_xla_where_no_kernel_is_taken_inside(self, cpu_mesh: MeshFactory, hosts: Any) -> None:
        believed = hosts("aaaabbbb")
        text = psum_text(cpu_mesh((2, 4), ORDERS[0]), 1 << 24, "float32", None)
        assert TRITON_CALL not in text
        assert not believed.asked  # the processes need not meet for that

    def test_one_kernel_on_one_host(self, cpu_mesh: MeshFactory, hosts: Any) -> None:
        believed = hosts("aaaaaaaa")
        assert_fused(psum_text(cpu_mesh((2, 4), ORDERS[0]), 1000, "float32", None))
        assert believed.asked == 1

    def test_config_is_refused(self, cpu_mesh: MeshFactory, hosts: Any, caplog: Any) -> None:
        hosts("aaaabbbb")
        mesh = cpu_mesh((2, 4), ORDERS[0])
        with fails(NotImplementedError, "it takes no config where its axes span hosts", "leave it out"):
            psum_text(mesh, 1000, "float32", config={"shots": 2})
        assert TRITON_CALL not in psum_text(mesh, 1000, "float32", None, config={"shots": 2})
        assert [record.levelname for record in caplog.records] == ["WARNING"]

    @pytest.mark.parametrize(
        "letters, why",
        (
            ("aabbccdd", "along ['data', 'model'] some devices share a host, and others do not"),
            ("aaaaaabb", "along ['data', 'model'] some devices share a host"),
            ("abcdefgh", "of ['data', 'model'] none does"),
            ("aaaabbcc", "along ['data', 'model'] some devices share a host"),
        ),
    )
    def test_axis_that_is_partly_inside(
        self, cpu_mesh: MeshFactory, hosts: Any, caplog: Any, letters: str, why: str
    ) -> None:
        hosts(letters)
        mesh = cpu_mesh((2, 4), ORDERS[0])
        with fails(NotImplementedError, "the axis spans hosts (process", why):
            psum_text(mesh, 1000, "float32")
        for _ in range(2):
            assert TRITON_CALL not in psum_text(mesh, 1000, "float32", None)
        assert sum(record.levelname == "WARNING" for record in caplog.records) == 1


def test_explicit_axis_that_is_left_over(cpu_mesh: MeshFactory, hosts: Any) -> None:
    hosts("aabbaabb")  # along "data"
    mesh = Mesh(
        cpu_mesh((2, 2, 2), ("rest", "data", "model")).devices, ("rest", "data", "model"), (AxisType.Explicit,) * 3
    )
    x = whole_numbers(8, 4, 6)

    def run(module: Any, **how: Any) -> jax.Array:
        axes = ORDERS[1]

        def local(x: Any) -> jax.Array:
            return module.all_gather(module.psum(x, axes, **how), axes, axis=0, tiled=True, **how)

        call = jax.shard_map(local, in_specs=P(axes), out_specs=P(axes), axis_names=set(axes), check_vma=False)
        with jax.set_mesh(mesh):
            return jax.jit(call)(jax.device_put(x, P(axes, None, "rest")))

    np.testing.assert_array_equal(run(jtf, implementation="simulate"), run(lax))


def test_vmap(cpu_mesh: MeshFactory, hosts: Any) -> None:
    hosts("aaaabbbb")
    mesh, axes = cpu_mesh((2, 4), ORDERS[0]), ORDERS[1]

    def run(module: Any, **how: Any) -> jax.Array:
        def one(x: Any) -> jax.Array:
            return module.psum_scatter(x, axes, scatter_dimension=0, tiled=True, **how)

        return one_program(jax.vmap(one, in_axes=1), mesh=mesh, in_specs=P(axes), out_specs=P(None, axes))(
            whole_numbers(64, 3)
        )

    np.testing.assert_array_equal(run(jtf, implementation="simulate"), run(lax))


@dataclasses.dataclass(frozen=True)
class Wire:
    """What crosses the borders of hosts when blocks go round a ring, or are exchanged by XLA's collective across."""

    hosts: Sequence[int]  # of each rank, in the ring's order

    def leaving(self, hops: int, nbytes: float) -> float:
        """Bytes that leave a host, if each rank sends so many bytes to the next one, so many times."""
        borders = [here for here, there in zip(self.hosts, (*self.hosts[1:], self.hosts[0])) if here != there]
        (crossings,) = {borders.count(host) for host in borders}
        return crossings * hops * nbytes


@pytest.mark.parametrize("d, t", tuple(itertools.product((2, 3, 8), (2, 4, 8))))
def test_bytes_are_those_of_rings(d: int, t: int) -> None:
    """The two levels are t rings through the hosts, one of each rank of a host."""
    n = d * t
    split = Split(sizes={"data": d, "model": t}, inside=("model",), across=("data",))
    how = {"axes": ("data", "model"), "config": (), "split": split, "implementation": None}
    one, many = Wire([rank // t for rank in range(n)]), Wire(range(d))
    x = jax.ShapeDtypeStruct((n * 1000,), jnp.float32)
    block = 4000  # bytes
    scattered = levels._forms[psum_scatter_p](x, dimension=0, tiled=True, **how)
    assert (scattered.leaving, scattered.flat) == (t * many.leaving(d - 1, block), one.leaving(n - 1, block))
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    gathered = levels._forms[all_gather_p](x, dimension=0, tiled=True, **how)
    assert (gathered.leaving, gathered.flat) == (t * many.leaving(d - 1, block), one.leaving(n - 1, block))
    x = jax.ShapeDtypeStruct((n * 1000,), jnp.float32)
    summed = levels._forms[psum_p](x, **how)
    assert summed.leaving == pytest.approx(t * many.leaving(2 * (d - 1), n * block / t / d))
    assert summed.flat == pytest.approx(one.leaving(2 * (n - 1), block))


@dataclasses.dataclass(frozen=True)
class Device:
    id: int


def split_of(monkeypatch: Any, letters: str, sizes: Mapping[str, int]) -> Split | None:
    monkeypatch.setattr(levels, "places", Hosts(letters).places)
    world = int(np.prod(list(sizes.values())))
    return levels.split_of(Team(tuple(sizes), (), world, tuple(map(Device, range(len(letters))))), sizes)


def test_which_axes_lie_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def inside(letters: str, **sizes: int) -> tuple[str, ...]:
        split = split_of(monkeypatch, letters, sizes)
        assert split is not None
        return split.inside

    assert split_of(monkeypatch, "aaaa", {"x": 2, "y": 2}) is None
    assert split_of(monkeypatch, "aaaabbbb", {"x": 2, "y": 2}) is None  # two teams
    assert inside("aabb", x=2, y=2) == ("y",)
    assert inside("abab", x=2, y=2) == ("x",)
    assert inside("aabbccddaabbccdd", x=2, y=4, z=2) == ("x", "z")
    assert inside("aabbccddddccbbaa", y=4, z=2) == ("z",)  # two teams, whose hosts come in another order
    assert inside("aabb", x=2, one=1, y=2) == ("one", "y")
    for letters in ("aabbaaaa", "aabbabab"):  # teams that are divided differently
        with pytest.raises(ArrangementError, match="the axis spans hosts"):
            inside(letters, x=2, y=2)


def test_form_of_every_operation_is_entered() -> None:
    assert len(levels._forms) == 5 and set(levels._forms) <= set(levels._why)
    assert forms.crossing("int32", 8) == np.int32
