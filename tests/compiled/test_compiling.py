"""That compiling less, and not twice, changes nothing of what tests ask for."""

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.compiled.test_gluon import (
    GLOBAL_SCRATCH_SIZE,
    NAME,
    PTX,
    SHARED_MEMORY,
    WARPS,
    launch_of,
    lower,
    wrong_kernel,
)
from tests.helpers import compiling
from tests.helpers.gluon_kernels import exchange
from tests.helpers.support import fails, lower_for_cuda, mesh_of, sharded


def triton_program() -> str:
    """Of a kernel that needs shared memory."""
    call = functools.partial(jtf.all_gather_matmul, axis_name="tp", implementation="fused", config={"kernel": "few"})
    mesh, specs = mesh_of(4), (P("tp"), P(None, "tp"))
    program = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"))
    return lower_for_cuda(program, *(sharded(mesh, spec, (64, 64), "bfloat16") for spec in specs))


def gluon_program() -> str:
    return lower(functools.partial(exchange, own_descriptor=True))


@pytest.mark.parametrize("program", (triton_program, gluon_program))
def test_memory_is_that_of_the_whole_compilation(program: Callable[[], str]) -> None:
    full = program()
    with compiling.no_code():
        halfway = program()
    kernels = launch_of(full), launch_of(halfway)
    for field in (NAME, WARPS, SHARED_MEMORY):
        assert kernels[0][field] == kernels[1][field]
    assert kernels[0][SHARED_MEMORY] > 0
    assert [GLOBAL_SCRATCH_SIZE in kernel for kernel in kernels] == [False, False]
    assert ("xui8>" in full) == ("xui8>" in halfway) == (program is gluon_program)  # memory of the program
    assert kernels[1][PTX] == b".visible .entry " + kernels[0][NAME]
    assert len(launch_of(program())[PTX]) > 1000  # nothing of it is left


@pytest.mark.parametrize("program", (triton_program, gluon_program))
def test_names_are_those_of_the_whole_compilation(program: Callable[[], str], no_code: None) -> None:
    name = b"all_gather_matmul_few_kernel" if program is triton_program else b"exchange_kernel"
    kernel = launch_of(program())
    assert kernel[NAME] == name
    assert SHARED_MEMORY not in kernel


@pytest.mark.parametrize(("wrong", "memory"), (("name", False), ("name", True), ("warps", True), ("memory", True)))
def test_what_is_wrong_is_found(wrong: str, memory: bool) -> None:
    call = functools.partial(jtf.shmem_call, wrong_kernel, axis_name="tp", grid=1, SIZE=1024, WRONG=wrong)
    with compiling.no_code(memory=memory), fails(jtf.CompileError, "wrong_kernel"):
        lower(lambda x: call(x, out_type=x), shape=(1024,), dtype="float32")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compiling, "_directory", None)
    return tmp_path


def test_nothing_is_made_twice(elsewhere: Path) -> None:
    made: list[Any] = []

    def make() -> int:
        made.append(None)
        return len(made)

    assert [compiling.once(make, "key") for _ in range(2)] == [1, 2]  # no place is known
    compiling.keep_in(elsewhere)
    assert [compiling.once(make, "key"), compiling.once(make, "other"), compiling.once(make, "key")] == [3, 4, 3]
    with contextlib.suppress(ValueError):
        compiling.once(lambda: int("what fails is not kept"), "failed")
    assert compiling.once(make, "failed") == 5


def test_what_other_sources_gave_is_removed(elsewhere: Path) -> None:
    for name, days in (("new", 0), ("old", 2)):
        (elsewhere / name).mkdir()
        (elsewhere / name / "file").touch()
        os.utime(elsewhere / name, (time.time() - days * 24 * 3600,) * 2)
    compiling.keep_in(elsewhere)
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(["new", compiling._digest()])
