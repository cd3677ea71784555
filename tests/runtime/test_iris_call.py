"""`iris_call` and workspaces: what they refuse, what they lower to, and results in the simulator. No GPU needed."""

import functools
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import iris, simulator
from jaxtaxfree.iris import wrapper
from jaxtaxfree.written import compiled_from
from tests.helpers import gluon_kernels, iris_programs
from tests.helpers.support import SIDE_EFFECT, TRITON_CALL, fails, lower_for_cuda, mesh_of, one_program, sharded

SIZE = 32
FLAG = iris.symmetric((1,), jnp.int32, fill=0)
AFTER = (iris.RANK + 1) % iris.WORLD


@pytest.fixture
def mesh() -> Mesh:
    return mesh_of(3)


def rotated(x: jax.Array, axis_name: Any = "tp", **changed: Any) -> Any:
    given: dict[str, Any] = {
        "x": x,
        "inbox": iris.symmetric((SIZE,), x.dtype),
        "flag": FLAG,
        "out": iris.Out((SIZE,), x.dtype),
        "heap_bases": iris.BASES,
        "rank": iris.RANK,
        "after": AFTER,
        "SIZE": SIZE,
    }
    return jtf.iris_call(iris_programs.rotate, **{"axis_name": axis_name, "grid": 1, **given, **changed})


def in_two(x: jax.Array, name: str = "workspace", implementation: str | None = None, after: Any = None) -> jax.Array:
    """`rotated` by two launches that share buffers."""
    inbox = iris.symmetric((SIZE,), x.dtype)
    ws = iris.workspace("tp", name=name, after=after, implementation=implementation, inbox=inbox, flag=FLAG)
    ws = jtf.iris_call(
        iris_programs.send,
        workspace=ws,
        grid=1,
        x=x,
        inbox=ws.inbox,
        flag=ws.flag,
        heap_bases=iris.BASES,
        rank=iris.RANK,
        after=AFTER,
        SIZE=SIZE,
    )
    out, _ = jtf.iris_call(
        iris_programs.receive,
        workspace=ws,
        grid=1,
        inbox=ws.inbox,
        flag=ws.flag,
        out=iris.Out((SIZE,), x.dtype),
        SIZE=SIZE,
    )
    return out


def scattered(x: jax.Array) -> jax.Array:
    """Every rank's x, which each has stored into all ranks' results."""
    return jtf.iris_call(
        iris_programs.scatter,
        axis_name="tp",
        grid=1,
        x=x,
        out=iris.symmetric((lax.axis_size("tp"), SIZE), x.dtype, result=True),
        heap_bases=iris.BASES,
        rank=iris.RANK,
        world=iris.WORLD,
        SIZE=SIZE,
    )


def operand(mesh: Mesh) -> jax.ShapeDtypeStruct:
    return sharded(mesh, P("tp"), (SIZE * mesh.size,), "float32")


def values(mesh: Mesh) -> jax.Array:
    return jax.device_put(jnp.arange(SIZE * mesh.size, dtype=jnp.float32), NamedSharding(mesh, P("tp")))


def on_mesh(mesh: Mesh, function: Callable, **keywords: Any) -> Callable:
    return one_program(function, mesh=mesh, **{"in_specs": P("tp"), "out_specs": P("tp")} | keywords)


@pytest.mark.parametrize("policy", ("random", "ahead", "straggler"))
def test_a_kernel_in_a_loop(mesh: Mesh, policy: str) -> None:
    """Flags hold 0 in each call, though the kernel leaves 1."""

    def run(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 4, lambda i, x: rotated(x, implementation="simulate") + 1, x)

    x = values(mesh)
    for seed in range(4):
        with simulator.simulating(policy=policy, seed=seed):
            got = jax.block_until_ready(on_mesh(mesh, run)(x))
    np.testing.assert_array_equal(got, np.roll(x, SIZE * 4) + 4)


@pytest.mark.parametrize(
    ("line", "instead"),
    (
        ("iris_came = around.meet(", "iris_came = iris_me.ready"),
        ("around.fill(", None),
        ("around.write_table(", None),
    ),
)
def test_a_wrapper_without_one_of_its_parts_is_found(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, line: str, instead: str | None
) -> None:
    def faulty(kernel: Any, source: str, name: str) -> Any:
        lines = source.splitlines()
        (at,) = (i for i, each in enumerate(lines) if line in each)
        indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        lines[at] = indent + (instead or "pass")
        return compiled_from("\n".join(lines) + "\n", "<faulty>", name, {**space, "kernel_": kernel})

    space = {
        "tl": iris_programs.tl,
        "triton": iris_programs.triton,
        "shmem": wrapper.shmem,
        "around": wrapper.iris_launch,
    }
    monkeypatch.setattr(wrapper, "defined", faulty)
    simulator.reset()
    run = on_mesh(mesh, functools.partial(rotated, implementation="simulate"))
    found = []
    for seed in range(10):
        with simulator.simulating(seed=seed, policy="ahead" if seed % 2 else "random", patience=2000):
            try:
                for _ in range(3):
                    jax.block_until_ready(run(values(mesh)))
            except Exception as error:
                found.append(error)
    simulator.reset()
    assert found


def test_symmetric_operands_and_what_reads_them(mesh: Mesh) -> None:
    def call(x: jax.Array) -> jax.Array:
        return jtf.iris_call(
            iris_programs.moves,
            axis_name="tp",
            grid=1,
            x=iris.symmetric(x),
            gathered=iris.Out((3, SIZE), x.dtype),
            copied=iris.symmetric((SIZE,), x.dtype),
            heap_bases=iris.BASES,
            rank=iris.RANK,
            after=AFTER,
            SIZE=SIZE,
            implementation="simulate",
        )

    x = values(mesh)
    got = np.asarray(on_mesh(mesh, call)(x)).reshape(mesh.size, 3, SIZE)
    want = np.roll(np.asarray(x), -SIZE).reshape(mesh.size, 1, SIZE).repeat(3, 1)
    want[:, 0, -1] = -1
    np.testing.assert_array_equal(got, want)


def test_atomics(mesh: Mesh) -> None:
    start = np.array([0, 0, 0, 0, -1, 0, 0, 0, 0, *[0] * 7], np.int32)

    def call(x: jax.Array) -> jax.Array:
        return jtf.iris_call(
            iris_programs.counts,
            axis_name="tp",
            grid=1,
            cells=iris.symmetric(jnp.asarray(start)),
            old=iris.Out((16,), jnp.int32),
            heap_bases=iris.BASES,
            rank=iris.RANK,
            world=iris.WORLD,
            flag=FLAG,
            implementation="simulate",
        )

    got = np.asarray(on_mesh(mesh, call)(values(mesh)))[:9]
    assert list(got[:7]) == [6, -6, 1 ^ 2 ^ 3, 7, ~7, -3, 3]
    assert got[7] in (1, 2, 3) and got[8] in (1, 2, 3)


@pytest.mark.parametrize(("call", "launches"), ((rotated, 1), (in_two, 3), (scattered, 3)))
def test_launches(mesh: Mesh, no_code: None, call: Callable, launches: int) -> None:
    assert lower_for_cuda(on_mesh(mesh, call), operand(mesh)).count(TRITON_CALL) == launches


def test_one_rank_leaves_something_to_later_launches(no_code: None) -> None:
    """XLA must not think that a launch only has results, where another one finds what it has left."""
    alone = mesh_of(1)
    text = lower_for_cuda(on_mesh(alone, in_two), operand(alone))
    assert text.count(SIDE_EFFECT) == text.count(TRITON_CALL) == 3


def launches_of(mesh: Mesh, run: Callable) -> list[list[str]]:
    """Each launch of a program, and the ones that it comes from, the last one first."""

    def producers(variable: Any, by: dict[Any, Any]) -> list[str]:
        if variable not in by:
            return []
        equation = by[variable]
        before = [each for operand in equation.invars if not hasattr(operand, "val") for each in producers(operand, by)]
        return [equation.params["name"], *before] if equation.primitive.name == "shmem_call" else before

    (equation,) = (each for each in jax.make_jaxpr(on_mesh(mesh, run))(operand(mesh)).eqns)
    inner = equation.params["jaxpr"].eqns[0].params["jaxpr"]
    by = {variable: each for each in inner.eqns for variable in each.outvars}
    return [producers(each.outvars[0], by) for each in inner.eqns if each.primitive.name == "shmem_call"]


def opened_behind(mesh: Mesh, run: Callable) -> list[list[str]]:
    """Of each launch of a program that opens a workspace, the ones that it comes from."""
    return [before for name, *before in launches_of(mesh, run) if name.endswith(" open")]


def test_launches_of_a_workspace_follow_each_other(mesh: Mesh) -> None:
    """Each takes the token of the one before."""
    opened = ["workspace open"]
    assert launches_of(mesh, in_two) == [opened, ["send", *opened], ["receive", "send", *opened]]


@pytest.mark.parametrize("names", (("one", "one"), ("one", "two")), ids=str)
def test_workspaces_that_share_memory_follow_each_other(mesh: Mesh, no_code: None, names: tuple[str, str]) -> None:
    """The second is opened behind the last launch of the first, whose results it does not need."""
    launches = ["receive", "send", "one open"] if names[0] == names[1] else []
    behind = opened_behind(mesh, lambda x: in_two(x, names[0]) + in_two(2 * x, names[1]))
    assert behind == [[], launches]


def test_a_workspace_is_opened_after_what_it_is_told(mesh: Mesh, no_code: None) -> None:
    def run(x: jax.Array) -> jax.Array:
        return in_two(x, "two", after={"x": (first := in_two(x, "one"))}) + first

    assert opened_behind(mesh, run) == [[], ["receive", "send", "one open"]]
    text = lower_for_cuda(on_mesh(mesh, run), operand(mesh))
    assert text.count(TRITON_CALL) == 6
    with fails(TypeError, "Triton has no dtype for complex64"):
        jax.eval_shape(on_mesh(mesh, lambda x: in_two(x, after=x.astype(jnp.complex64))), operand(mesh))


def test_a_call_whose_buffers_are_results_opens_after_its_operands(mesh: Mesh, no_code: None) -> None:
    def run(x: jax.Array) -> jax.Array:
        return scattered(in_two(x))

    assert opened_behind(mesh, run) == [[], ["receive", "send", "workspace open"]]


def test_workspaces_of_programs_that_threads_trace(mesh: Mesh) -> None:
    """Another thread traces a program with the same workspace in between."""

    def other() -> None:
        assert opened_behind(mesh, in_two) == [[]]

    def run(x: jax.Array) -> jax.Array:
        first = in_two(x)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(other).result()
        return first + in_two(2 * x)

    assert opened_behind(mesh, run) == [[], ["receive", "send", "workspace open"]]


def test_a_loop_of_workspaces(mesh: Mesh, no_code: None) -> None:
    def run(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (in_two(x), None), x, None, length=5)[0]

    assert lower_for_cuda(on_mesh(mesh, run), operand(mesh)).count(TRITON_CALL) == 3


def test_a_workspace_is_a_pytree(mesh: Mesh, no_code: None) -> None:
    def run(x: jax.Array) -> jax.Array:
        ws = iris.workspace("tp", inbox=iris.symmetric(x))
        ws = lax.fori_loop(0, 3, lambda i, ws: ws.read("inbox")[1], ws)
        return ws.read("inbox")[0]

    assert lower_for_cuda(on_mesh(mesh, run), operand(mesh)).count(TRITON_CALL) == 3


def test_workspaces_are_simulated_elsewhere(mesh: Mesh) -> None:
    with fails(NotImplementedError, "workspace open", "run_iris"):
        on_mesh(mesh, functools.partial(in_two, implementation="simulate"))(values(mesh))


def test_names_that_others_have(mesh: Mesh) -> None:
    def call(x: jax.Array) -> jax.Array:
        given = {"team": 1, "WORLD": iris.WORLD, "me": iris.RANK - 1, "axis_name": 4}
        return jtf.iris_call(
            iris_programs.many,
            given,
            axis_name="tp",
            grid=1,
            x=x,
            out=iris.Out((SIZE,), x.dtype),
            SIZE=SIZE,
            implementation="simulate",
        )

    x = values(mesh)
    shift = 1 + 30 + 100 * (np.arange(3).repeat(SIZE) - 1) + 4000
    np.testing.assert_array_equal(on_mesh(mesh, call)(x), 2 * np.asarray(x) + shift)


OTHER = iris.arguments.Buffer("f", (1,), np.dtype("int32"))
WRONG: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "no such parameter": ({"nothing": 1}, TypeError, ("no parameter 'nothing'",)),
    "an array for a constant": ({"SIZE": np.zeros(3)}, TypeError, ("'SIZE' is a constant, and is given an array",)),
    "a buffer for a constant": ({"SIZE": FLAG}, TypeError, ("'SIZE' is a constant, and is given Symmetric",)),
    "a number as an array": ({"after": np.zeros(())}, TypeError, ("'after'", "without dimensions", "[1]")),
    "what has no hash": ({"after": [1]}, TypeError, ("'after' is given [1]", "hashed")),
    "no result": ({"out": np.zeros(SIZE)}, TypeError, ("rotate has no result", "Out(...)")),
    "no axis": ({"axis_name": None}, TypeError, ("axis_name, or a workspace",)),
    "another axis": ({"axis_name": "pp"}, NameError, ("pp",)),
    "a grid of nothing": ({"grid": 0}, ValueError, ("grid",)),
    "warps": ({"num_warps": 3}, ValueError, ("num_warps",)),
    "an implementation": ({"implementation": "fast"}, ValueError, ("'fast'",)),
    "another's buffer": ({"flag": OTHER}, TypeError, ("'flag'", "not the call's")),
}


@pytest.mark.parametrize("what", WRONG)
def test_arguments_that_do_not_fit(mesh: Mesh, what: str) -> None:
    changed, error, parts = WRONG[what]
    with fails(error, *parts):
        jax.eval_shape(on_mesh(mesh, functools.partial(rotated, **changed)), operand(mesh))


def test_all_reasons_at_once(mesh: Mesh) -> None:
    def call(x: jax.Array) -> jax.Array:
        return jtf.iris_call(iris_programs.rotate, axis_name="tp", grid=1, x=x, SIZE=x, other=1)

    parts = ("no parameter 'other'", "inbox, flag, out, heap_bases, rank, after", "'SIZE' is a constant")
    with fails(TypeError, "The Iris kernel rotate does not fit its call", *parts):
        jax.eval_shape(on_mesh(mesh, call), operand(mesh))


def test_a_kernel_that_is_not_decorated(mesh: Mesh) -> None:
    with fails(TypeError, "iris_call takes a kernel that is decorated"):
        jtf.iris_call(lambda x: x, axis_name="tp", grid=1)
    with fails(TypeError, "triton.jit", "exchange_kernel is one of gluon.jit", "shmem_call"):
        jtf.iris_call(gluon_kernels.exchange_kernel, axis_name="tp", grid=1)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    (
        ({"like": np.zeros(3), "fill": 0}, ("not both",)),
        ({"like": np.zeros(3), "dtype": jnp.int32}, ("not both",)),
        ({"like": (3,)}, ("a shape with its dtype",)),
        ({"like": (3,), "dtype": jnp.int32, "fill": [1, 2, 3]}, ("[1, 2, 3]", "the array itself")),
    ),
)
def test_buffers_that_cannot_be(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    with fails(TypeError, *parts):
        iris.symmetric(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    (
        ({"inbox": np.zeros(3)}, TypeError, ("symmetric(...)", "inbox")),
        ({"token": FLAG}, TypeError, ("'token'",)),
        ({"implementation": "fast"}, ValueError, ("'fast'",)),
    ),
)
def test_workspaces_that_cannot_be(
    mesh: Mesh, arguments: dict[str, Any], error: type[Exception], parts: tuple[str, ...]
) -> None:
    with fails(error, *parts):
        jax.eval_shape(on_mesh(mesh, lambda x: iris.workspace("tp", **arguments).token), operand(mesh))


def test_a_buffer_that_a_workspace_has_not(mesh: Mesh) -> None:
    with fails(AttributeError, "'inbox'", "no buffer 'outbox'"):
        jax.eval_shape(on_mesh(mesh, lambda x: iris.workspace("tp", name="inbox", flag=FLAG).outbox), operand(mesh))


def test_a_buffer_of_its_own_in_a_workspace(mesh: Mesh) -> None:
    def call(x: jax.Array) -> jax.Array:
        ws = iris.workspace("tp", flag=FLAG)
        out = iris.Out((1,), jnp.float32)
        return jtf.iris_call(iris_programs.receive, workspace=ws, grid=1, inbox=FLAG, flag=ws.flag, out=out, SIZE=1)[0]

    with fails(TypeError, "'inbox' is given a buffer of its own: let the workspace have it"):
        jax.eval_shape(on_mesh(mesh, call), operand(mesh))


def line_of(kernel: Any, text: str) -> str:
    source, first = inspect.getsourcelines(kernel.fn)
    return f"iris_programs.py:{first + next(i for i, line in enumerate(source) if text in line)} "


@pytest.mark.parametrize(
    ("kernel", "of", "text"),
    (
        (iris_programs.deaf, iris_programs.deaf, "while"),
        (iris_programs.deaf_in_steps, iris_programs.deaf_in_steps, "while"),
        (iris_programs.deaf_inside, iris_programs.deaf, "while"),
        (iris_programs.uncached, iris_programs.uncached, "tl.load"),
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_waits_that_do_not_last(mesh: Mesh, kernel: Any, of: Any, text: str) -> None:
    def call(x: jax.Array) -> jax.Array:
        return jtf.iris_call(kernel, axis_name="tp", grid=1, flag=FLAG, out=iris.Out((1,), jnp.int32))

    remedy = "jaxtaxfree.iris" if kernel is iris_programs.uncached else "jaxtaxfree.iris.acquiring(kernel)"
    with fails(ValueError, line_of(of, text), "tl.load(flag" if "uncached" not in str(kernel) else "'.cv'", remedy):
        jax.eval_shape(on_mesh(mesh, call), operand(mesh))


def test_loops_that_are_no_such_waits(mesh: Mesh, no_code: None) -> None:
    def call(x: jax.Array) -> jax.Array:
        out = iris.Out((1,), jnp.int32)
        return jtf.iris_call(iris_programs.attentive, axis_name="tp", grid=1, flag=FLAG, out=out, LIMIT=1)

    assert TRITON_CALL in lower_for_cuda(on_mesh(mesh, call), operand(mesh))


@pytest.mark.parametrize(
    "kernel", (iris_programs.deaf, iris_programs.deaf_in_steps), ids=lambda kernel: kernel.__name__
)
def test_waits_made_to_last(mesh: Mesh, kernel: Any) -> None:
    """The wait goes on where the simulator, like a GPU, has stored a 1 later on."""
    lasting = iris.acquiring(kernel)
    assert iris.reading.problems(lasting) == []
    assert lasting is not kernel and iris.reading.problems(kernel) != []

    def call(x: jax.Array) -> jax.Array:
        flag = iris.symmetric((1,), jnp.int32, fill=1)
        out = iris.Out((1,), jnp.int32)
        return jtf.iris_call(lasting, axis_name="tp", grid=1, flag=flag, out=out, implementation="simulate")

    np.testing.assert_array_equal(on_mesh(mesh, call)(values(mesh)), np.ones(3))


def test_nothing_is_lowered_while_a_file_is_read(mesh: Mesh, no_code: None) -> None:
    """Triton looks at torch, of which another thread may see a half or a placeholder."""
    with ThreadPoolExecutor(1) as pool:
        with iris.as_iris():
            lowered = pool.submit(lambda: lower_for_cuda(on_mesh(mesh, rotated), operand(mesh)))
            with pytest.raises(TimeoutError):
                lowered.result(0.5)
        assert TRITON_CALL in lowered.result(60)


def test_no_wait_to_be_made_lasting() -> None:
    with fails(ValueError, "rotate has no wait"):
        iris.acquiring(iris_programs.rotate)


def test_a_kernel_that_needs_the_rank_as_a_constant(mesh: Mesh, no_code: None) -> None:
    def call(x: jax.Array, **how: Any) -> jax.Array:
        out = iris.Out((1,), jnp.int32)
        return jtf.iris_call(iris_programs.as_python_says, axis_name="tp", grid=1, out=out, rank=iris.RANK, **how)

    simulated = on_mesh(mesh, functools.partial(call, implementation="simulate"))
    np.testing.assert_array_equal(simulated(values(mesh)), np.arange(3))
    assert TRITON_CALL in lower_for_cuda(on_mesh(mesh, call), operand(mesh))
    with fails(jtf.CompileError, "as_python_says"):
        lower_for_cuda(on_mesh(mesh, functools.partial(call, constant_rank=False)), operand(mesh))


def test_a_kernel_that_does_not_compile(mesh: Mesh) -> None:
    def call(x: jax.Array) -> jax.Array:
        return jtf.iris_call(
            iris_programs.wrong, axis_name="tp", grid=1, x=x, out=iris.Out(x.shape, x.dtype), SIZE=SIZE
        )

    place = line_of(iris_programs.wrong, "no_such_name")
    with fails(jtf.CompileError, "The kernel wrong of wrong", f"{place}in wrong", "no_such_name is not defined"):
        lower_for_cuda(on_mesh(mesh, call), operand(mesh))


def test_no_derivative(mesh: Mesh) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return on_mesh(mesh, rotated)(x).sum()

    with fails(NotImplementedError, "no rule for differentiation", "custom_vjp"):
        jax.eval_shape(jax.grad(loss), operand(mesh))


def test_a_derivative_of_the_user(mesh: Mesh) -> None:
    @jax.custom_vjp
    def turn(x: jax.Array) -> jax.Array:
        return rotated(x, implementation="simulate")

    def back(_: None, g: jax.Array) -> tuple[jax.Array]:
        return (rotated(g, after=(iris.RANK + iris.WORLD - 1) % iris.WORLD, implementation="simulate"),)

    turn.defvjp(lambda x: (turn(x), None), back)
    weights = values(mesh)
    got = jax.jit(jax.grad(lambda x: (on_mesh(mesh, turn)(x) * weights).sum()))(weights)
    np.testing.assert_array_equal(got, np.roll(np.asarray(weights), -SIZE))


def test_numbers_of_the_rank() -> None:
    number = 3 + (iris.RANK * 2 - 1) // 2 % iris.WORLD - (5 - iris.RANK)
    for rank in range(4):
        assert number.compute(rank, 4) == 3 + (rank * 2 - 1) // 2 % 4 - (5 - rank)
    assert repr((iris.RANK + 1) % iris.WORLD) == "((RANK + 1) % WORLD)"
    with pytest.raises(TypeError):
        iris.RANK + 1.5


FILE = """
import torch
import triton
import triton.language as tl
import iris
from iris import DeviceContext
from iris.device.utils import read_realtime


@torch.no_grad()
def host(x: torch.Tensor):
    return iris.iris(1 << 30)


@triton.jit
def kernel(x, out, heap_bases, rank: tl.constexpr, after, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, iris.load(x + at, rank, after, heap_bases))
"""


def test_a_file_that_imports_iris(mesh: Mesh, tmp_path: Path) -> None:
    (tmp_path / "user_kernels.py").write_text(FILE)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("iris", "torch")}
    kernel = iris.kernels_of(tmp_path / "user_kernels.py", home=tmp_path).kernel
    after = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("iris", "torch")}
    assert before == after

    def call(x: jax.Array) -> jax.Array:
        out = iris.Out(x.shape, x.dtype)
        numbers = {"heap_bases": iris.BASES, "rank": iris.RANK, "after": AFTER, "SIZE": SIZE}
        return jtf.iris_call(
            kernel, axis_name="tp", grid=1, x=iris.symmetric(x), out=out, implementation="simulate", **numbers
        )

    x = values(mesh)
    np.testing.assert_array_equal(on_mesh(mesh, call)(x), np.roll(np.asarray(x), -SIZE))


def test_words_stand_in_for_iris() -> None:
    with iris.as_iris() as module:
        import iris as found  # type: ignore[import-not-found]

        assert found is module and found.load is iris.load and found.DeviceContext is iris.Context
    assert sys.modules.get("iris") is not module


def test_iris_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iris.loading, "home_of_iris", lambda: None)
    with fails(ModuleNotFoundError, "Iris is not installed"), iris.as_iris(own=False):
        pass
