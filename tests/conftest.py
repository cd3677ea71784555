"""Devices for the tests: eight virtual CPU devices always, the GPUs beside them where there are any."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import math
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence

import hypothesis
import jax
import numpy as np
import pytest

from tests.helpers import compiling, rehearsal
from tests.helpers.covering import covering, spread

CPU_DEVICES = 8

type MeshFactory = Callable[[int | Sequence[int], str | Sequence[str]], jax.sharding.Mesh]

jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
# JAX_PLATFORMS=cuda would leave the CPU tests without devices.
if (platforms := jax.config.jax_platforms) and "cpu" not in platforms.split(","):
    jax.config.update("jax_platforms", f"{platforms},cpu")

hypothesis.settings.register_profile("jaxtaxfree", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("jaxtaxfree")


# What `--rehearse` takes CPU devices for.
REHEARSED = "NVIDIA H100 80GB HBM3", "9.0"
_REHEARSAL = pytest.StashKey[rehearsal.Rehearsal]()


@functools.cache
def cuda_devices() -> tuple[jax.Device, ...]:
    try:
        return tuple(jax.devices("cuda"))
    except RuntimeError:  # JAX's answer where the platform is not there
        return ()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rehearse", choices=("run", "compile"),
        help="run tests of GPUs without GPUs, or compile their kernels: see tests/helpers/rehearsal.py",
    )  # fmt: skip
    parser.addoption("--cases", type=int, help="run at most so many cases of each test")


def pytest_configure(config: pytest.Config) -> None:
    # Before anything starts a JAX backend. The heap takes memory beside JAX's, some tests start processes of their own,
    # which want theirs as well, and with pytest-xdist there are some of these side by side.
    processes = getattr(config.option, "numprocesses", None) or 1
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{min(0.3, 0.5 / processes):.2f}")

    if config.option.rehearse:
        context = rehearsal.rehearsing(REHEARSED[0], run=config.option.rehearse == "run")
        config.stash[_REHEARSAL] = context.__enter__()
        config.add_cleanup(lambda: context.__exit__(None, None, None))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if seen := config.stash.get(_REHEARSAL, None):
        terminalreporter.section("rehearsal")
        terminalreporter.line(f"{seen.programs} programs have kernels, of {seen.launches} launches")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    _mark_soak(items)
    yield  # `-m` looks at the marks
    if config.option.cases:
        _keep_cases(config, items)


def _mark_soak(items: Sequence[pytest.Item]) -> None:
    tests = collections.defaultdict(list)
    for item in items:
        soak_or_gpu = (
            item.get_closest_marker("soak") or item.get_closest_marker("gpu") or "gpu_mesh" in item.fixturenames
        )
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not soak_or_gpu:
            tests[item.parent, item.originalname].append(item)
    for cases in tests.values():
        # Values that stand in one list belong together; those of fixtures stand in none.
        of = [re.findall(r"\w+", str(mark.args[0])) for mark in cases[0].iter_markers("parametrize")]
        of += [[name] for name in cases[0].callspec.params.keys() - set(itertools.chain(*of))]
        values = [[tuple(case.callspec.params[name] for name in names) for names in of] for case in cases]
        marker = cases[0].get_closest_marker("covers")
        for i in set(range(len(cases))) - covering(values, *marker.args if marker else (2,)):
            cases[i].add_marker(pytest.mark.soak)


def _keep_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = collections.defaultdict(list)
    for item in items:
        tests[item.parent, getattr(item, "originalname", item.name)].append(item)
    kept = set()
    for cases in tests.values():
        kept |= {cases[i] for i in spread(len(cases), config.option.cases)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    # Thousands of collected tests and the imported libraries stay. Otherwise Python would look for cycles among them
    # again and again, which took a tenth of the time.
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else nanobind, which has objects of Triton, says at the end that they leaked


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Skipped from this one place, tests fold into one counted line per reason in pytest's summary.
    for marker in item.iter_markers("gpu"):  # of the test, and of its parameters
        _need_gpus(*marker.args)


def _need_gpus(needed: int = 1, kind: str = "") -> None:
    # What is rehearsed has CPU devices among them.
    kinds = [getattr(device, "compute_capability", REHEARSED[1]) for device in cuda_devices()]
    found = [each for each in kinds if kind in ("", each)]
    if len(found) < needed:
        of_kind = f" of compute capability {kind}" if kind else ""
        pytest.skip(f"needs {needed} GPU{'s' if needed != 1 else ''}{of_kind}, found {len(found)}")


def _mesh(devices: Sequence[jax.Device], shape: int | Sequence[int], names: str | Sequence[str]) -> jax.sharding.Mesh:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    names = (names,) if isinstance(names, str) else tuple(names)
    return jax.sharding.Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), names)


@pytest.fixture(scope="session", autouse=True)
def _programs_that_compile_quickly(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """XLA takes most of its time to optimise programs for the CPU, which tests run once, and compiles the same ones for
    several tests. Programs for GPUs stay as they are."""
    if cuda_devices() and not pytestconfig.option.rehearse:
        yield
        return
    # For this process alone: JAX may read a program that another process has not written to its end, and warn.
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # also in processes that tests start
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session", autouse=True)
def _compiled(pytestconfig: pytest.Config) -> Iterator[None]:
    if cache := getattr(pytestconfig, "cache", None):  # not with -p no:cacheprovider
        compiling.keep_in(cache.mkdir("compiled"))
    with compiling.parsed_once():
        yield


@pytest.fixture
def no_code() -> Iterator[None]:
    """Kernels are read, and not compiled: for tests that ask for no more than their names."""
    with compiling.no_code(memory=False):
        yield


@pytest.fixture(scope="module")
def no_cubin() -> Iterator[None]:
    """Kernels are not assembled: see `compiling.no_cubin`."""
    with compiling.no_cubin():
        yield


@pytest.fixture
def cpu_mesh() -> MeshFactory:
    """`cpu_mesh(shape, names)` makes a mesh of virtual CPU devices, at most eight."""
    return lambda shape, names: _mesh(jax.devices("cpu"), shape, names)


@pytest.fixture
def gpu_mesh() -> MeshFactory:
    """`gpu_mesh(shape, names)` makes a mesh of GPUs, and skips the test where there are too few."""

    def make(shape: int | Sequence[int], names: str | Sequence[str]) -> jax.sharding.Mesh:
        _need_gpus(math.prod((shape,) if isinstance(shape, int) else shape))
        return _mesh(cuda_devices(), shape, names)

    return make
