"""What None takes, apart from shapes and tables, and what is said of it. No GPU needed."""

import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import dispatch, heap, primitive, shmem
from jaxtaxfree.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from jaxtaxfree.primitive import Lasting, Unsupported
from jaxtaxfree.teams import ArrangementError, Team
from tests.conftest import MeshFactory
from tests.helpers.support import (
    TRITON_CALL,
    assert_fused,
    chosen,
    fails,
    lower_for_cuda,
    mesh_of,
    product_call,
    sharded,
)
from tests.operations.test_primitive import OPERATIONS
from tests.runtime.test_shmem_call import rotate

each_operation = pytest.mark.parametrize("name", OPERATIONS)


class Log:
    """What the library says."""

    def __init__(self, caplog: pytest.LogCaptureFixture):
        self._caplog = caplog

    def take(self) -> list[tuple[str, str]]:
        """(level, message) of what was said since the last time."""
        said = [(each.levelname, each.getMessage()) for each in self._caplog.records if each.name == "jaxtaxfree"]
        self._caplog.clear()
        return said

    def warned(self, *parts: str) -> None:
        """Nothing was said since the last time but one warning that has these parts."""
        ((level, message),) = self.take()
        assert level == "WARNING" and "implementation='xla'" in message
        assert [part for part in parts if part not in message] == []


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    primitive.forget_warnings()
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        yield Log(caplog)
    primitive.forget_warnings()


def program(mesh: Any, name: str, implementation: str | None = None, **keywords: Any) -> Callable:
    """An operation of x, [8, 16] on every rank of the axis "tp"."""
    call = functools.partial(OPERATIONS[name], axis_name="tp", implementation=implementation)
    return jax.shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False, **keywords)


def text_of(
    mesh: Mesh, name: str, implementation: str | None = None, platforms: tuple[str, ...] = ("cuda",), **keywords: Any
) -> str:
    x = sharded(mesh, P("tp"), (8 * mesh.shape["tp"], 16), "bfloat16")
    return lower_for_cuda(program(mesh, name, implementation, **keywords), x, platforms=platforms)


@each_operation
def test_a_mesh_that_is_partly_automatic(cpu_mesh: MeshFactory, name: str, log: Log) -> None:
    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    for _ in range(2):
        assert TRITON_CALL not in text_of(mesh, name, axis_names={"tp"})
    (level, message), (again, same) = log.take()
    assert (level, again) == ("WARNING", "DEBUG")
    for part in (name, "['dp']", "make all axes manual", "implementation='xla' asks for that"):
        assert part in message
    assert message.startswith(f"{same}. ")
    primitive.forget_warnings()
    text_of(mesh, name, axis_names={"tp"})
    log.warned(name)


@pytest.mark.covers(3)
@each_operation
@pytest.mark.parametrize("implementation", ("fused", "simulate"))
@pytest.mark.parametrize("platform", ("cpu", "cuda"))
def test_who_insists_on_a_mesh_that_is_partly_automatic(
    cpu_mesh: MeshFactory, name: str, implementation: str, platform: str, log: Log
) -> None:
    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    why = "for NVIDIA GPUs" if (implementation, platform) == ("fused", "cpu") else "make all axes manual"
    with fails(Unsupported, f"The fused kernel of {name} cannot run here: ", why):
        text_of(mesh, name, implementation, (platform,), axis_names={"tp"})
    assert log.take() == []


@each_operation
def test_a_mesh_that_is_abstract(name: str, log: Log) -> None:
    x = jax.ShapeDtypeStruct((32, 16), "bfloat16")
    call = program(mesh_of(4).abstract_mesh, name)
    assert TRITON_CALL not in lower_for_cuda(call, x)
    log.warned(name, "the mesh is abstract", "jax.set_mesh")
    with fails(Unsupported, name, "the mesh is abstract"):
        lower_for_cuda(program(mesh_of(4).abstract_mesh, name, "simulate"), x)


@pytest.mark.parametrize("simulate", (False, True))
def test_kernels_of_users_name_themselves(cpu_mesh: MeshFactory, simulate: bool) -> None:
    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    call = functools.partial(rotate, **({"implementation": "simulate"} if simulate else {}))
    call = jax.shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), axis_names={"tp"}, check_vma=False)
    with fails(ArrangementError, "rotate_kernel cannot run here: ", "['dp']", "make all axes manual"):
        lower_for_cuda(call, sharded(mesh, P("tp"), (4 * 128,), "float32"))


@each_operation
@pytest.mark.parametrize(
    "platform, why_not",
    {
        "rocm": "no kernel was ever run on GPUs of AMD",
        "tpu": "it is for NVIDIA GPUs, and the program is lowered for tpu",
    }.items(),
)
def test_other_platforms(name: str, platform: str, why_not: str, log: Log) -> None:
    for _ in range(2):
        text_of(mesh_of(4), name, platforms=(platform,))
    (warning, debug) = log.take()
    why = f"{name}['bfloat16[", why_not
    assert [level for level, _ in (warning, debug)] == ["WARNING", "DEBUG"]
    assert all(part in message for part in why for _, message in (warning, debug))


@each_operation
def test_nobody_expects_a_kernel_on_a_cpu(name: str, log: Log) -> None:
    text_of(mesh_of(4), name, platforms=("cpu",))
    text_of(mesh_of(4), name, "xla", platforms=("tpu",))
    assert log.take() == []


def test_programs_for_several_platforms(log: Log) -> None:
    assert TRITON_CALL in text_of(mesh_of(4), "psum", platforms=("cpu", "cuda"))
    assert log.take() == []
    assert TRITON_CALL in text_of(mesh_of(4), "psum", platforms=("cpu", "cuda", "tpu"))
    log.warned("psum", "lowered for cpu, tpu")


def traced(call: Callable, *shapes: tuple[tuple[int, ...], str], **keywords: Any) -> None:
    """A call inside `jax.shard_map`, whose operands are the same on all ranks."""
    on_mesh = jax.shard_map(call, mesh=mesh_of(4), in_specs=P(), out_specs=P(), check_vma=False)
    lower_for_cuda(on_mesh, *(jax.ShapeDtypeStruct(*shape) for shape in shapes), **keywords)


PRODUCTS: dict[str, Callable[..., Any]] = {
    "all_gather_matmul": jtf.all_gather_matmul,
    "matmul_reduce_scatter": jtf.matmul_reduce_scatter,
    "matmul_all_reduce": jtf.matmul_all_reduce,
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(
    ("dtypes", "keywords", "parts"),
    (
        (("float32", "bfloat16"), {}, ("one dtype, not float32 and bfloat16", "cast one of them")),
        (("int8", "int8"), {}, ("not int8: cast",)),
        (("bfloat16", "bfloat16"), {"preferred_element_type": "int32"}, ("not int32: cast the result",)),
        (("bfloat16", "bfloat16"), {"precision": ("highest", "default")}, ("no precision", "'highest'")),
        (("bfloat16", "bfloat16", "float8_e5m2"), {}, ("a bias of", "not float8_e5m2: cast it")),
    ),
    ids=str,
)
def test_what_is_found_when_a_product_is_traced(
    name: str, dtypes: tuple[str, ...], keywords: dict[str, Any], parts: tuple[str, ...], log: Log
) -> None:
    def call(lhs: jax.Array, rhs: jax.Array, bias: jax.Array | None = None, **more: Any) -> jax.Array:
        return PRODUCTS[name](lhs, rhs, "tp", bias=bias, **keywords, **more)

    for rows in (8, 16):  # whose reason is the same
        traced(call, *zip(((rows, 16), (16, 32), (32,)), dtypes))
    first, second = log.take()
    assert [level for level, _ in (first, second)] == ["WARNING", "DEBUG"]
    assert all(part in first[1] for part in (f"{name}[", *parts))
    traced(functools.partial(call, implementation="xla"), *zip(((8, 16), (16, 32), (32,)), dtypes))
    assert log.take() == []


@pytest.mark.parametrize("name", ("psum", "all_gather", "psum_scatter", "all_to_all"))
def test_a_dtype_that_no_collective_takes(name: str, log: Log) -> None:
    traced(functools.partial(OPERATIONS[name], axis_name="tp"), ((8, 16), "complex64"))
    log.warned(f"{name}[", "not complex64: cast it")


@pytest.mark.parametrize(
    ("query", "cache", "keywords", "parts"),
    (
        ("float8_e5m2", "bfloat16", {}, ("a query of", "not float8_e5m2: cast it")),
        ("bfloat16", "float32", {}, ("not float32 with bfloat16: cast the query",)),
        ("bfloat16", "bfloat16", {"preferred_element_type": "float8_e5m2"}, ("not float8_e5m2: cast the result",)),
    ),
)
def test_what_is_found_when_attention_is_traced(
    query: str, cache: str, keywords: dict[str, Any], parts: tuple[str, ...], log: Log
) -> None:
    def call(query: jax.Array, cache: jax.Array) -> jax.Array:
        return jtf.decode_attention(query, cache, cache, "tp", **keywords)

    traced(call, ((2, 4, 16), query), ((2, 4, 1, 16), cache))
    log.warned("decode_attention[", *parts)


def test_a_bias_that_differs(log: Log) -> None:
    def call(x: jax.Array) -> jax.Array:
        return jtf.matmul_all_reduce(x, x.T, "tp", bias=x[:, 0])

    on_mesh = jax.shard_map(call, mesh=mesh_of(4), in_specs=P("tp"), out_specs=P("tp"))
    lower_for_cuda(on_mesh, jax.ShapeDtypeStruct((32, 16), "float32"))
    log.warned("matmul_all_reduce[", "a bias that is the same on all ranks", "in_specs without these")


@pytest.mark.parametrize("implementation", (None, "fused"))
def test_a_gradient_of_two_dtypes(implementation: str | None, log: Log) -> None:
    """Of which nobody has said that they must be a kernel."""

    def loss(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        call = functools.partial(jtf.matmul_reduce_scatter, axis_name="tp", preferred_element_type="float32")
        return call(lhs, rhs, implementation=implementation).sum()

    traced(jax.grad(loss), ((16, 16), "bfloat16"), ((16, 32), "bfloat16"))
    log.warned("all_gather_matmul[", "one dtype, not float32 and bfloat16", "in gradients leave out preferred_element")


@pytest.mark.parametrize(
    ("axes", "parts"),
    (
        ((0, 0), ("jax.vmap maps over lhs, rhs", "jax.lax.map")),
        ((None, 0), ("jax.vmap maps over rhs", "jax.lax.map")),
    ),
)
def test_what_no_kernel_maps(axes: tuple[int | None, ...], parts: tuple[str, ...], log: Log) -> None:
    call = functools.partial(jtf.all_gather_matmul, axis_name="tp")
    shapes = ((8, 16), (16, 32))
    stacked = [shape if dim is None else (3, *shape) for shape, dim in zip(shapes, axes)]
    traced(jax.vmap(call, in_axes=axes), *((shape, "bfloat16") for shape in stacked))
    log.warned("all_gather_matmul[", *parts)


def test_map_keeps_the_kernel(log: Log) -> None:
    """As the warning says that it does."""

    def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.map(lambda of: jtf.all_gather_matmul(*of, "tp"), (lhs, rhs))

    on_mesh = jax.shard_map(call, mesh=mesh_of(4), in_specs=P(), out_specs=P(), check_vma=False)
    shapes = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((3, 8, 16), (3, 16, 32)))
    assert_fused(lower_for_cuda(on_mesh, *shapes))
    assert log.take() == []


def test_vmap_over_the_axis_itself(log: Log) -> None:
    jax.vmap(lambda x: jtf.psum(x, "tp"), axis_name="tp")(jnp.ones((4, 8)))
    log.warned("psum[", "maps over the axis 'tp' itself", "jax.shard_map")


def test_shapes_and_speed_are_no_warning(log: Log) -> None:
    gather = functools.partial(jtf.all_gather_matmul, axis_name="tp")
    traced(gather, ((8, 0), "bfloat16"), ((0, 32), "bfloat16"))  # empty
    traced(gather, ((2, 8, 16), "bfloat16"), ((16,), "bfloat16"))  # of other dimensions
    traced(gather, ((1024, 16), "float32"), ((16, 32), "float32"))  # slower
    traced(functools.partial(jtf.psum, axis_name="tp"), ((1 << 21,), "float32"))  # likewise
    traced(jax.vmap(functools.partial(jtf.psum, axis_name="tp")), ((0, 8), "float32"))  # no examples
    text_of(mesh_of(1), "psum")  # one rank
    said = log.take()
    assert [level for level, _ in said] == 6 * ["DEBUG"], said


def test_each_reason_once(log: Log) -> None:
    operands = [jax.ShapeDtypeStruct((8,), "int8")]
    for reasons in (["a", Lasting("b")], [Lasting("b"), "c"], [Lasting("b"), Lasting("d")], ["a"]):
        primitive.log_reference("psum", operands, reasons)
    primitive.log_reference("all_gather", operands, [Lasting("b")])
    said = log.take()
    assert [level for level, _ in said] == ["WARNING", "DEBUG", "WARNING", "DEBUG", "WARNING"]
    assert said[0][1].startswith("psum['int8[8]'] uses XLA: a; b. ")


def test_threads_that_find_it_together(log: Log) -> None:
    start = threading.Barrier(16)

    def find(number: int) -> None:
        start.wait()
        for reason in range(100):
            primitive.log_reference("psum", [], [Lasting(f"reason {reason}")])

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(find, range(16)))
    warned = [message for level, message in log.take() if level == "WARNING"]
    assert len(warned) == len(set(warned)) == 100


class ElsewhereError(ArrangementError):
    """As the heap has one."""


def on_gpus(monkeypatch: pytest.MonkeyPatch, capability: int = 90) -> None:
    """Programs seem to be for this process's own GPUs."""
    monkeypatch.setattr(Team, "on_gpus", True)
    monkeypatch.setattr(Team, "compute_capability", capability)
    monkeypatch.setattr(Team, "device_kind", "")
    monkeypatch.setattr(Team, "multiprocessors", 132)


def failing(error: Exception) -> Callable:
    def region(*_: Any, **__: Any) -> Any:
        raise error

    return region


@each_operation
def test_processes_that_cannot_share_memory(name: str, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """Known only when the kernel is lowered, where the heap is asked for a region."""
    on_gpus(monkeypatch)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    why = "the axis spans hosts: take one of a host"
    monkeypatch.setattr(heap, "region", failing(ElsewhereError(why)))
    mesh = mesh_of(4)
    assert TRITON_CALL not in text_of(mesh, name)
    log.warned(f"{name}[", why)
    with fails(Unsupported, f"The fused kernel of {name} cannot run here: {why}. ") as found:
        text_of(mesh, name, "fused")
    assert isinstance(found.value.__cause__, ElsewhereError)
    with fails(ElsewhereError, why):
        lower_for_cuda(
            jax.shard_map(rotate, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False),
            sharded(mesh, P("tp"), (4 * 128,), "float32"),
        )


def test_a_heap_that_one_process_cannot_have(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    on_gpus(monkeypatch)
    why = "Device 0 cannot reach the memory of device 1."
    monkeypatch.setattr(heap, "region", failing(heap.HeapUnavailableError(why)))
    assert TRITON_CALL not in text_of(mesh_of(4), "psum")
    log.warned("psum[", why)


def test_flags_by_which_calls_would_run_at_once(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    on_gpus(monkeypatch)
    monkeypatch.setattr(shmem, "_region", lambda *_: None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_graph_enable_concurrent_region=true")
    assert TRITON_CALL not in text_of(mesh_of(4), "psum")
    log.warned("psum[", "concurrent_region=true in XLA_FLAGS", "leave it out")


def test_a_configuration_of_a_kernel_that_is_not_for_this_gpu(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "80")
    call = functools.partial(jtf.all_gather_matmul, axis_name="tp", config={"kernel": "hopper"})
    traced(call, ((1024, 64), "bfloat16"), ((64, 256), "bfloat16"))
    log.warned("all_gather_matmul[", "9.0, not 8.0: name no kernel in config")


def test_what_is_computed_is_the_same(log: Log) -> None:
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    mesh = mesh_of(4)

    def call(x: jax.Array) -> jax.Array:
        return jtf.matmul_all_reduce(x, x.T.astype(jnp.bfloat16), "tp")

    found = jax.shard_map(call, mesh=mesh, in_specs=P(None, "tp"), out_specs=P())(x)
    np.testing.assert_array_equal(found, x @ x.T)
    log.warned("matmul_all_reduce[")


@each_operation
@pytest.mark.parametrize("capability", ("80", "100"))
def test_gpus_on_which_nothing_was_timed(name: str, capability: str, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", capability)
    assert TRITON_CALL not in text_of(mesh_of(4), name)
    ((level, message),) = log.take()
    assert level == "DEBUG"
    for part in (name, f"compute capability {int(capability) / 10}", "JAXTAXFREE_UNMEASURED=fused"):
        assert part in message
    assert_fused(text_of(mesh_of(4), name, "fused"))
    monkeypatch.setenv("JAXTAXFREE_UNMEASURED", "fused")
    assert_fused(text_of(mesh_of(4), name))
    assert log.take() == []
    monkeypatch.setenv("JAXTAXFREE_UNMEASURED", "xla")
    assert TRITON_CALL not in text_of(mesh_of(4), name)


@each_operation
def test_gpus_on_which_something_was_timed(name: str, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    for unmeasured in ("xla", "fused"):
        monkeypatch.setenv("JAXTAXFREE_UNMEASURED", unmeasured)
        assert_fused(text_of(mesh_of(4), name))
    assert log.take() == []


# That of no epilogue, of an epilogue, and of the gathered lhs have primitives of their own.
FORMS: dict[str, Callable[..., Any]] = {
    **OPERATIONS,
    "all_gather_matmul with an activation": functools.partial(OPERATIONS["all_gather_matmul"], activation="silu"),
    "all_gather_matmul and the gathered lhs": lambda x, axis_name, **keywords: jtf.all_gather_matmul(
        x, x.T, axis_name, return_gathered=True, **keywords
    )[0],
    "matmul_reduce_scatter with an activation": functools.partial(
        OPERATIONS["matmul_reduce_scatter"], activation="silu"
    ),
    "matmul_all_reduce with an activation": functools.partial(OPERATIONS["matmul_all_reduce"], activation="silu"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_configuration_is_taken_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "100")

    def text(**keywords: Any) -> str:
        call = functools.partial(FORMS[name], axis_name="tp", **keywords)
        on_mesh = jax.shard_map(call, mesh=mesh_of(4), in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
        return lower_for_cuda(on_mesh, sharded(mesh_of(4), P("tp"), (32, 16), "bfloat16"))

    assert_fused(text(config={"num_warps": 8}))
    assert TRITON_CALL not in text(config={})
    assert TRITON_CALL not in text()


def test_a_configuration_is_not_that_of_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose kernel is another one."""
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "100")

    def text(implementation: str | None) -> str:
        def loss(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            call = functools.partial(jtf.matmul_reduce_scatter, axis_name="tp", config={"num_warps": 8})
            return jnp.sin(call(lhs, rhs, implementation=implementation)).sum()

        on_mesh = jax.shard_map(jax.grad(loss), mesh=mesh_of(4), in_specs=P(), out_specs=P(), check_vma=False)
        shapes = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((8192, 64), (64, 64)))
        return lower_for_cuda(on_mesh, *shapes)

    assert text(None).count(TRITON_CALL) == 1
    assert text("fused").count(TRITON_CALL) == 2
    monkeypatch.setenv("JAXTAXFREE_UNMEASURED", "fused")
    assert text(None).count(TRITON_CALL) == 2


def test_an_entry_of_the_tables_is_taken_there(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "100")
    monkeypatch.setattr(Team, "device_kind", "NVIDIA B200")
    row = {"world": 4, "dtype": "bfloat16", "size": 128, "config": None, "fused_us": 1.0, "xla_us": 2.0}
    rows = [row, row | {"size": 1 << 20}]
    monkeypatch.setattr(dispatch, "table", lambda kind, name: rows if (kind, name) == ("NVIDIA B200", "psum") else [])
    assert_fused(text_of(mesh_of(4), "psum"))
    assert TRITON_CALL not in text_of(mesh_of(4), "all_gather")  # of which there is none
    row["xla_us"] = 0.5
    assert TRITON_CALL not in text_of(mesh_of(4), "psum")
    row["size"] = 1 << 18  # too far away to say something
    assert TRITON_CALL not in text_of(mesh_of(4), "psum")
    said = [message for _, message in log.take()]
    assert ["no kernel was ever timed" in message for message in said] == [True, False, True]
    assert dispatch.SLOWER in said[1]


def test_kernels_of_users_are_taken_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands in for them."""
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "100")
    call = jax.shard_map(rotate, mesh=mesh_of(4), in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    assert_fused(lower_for_cuda(call, sharded(mesh_of(4), P("tp"), (4 * 128,), "float32")))


@pytest.mark.parametrize("wrong", ("", "FUSED", "1", "xla,fused"))
def test_what_the_variable_cannot_be(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("JAXTAXFREE_UNMEASURED", wrong)
    assert_fused(text_of(mesh_of(4), "psum"))  # which does not ask
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "100")
    with fails(ValueError, f"JAXTAXFREE_UNMEASURED is 'xla' or 'fused', not {wrong!r}."):
        text_of(mesh_of(4), "psum")


@pytest.mark.parametrize(
    "module, most",
    ((all_gather_matmul, 8), (matmul_reduce_scatter, 16), (matmul_all_reduce, 16)),
    ids=("gather", "scatter", "reduce"),
)
def test_programs_that_wait_for_each_other_leave_room_for_collectives(module: Any, most: int) -> None:
    """By shape at most so many, of 132 places, of which NCCL has 64 at most; see docs/guarantees.md."""
    found = {
        chosen(module, product_call(module, rows, 4096, n, world=world)).keywords.get("together", 1)
        for world in (1, 2, 4, 8)
        for rows in (*range(8, 520, 24), 256, 512)
        for n in (64, 520, 1024, 2048, 8192, 28672)
    }
    assert max(found) == most
