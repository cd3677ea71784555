"""`shmem_call`: what it refuses, what its results are, and what it lowers to. No GPU needed."""

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax_triton import triton_lib

import jaxtaxfree as jtf
from jaxtaxfree import call as call_module
from jaxtaxfree import heap, shmem_call
from jaxtaxfree.kernels import shmem
from jaxtaxfree.shmem import _place
from jaxtaxfree.teams import Team, check_index
from tests.conftest import MeshFactory
from tests.helpers.support import TRITON_CALL, lower_for_cuda, mesh_of, sharded

SIZE = 64


@triton.jit
def rotate_kernel(
    x_ptr,
    team,
    inbox,
    arrived,
    out_ptr,
    SIZE: tl.constexpr,
    WORLD: tl.constexpr,
):
    """Gives each rank what the rank before it has."""
    me = shmem.start(team)
    element = tl.arange(0, SIZE)
    here = shmem.scratch(me, inbox, x_ptr.dtype.element_ty)
    after = (me.rank + 1) % WORLD
    shmem.put(me, here + element, x_ptr + element, after)
    shmem.signal(me, arrived, after)
    shmem.wait(me, arrived, me.epoch, (me.rank + WORLD - 1) % WORLD)
    tl.store(out_ptr + element, tl.load(here + element))
    shmem.finish(me)


@triton.jit
def twice_kernel(x_ptr, team, out_ptr, other_ptr, SIZE: tl.constexpr):
    """Two results."""
    me = shmem.start(team)
    element = tl.arange(0, SIZE)
    tl.store(out_ptr + element, tl.load(x_ptr + element))
    tl.store(other_ptr + element, tl.load(x_ptr + element) * 2)
    shmem.finish(me)


@triton.jit
def wrong_kernel(x_ptr, team, inbox, box, out_ptr, WRONG: tl.constexpr):
    """Several that cannot be compiled."""
    me = shmem.start(team)
    element = tl.arange(0, 64)
    if WRONG == "name":
        tl.store(out_ptr + element, no_such_name)  # noqa: F821
    elif WRONG == "range":
        tl.store(out_ptr + tl.arange(0, 63), 1)
    elif WRONG == "assertion":
        tl.static_assert(False, "as it is called")
    elif WRONG == "inner":
        wrong_part(out_ptr)
    elif WRONG == "scratch":
        tl.store(inbox + element, 1)
    elif WRONG == "scratch of the API":
        shmem.put(me, inbox, x_ptr, 0)
    elif WRONG == "messages":
        shmem.receive(me, box + element, 0)
    elif WRONG == "another name":
        mine = inbox
        tl.store(mine + element, 1)
    elif WRONG == "team":
        tl.store(out_ptr + team, 1)
    elif WRONG == "break":
        for _ in range(2):
            break
    elif WRONG == "no reason":
        tl.store(out_ptr, team[element])
    else:
        tl.store(out_ptr + element, tl.load(x_ptr + element))
    shmem.finish(me)


@triton.jit
def scaled_kernel(x_ptr, team, arrived, out_ptr, factor=3, bias_ptr=None, SIZE: tl.constexpr = 64):
    me = shmem.start(team)
    shmem.signal(me, arrived, me.rank)
    came = shmem.wait(me, arrived, 1, me.rank)
    element = tl.arange(0, SIZE)
    tl.store(out_ptr + element, tl.where(came, tl.load(x_ptr + element) * factor, float("nan")))
    shmem.finish(me)


@triton.jit
def wrong_part(out_ptr):
    tl.store(out_ptr, out_ptr.no_such_attribute)


@triton.jit
def square_kernel(x_ptr, team, out_ptr, SIZE: tl.constexpr):
    """The sum of the squares of matrices, which wait in shared memory."""
    me = shmem.start(team)
    element = SIZE * tl.arange(0, SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for i in range(64):
        matrix = x_ptr + SIZE * SIZE * i + element
        total += tl.dot(tl.load(matrix), tl.load(matrix + 64 * SIZE * SIZE))
    tl.store(out_ptr + element, total)
    shmem.finish(me)


def rotate(x: jax.Array, axis_name: Any = "tp", **changed: Any) -> jax.Array:
    arguments: dict[str, Any] = {
        "axis_name": axis_name,
        "out_type": jax.ShapeDtypeStruct((SIZE,), jnp.float32),
        "grid": 1,
        "scratch": {"inbox": jax.ShapeDtypeStruct((SIZE,), jnp.float32)},
        "signals": {"arrived": 1},
        "SIZE": SIZE,
    }
    return shmem_call(rotate_kernel, x, **arguments | changed)


def on_mesh(mesh: Mesh, function: Callable, **keywords: Any) -> Callable:
    return jax.shard_map(function, mesh=mesh, **{"in_specs": P("tp"), "out_specs": P("tp")} | keywords)


def operand(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return sharded(mesh, P("tp"), (SIZE * mesh.shape["tp"],), "float32")


def fails(error: type[Exception], *parts: str) -> Any:
    """Expects an error whose message has these parts."""
    return pytest.raises(error, check=lambda e: all(part in str(e) for part in parts) or pytest.fail(f"says: {e}"))


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(4)


@pytest.mark.parametrize("params", ({}, {"SIZE": np.int64(64)}, {"factor": np.float32(3)}), ids=str)
def test_parameters_with_defaults_and_numbers_of_numpy(mesh: Mesh, params: dict[str, Any]) -> None:
    def call(x: jax.Array, implementation: str = "fused") -> jax.Array:
        return shmem_call(
            scaled_kernel, x, axis_name="tp", out_type=x, grid=1, signals={"arrived": 4},
            implementation=implementation, **params,
        )  # fmt: skip

    assert TRITON_CALL in lower_for_cuda(on_mesh(mesh, call), operand(mesh))


def test_more_programs_together_than_a_gpu_runs(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Team, "multiprocessors", 132)
    lower_for_cuda(on_mesh(mesh, functools.partial(rotate, grid=256, together=132)), operand(mesh))
    with fails(NotImplementedError, "rotate_kernel has 133 programs that wait for each other", "132 multiprocessors"):
        lower_for_cuda(on_mesh(mesh, functools.partial(rotate, grid=256, together=133)), operand(mesh))


@pytest.mark.parametrize(
    ("flags", "refused"),
    (
        ("--xla_gpu_command_buffer_scheduling_mode=CONCURRENT", True),
        ("--a=b --xla_gpu_command_buffer_scheduling_mode=concurrent_regions --c", True),
        ("--xla_gpu_graph_enable_concurrent_region", True),
        ("--xla_gpu_graph_enable_concurrent_region=true", True),
        ("--xla_gpu_graph_enable_concurrent_region=true --xla_gpu_command_buffer_scheduling_mode=LHS", False),
        ("--xla_gpu_graph_enable_concurrent_region=false", False),
        ("--xla_gpu_command_buffer_scheduling_mode=SERIALIZE --xla_cpu_max_isa=AVX2", False),
        ("--xla_gpu_command_buffer_scheduling_mode='LHS' --xla_cpu_max_isa=AVX2", False),
    ),
)
@pytest.mark.parametrize("file", (False, True))
def test_flags_by_which_calls_would_run_at_once(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, refused: bool, file: bool
) -> None:
    lower = functools.partial(lower_for_cuda, on_mesh(mesh, rotate), operand(mesh))
    (tmp_path / "flags").write_text(flags.replace(" ", "\n"))
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags") if file else flags)
    lower()  # for other machines than this one, whose flags count
    monkeypatch.setattr(Team, "on_gpus", True)
    monkeypatch.setattr(Team, "compute_capability", 90)
    monkeypatch.setattr("jaxtaxfree.shmem._region", lambda *_: None)
    jax.clear_caches()
    with fails(NotImplementedError, "--xla_gpu_", "in XLA_FLAGS") if refused else contextlib.nullcontext():
        lower()


@pytest.mark.parametrize("places", (tuple(range(8)), (0, 1) * 4, (0, 1, 2, 3, 0, 1, 0, 1)))
def test_each_device_finds_its_place(places: tuple[int, ...]) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(4, 2), ("dp", "tp"))
    team = Team(("tp",), ("dp",), 2, tuple(mesh.devices.flat))
    layout = heap.Layout(programs=1)
    region = heap.Region(name="", device_ids=(), world=2, layout=layout, origin=1, stride=1, magic=1, places=places)

    def placed(index: Any) -> Any:
        return jax.shard_map(
            lambda: _place(team, region, index and index())[None], mesh=mesh, in_specs=(), out_specs=P(("dp", "tp"))
        )

    for index in (None, lambda: lax.axis_index("tp")):
        assert tuple(jax.jit(placed(index))().tolist()) == places


@pytest.mark.parametrize("shape", ((1, 2), (4, 2)))
def test_a_number_that_is_given_is_not_asked_for(
    shape: tuple[int, int], cpu_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA would ask for the number of the device in every pass of a loop: in a mesh of one axis nobody does."""
    mesh = cpu_mesh(shape, ("dp", "tp"))
    layout = heap.Layout(programs=1)
    places = tuple(range(math.prod(shape)))
    region = heap.Region(name="", device_ids=(), world=2, layout=layout, origin=1, stride=1, magic=1, places=places)
    monkeypatch.setattr("jaxtaxfree.shmem._region", lambda *_: region)

    def asks(index: bool) -> bool:
        def steps(x: jax.Array, ranks: jax.Array) -> jax.Array:
            given = {"axis_index": ranks} if index else {}
            once = lambda _, x: x + jtf.top_k(x, 1, "tp", implementation="fused", **given)[0]  # noqa: E731
            return lax.fori_loop(0, 3, once, x)

        operands = sharded(mesh, P(None, "tp"), (2, 16), jnp.float32), sharded(mesh, P("tp"), (2,), jnp.int32)
        specs = P(None, "tp"), P("tp")
        program = jax.shard_map(steps, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"), check_vma=False)
        text = lower_for_cuda(program, *operands)
        assert TRITON_CALL in text
        return "partition_id" in text

    assert asks(index=False) and asks(index=True) == (shape[0] > 1)


def test_what_is_no_number_of_a_rank(mesh: Mesh) -> None:
    with fails(TypeError, "top_k takes as axis_index a whole number", "not float32"):
        lower_for_cuda(on_mesh(mesh, lambda x: jtf.top_k(x, 1, "tp", axis_index=jnp.float32(0))[0]), operand(mesh))
    with fails(ValueError, "decode takes as axis_index the number of one rank, i32[] or i32[1], not [2]"):
        check_index(jnp.zeros(2, jnp.int32), "decode")


def test_process_without_a_device_of_the_mesh(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    # JAX lets it build the program, and call it, as those do that have one.
    def region(name: str, devices: Any, world: int, layout: heap.Layout) -> heap.Region:
        ids = tuple(device.id for device in devices)
        return heap.Region(
            name=name,
            device_ids=ids,
            world=world,
            layout=layout,
            origin=1,
            stride=1,
            magic=1,
            places=tuple(range(len(ids))),
        )

    monkeypatch.setattr(Team, "on_gpus", True)
    monkeypatch.setattr(Team, "compute_capability", 90)
    monkeypatch.setattr(heap, "region", region)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert TRITON_CALL in lower_for_cuda(on_mesh(mesh, rotate), operand(mesh))


@pytest.mark.parametrize(
    ("changed", "parts"),
    (
        ({"signals": {"come": 1}}, ("no parameter 'come'", "(x_ptr, arrived, out_ptr)")),
        ({"BLOCK": 1, "STEP": 2}, ("no parameter 'BLOCK', 'STEP'",)),
        ({"scratch": {}}, ("1 operands and 1 results make 2 pointers, but it has 3 parameters for them", "inbox")),
        (
            {"out_type": (jax.ShapeDtypeStruct((1,), jnp.int32),) * 2},
            ("1 operands and 2 results make 3 pointers, but it has 2 parameters for them (x_ptr, out_ptr)",),
        ),
        ({"signals": {"come": 1}, "scratch": {}}, ("no parameter 'come'", "(x_ptr, inbox, arrived, out_ptr)")),
    ),
)
def test_kernel_and_arguments_do_not_match(mesh: Mesh, changed: dict[str, Any], parts: tuple[str, ...]) -> None:
    with fails(TypeError, "The kernel of rotate_kernel does not fit its call", *parts):
        jax.eval_shape(on_mesh(mesh, lambda x: rotate(x, **changed)), operand(mesh))


SCRATCH = jax.ShapeDtypeStruct((SIZE,), jnp.float32)


@pytest.mark.parametrize(
    ("error", "changed", "parts"),
    (
        (TypeError, {"scratch": {"inbox": 4}}, ("scratch 'inbox'", "shape and dtype", "not 4")),
        (TypeError, {"scratch": [SCRATCH]}, ("scratch as a mapping",)),
        (TypeError, {"out_type": 4}, ("out_type", "shape and dtype", "not 4")),
        (ValueError, {"WORLD": 3}, ("as WORLD the number of ranks, which is", "not 3: leave it out")),
        (ValueError, {"grid": -1}, ("one to three positive whole numbers", "not -1")),
        (ValueError, {"grid": 0}, ("not 0",)),
        (ValueError, {"grid": 1.5}, ("not 1.5",)),
        (ValueError, {"grid": None}, ("not None",)),
        (ValueError, {"grid": (1, 0)}, ("not (1, 0)",)),
        (ValueError, {"grid": (1, 1, 1, 1)}, ("not (1, 1, 1, 1)",)),
        (ValueError, {"grid": ()}, ("not ()",)),
        (TypeError, {"SIZE": [64]}, ("can be hashed", "not SIZE=[64]")),
        (TypeError, {"SIZE": (64, [64])}, ("can be hashed",)),
        (TypeError, {"SIZE": np.ones(2)}, ("can be hashed", "not SIZE=array(")),
        (
            TypeError,
            {"SIZE": jax.export.symbolic_shape("a")[0]},
            ("known when it is traced, not the symbolic size SIZE=a",),
        ),
        (ValueError, {"grid": jax.export.symbolic_shape("a")[0]}, ("one to three positive whole numbers, not a",)),
        (ValueError, {"num_warps": 64}, ("num_warps of 1, 2, 4, 8, 16 or 32, not 64",)),
        (ValueError, {"num_warps": 0}, ("not 0",)),
        (ValueError, {"num_warps": 3}, ("not 3",)),
        (ValueError, {"num_warps": 4.0}, ("not 4.0",)),
        (ValueError, {"num_warps": (4,)}, ("not (4,)",)),
        (ValueError, {"num_stages": -1}, ("num_stages", "not -1")),
        (ValueError, {"together": 0}, ("together of at least 1", "not 0")),
        (ValueError, {"signals": {"arrived": -1}}, ("signals 'arrived'", "not -1")),
        (ValueError, {"signals": {"arrived": (2, -1)}}, ("signals 'arrived'", "not (2, -1)")),
        (ValueError, {"signals": {"arrived": 1.5}}, ("signals 'arrived'", "not 1.5")),
        (ValueError, {"scratch": {}, "messages": {"inbox": -4}}, ("messages 'inbox'", "not -4")),
        (ValueError, {"descriptors": {"x_ptr": 64}}, ("descriptors 'x_ptr'", "not 64")),
        (ValueError, {"messages": {"inbox": 4}}, ("'inbox' is in two",)),
        (ValueError, {"signals": {"inbox": 1}}, ("'inbox' is in two",)),
        (ValueError, {"arrived": 1}, ("'arrived' is in two",)),
        (ValueError, {"scratch": {"team": SCRATCH}}, ("'team' is in two",)),
    ),
)
def test_arguments_that_cannot_be(
    mesh: Mesh, error: type[Exception], changed: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with fails(error, "rotate_kernel takes", *parts):
        jax.eval_shape(on_mesh(mesh, lambda x: rotate(x, **changed)), operand(mesh))


def test_traced_constant(mesh: Mesh) -> None:
    with fails(TypeError, "rotate_kernel takes constants that can be hashed", "SIZE="):
        jax.eval_shape(on_mesh(mesh, lambda x: rotate(x, SIZE=x[0])), operand(mesh))


def test_numbers_of_numpy(mesh: Mesh) -> None:
    for grid in (np.int64(1), [1, np.int32(1)]):
        changed = {"grid": grid, "num_warps": np.int32(4), "signals": {"arrived": np.int64(1)}}
        text = lower_for_cuda(on_mesh(mesh, lambda x, changed=changed: rotate(x, **changed)), operand(mesh))
        assert text.count(TRITON_CALL) == 1


@pytest.mark.parametrize("kernel", (rotate_kernel.fn, "rotate_kernel", None))
def test_kernel_that_is_not_decorated(mesh: Mesh, kernel: Any) -> None:
    call = functools.partial(shmem_call, kernel, axis_name="tp", out_type=SCRATCH, grid=1)
    with fails(TypeError, "shmem_call takes a kernel that is decorated with triton.jit or gluon.jit, not"):
        jax.eval_shape(on_mesh(mesh, call), operand(mesh))


def test_too_many_operands(mesh: Mesh) -> None:
    call = lambda x: shmem_call(  # noqa: E731
        twice_kernel,
        x,
        x,
        x,
        axis_name="tp",
        out_type=jax.ShapeDtypeStruct((SIZE,), x.dtype),
        grid=1,
        SIZE=SIZE,
        name="two",
    )
    with fails(TypeError, "The kernel of two", "3 operands and 1 results make 4 pointers", "has 3 parameters"):
        jax.eval_shape(on_mesh(mesh, call), operand(mesh))


@pytest.mark.parametrize("axis_name", ("model", ("tp", "model")))
def test_axis_that_is_not_bound(mesh: Mesh, axis_name: Any) -> None:
    with fails(NameError, "rotate_kernel needs a mesh axis", "'model'", "jax.shard_map"):
        jax.eval_shape(on_mesh(mesh, lambda x: rotate(x, axis_name)), operand(mesh))


def test_outside_shard_map() -> None:
    with fails(NameError, "my_rotation needs a mesh axis", "'tp'", "call it inside jax.shard_map"):
        rotate(np.zeros(SIZE, np.float32), name="my_rotation")


@pytest.mark.parametrize(
    "transform",
    (
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.grad(lambda y: f(y).sum())(x),
        lambda f, x: jax.linearize(f, x)[0],
    ),
    ids=("jvp", "grad", "linearize"),
)
def test_no_derivative(mesh: Mesh, transform: Callable) -> None:
    with fails(NotImplementedError, "no rule for differentiation", "jax.custom_jvp or jax.custom_vjp"):
        jax.eval_shape(lambda x: transform(on_mesh(mesh, rotate), x), operand(mesh))


def test_no_vmap(mesh: Mesh) -> None:
    batch = sharded(mesh, P(None, "tp"), (3, 4 * SIZE), "float32")
    program = jax.shard_map(jax.vmap(rotate), mesh=mesh, in_specs=P(None, "tp"), out_specs=P(None, "tp"))
    with fails(NotImplementedError, "no rule for vmap", "jax.custom_batching.custom_vmap"):
        jax.eval_shape(program, batch)


def test_derivative_of_the_author(mesh: Mesh) -> None:
    # As the error advises.
    def back(_: None, ct: jax.Array) -> tuple[jax.Array]:
        return (lax.ppermute(ct, "tp", [((i + 1) % 4, i) for i in range(4)]),)

    function = jax.custom_vjp(lambda x: rotate(x))
    function.defvjp(lambda x: (rotate(x), None), back)
    text = lower_for_cuda(jax.grad(lambda x: (on_mesh(mesh, function)(x) ** 2).sum()), operand(mesh))
    assert text.count(TRITON_CALL) == 1
    assert "collective_permute" in text


def test_results_vary_along_the_axis(mesh: Mesh) -> None:
    seen = []

    def program(x: jax.Array) -> jax.Array:
        out = rotate(x)
        seen.append(jax.typeof(out).mat.varying)
        return out

    out = jax.eval_shape(on_mesh(mesh, program), operand(mesh))
    assert (out.shape, out.dtype) == ((4 * SIZE,), jnp.float32)
    assert seen == [frozenset({"tp"})]
    with fails(ValueError, "out_specs", "'tp'"):
        jax.eval_shape(on_mesh(mesh, rotate, out_specs=P()), operand(mesh))
    assert jax.eval_shape(on_mesh(mesh, rotate, out_specs=P(), check_vma=False), operand(mesh)).shape == (SIZE,)


def test_results_vary_along_the_operands_axes(cpu_mesh: MeshFactory) -> None:
    seen = []

    def program(x: jax.Array) -> jax.Array:
        seen.append(jax.typeof(rotate(x)).mat.varying)
        seen.append(jax.typeof(rotate(jnp.zeros(SIZE))).mat.varying)
        return x

    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    both = P(("dp", "tp"))
    jax.eval_shape(
        jax.shard_map(program, mesh=mesh, in_specs=both, out_specs=both), sharded(mesh, both, (8 * SIZE,), "float32")
    )
    assert seen == [{"dp", "tp"}, {"tp"}]


def test_results_are_a_pytree(mesh: Mesh) -> None:
    one = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    call = functools.partial(
        shmem_call, twice_kernel, axis_name="tp", out_type={"a": one, "b": [one]}, grid=(1, 1), SIZE=SIZE
    )
    out = jax.eval_shape(on_mesh(mesh, call), operand(mesh))
    assert jax.tree.map(lambda leaf: leaf.shape, out) == {"a": (4 * SIZE,), "b": [(4 * SIZE,)]}
    text = lower_for_cuda(on_mesh(mesh, call), operand(mesh))
    assert text.count(TRITON_CALL) == 1
    assert "has_side_effect = true" in text


@pytest.mark.parametrize("affected", (True, False))
@pytest.mark.parametrize("results", (1, 2))
def test_xla_takes_no_slice_of_what_would_run_twice(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, affected: bool, results: int
) -> None:
    """XLA of jaxlib 0.11 repeats a call with side effects, several results and an operand that is a slice."""
    monkeypatch.setattr(call_module, "RUNS_TWICE_WITH_SLICES", affected)
    one = jax.ShapeDtypeStruct((SIZE,), jnp.float32)

    def of_layer(x: jax.Array) -> Any:
        x = jnp.broadcast_to(x, (3, SIZE))[1]
        if results == 1:
            return rotate(x)
        return shmem_call(twice_kernel, x, axis_name="tp", out_type=[one] * 2, grid=1, SIZE=SIZE)

    text = lower_for_cuda(on_mesh(mesh, of_layer), operand(mesh))
    assert text.count(TRITON_CALL) == 1
    assert text.count("stablehlo.optimization_barrier") == (affected and results > 1)


@pytest.mark.parametrize("wrong", ("9.0", "abc", "9", "-90", "", "sm_90"))
def test_compute_capability_that_is_none(mesh: Mesh, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", wrong)
    with fails(ValueError, f"JAXTAXFREE_COMPUTE_CAPABILITY is a whole number such as 90, for 9.0, not {wrong!r}"):
        lower_for_cuda(on_mesh(mesh, rotate), operand(mesh))


def test_on_cpus(mesh: Mesh) -> None:
    with fails(
        NotImplementedError,
        "rotate_kernel is a Triton kernel for NVIDIA GPUs, and this program is lowered for cpu: ",
        'implementation="simulate" runs it on the CPU',
        "lax.platform_dependent(..., cuda=..., default=...)",
    ):
        jax.jit(on_mesh(mesh, rotate))(np.zeros(4 * SIZE, np.float32))


def test_for_two_platforms(mesh: Mesh) -> None:
    with fails(NotImplementedError, "rotate_kernel is a Triton kernel for NVIDIA GPUs", "cpu"):
        lower_for_cuda(on_mesh(mesh, rotate), operand(mesh), platforms=("cuda", "cpu"))


@pytest.mark.parametrize("check_vma", (True, False))
def test_calls_are_not_merged(mesh: Mesh, check_vma: bool) -> None:
    text = lower_for_cuda(on_mesh(mesh, lambda x: rotate(rotate(x)), check_vma=check_vma), operand(mesh))
    assert text.count(TRITON_CALL) == 2
    text = lower_for_cuda(on_mesh(mesh, lambda x: rotate(x) + rotate(x), check_vma=check_vma), operand(mesh))
    assert text.count(TRITON_CALL) == 2


def test_named_in_the_program(mesh: Mesh) -> None:
    program = jax.jit(on_mesh(mesh, lambda x: rotate(x, name="my_rotation")))
    lowered = program.trace(operand(mesh)).lower(lowering_platforms=("cuda",))
    assert "my_rotation" in lowered.as_text(debug_info=True)


def test_partly_manual_mesh(cpu_mesh: MeshFactory) -> None:
    mesh = cpu_mesh((2, 4), ("dp", "tp"))
    with fails(NotImplementedError, "['dp']", "make all axes manual"):
        lower_for_cuda(on_mesh(mesh, rotate, axis_names={"tp"}), operand(mesh))


def test_abstract_mesh() -> None:
    mesh = mesh_of(4)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), fails(NotImplementedError, "mesh is abstract"):
        lower_for_cuda(
            jax.shard_map(rotate, in_specs=P("tp"), out_specs=P("tp")), jax.ShapeDtypeStruct((4 * SIZE,), jnp.float32)
        )


def test_nothing_is_logged(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        lower_for_cuda(on_mesh(mesh, rotate), operand(mesh))
    assert [record for record in caplog.records if record.name == "jaxtaxfree"] == []


def wrong(x: jax.Array, **changed: Any) -> jax.Array:
    call = {"axis_name": "tp", "out_type": x, "grid": 1, "name": "doubtful"}
    return shmem_call(wrong_kernel, x, scratch={"inbox": x}, messages={"box": 64}, **call | changed)


def place_of(source: str, function: str) -> str:
    """How an error names the line of this file that has this source."""
    [line] = [i + 1 for i, line in enumerate(Path(__file__).read_text().splitlines()) if line.strip() == source]
    return f"runtime/test_shmem_call.py:{line} in {function}"


def line_of(source: str, function: str = "wrong_kernel") -> str:
    return f"{place_of(source, function)}, `{source}`"


TUPLE = "'tuple' object has no attribute dtype"
A_TUPLE = "the parameter inbox is a tuple, and the pointer is shmem.scratch(me, inbox, dtype)."


@pytest.mark.parametrize(
    ("what", "parts"),
    (
        (
            "name",
            (line_of("tl.store(out_ptr + element, no_such_name)  # noqa: F821"), ": NameError('no_such_name is not"),
        ),
        ("range", (line_of("tl.store(out_ptr + tl.arange(0, 63), 1)"), ": arange's range must be a power of 2.")),
        ("assertion", (line_of('tl.static_assert(False, "as it is called")'), ": as it is called.")),
        (
            "inner",
            (
                line_of("tl.store(out_ptr, out_ptr.no_such_attribute)", "wrong_part"),
                f", called from {place_of('wrong_part(out_ptr)', 'wrong_kernel')}: ",
                "no_such_attribute",
            ),
        ),
        ("scratch", (line_of("tl.store(inbox + element, 1)"), f": {TUPLE}; {A_TUPLE}")),
        (
            "scratch of the API",
            (line_of("shmem.put(me, inbox, x_ptr, 0)"), " (kernels/shmem.py:", " in remote): ", TUPLE, f"; {A_TUPLE}"),
        ),
        ("messages", (TUPLE, "; the parameter box is a tuple, and the pointer is shmem.messages(me, box).")),
        (
            "another name",
            (
                line_of("tl.store(mine + element, 1)"),
                f": {TUPLE}; a parameter for scratch or messages is a tuple, and the pointer is "
                "shmem.scratch(me, inbox, dtype) or shmem.messages(me, box).",
            ),
        ),
        ("team", (line_of("tl.store(out_ptr + team, 1)"),)),
        ("break", (line_of("break"), ": unsupported AST node type: Break.")),
        ("no reason", (line_of("tl.store(out_ptr, team[element])"), ": AssertionError.")),
    ),
)
def test_kernel_that_does_not_compile(mesh: Mesh, what: str, parts: tuple[str, ...]) -> None:
    settings = f"compute capability 9.0 with num_warps=2, num_stages=3, WRONG={what!r}"
    with fails(
        jtf.CompileError, "The kernel wrong_kernel of doubtful", settings, "does not compile: ", *parts
    ) as found:
        lower_for_cuda(on_mesh(mesh, lambda x: wrong(x, WRONG=what, num_warps=2)), operand(mesh))
    assert "\n" not in str(found.value) and str(found.value).endswith(".")
    assert found.value.__cause__ is not None


def fail_in_a_pass(*_: Any) -> Any:
    # As jax-triton does.
    raise ValueError("TTIR->TTGIR pass failed!") from RuntimeError("PassManager::run failed")


def test_compiler_that_fails(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", fail_in_a_pass)
    with fails(jtf.CompileError, "wrong_kernel of doubtful", "does not compile: PassManager::run failed."):
        lower_for_cuda(on_mesh(mesh, lambda x: wrong(x, WRONG="nothing")), operand(mesh))


def test_a_kernel_that_does_not_compile_is_not_replaced(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    program = on_mesh(mesh, lambda x: jtf.psum(x, "tp", config={"protocol": "signals", "block": 16}), out_specs=P())
    assert TRITON_CALL in lower_for_cuda(program, sharded(mesh, P("tp"), (4 * 48,), "float32"))
    monkeypatch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", fail_in_a_pass)
    with fails(jtf.CompileError, "The kernel psum_kernel of psum", "SIZE=40", "PassManager::run failed"):
        lower_for_cuda(program, sharded(mesh, P("tp"), (4 * 40,), "float32"))


@pytest.mark.parametrize(
    ("capability", "num_stages", "most"),
    (
        (80, 3, None),
        (86, 5, 101376),
        (89, 5, 101376),
        (120, 5, 101376),
        (80, 7, 166912),
        (90, 4, None),
        (90, 9, 232448),
        (100, 9, 232448),
    ),
)
def test_more_shared_memory_than_there_is(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, capability: int, num_stages: int, most: int | None
) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", str(capability))

    def call(x: jax.Array) -> jax.Array:
        out_type = jax.ShapeDtypeStruct((64, 64), x.dtype)
        return shmem_call(square_kernel, x, axis_name="tp", out_type=out_type, grid=1, num_stages=num_stages, SIZE=64)

    if most is None:
        assert TRITON_CALL in lower_for_cuda(on_mesh(mesh, call), operand(mesh))
        return
    with fails(
        jtf.CompileError, "square_kernel", f"num_stages={num_stages}", "smaller blocks or fewer stages"
    ) as found:
        lower_for_cuda(on_mesh(mesh, call), operand(mesh))
    (needed,) = re.findall(rf"needs (\d+) bytes of shared memory, of which there are {most}:", str(found.value))
    assert most < int(needed) <= 2 * num_stages * 4 * 64 * 64 + 1024
