"""The checks of operations with several processes, one GPU each or several: those of test_gpu.py, by the same names."""

from collections.abc import Iterator

import pytest

from tests.helpers import workers
from tests.helpers.rehearsal import needs_real_gpus

CHECKS = workers.checks()
# On a CPU, where operations are their references.
ON_A_CPU = {
    (2, 1): ("is one mesh", "check_gather_is_exact", "check_dimensions-collectives"),
    (2, 2): ("is one mesh", "explicit-matmul_all_reduce"),
}


def arrangement(world: int, each: int) -> object:
    return pytest.param((world, each), marks=pytest.mark.gpu(world * each), id=f"{world}x{each}")


@pytest.fixture(scope="module", params=[arrangement(2, 1), arrangement(4, 1), arrangement(2, 2)])
def on_gpus(request: pytest.FixtureRequest) -> Iterator[workers.Workers]:
    needs_real_gpus()
    with workers.Workers(*request.param, "cuda") as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [pytest.param(name, marks=pytest.mark.gpu(2, "9.0") if "hopper" in name else ()) for name in CHECKS]
)
def test_on_gpus(on_gpus: workers.Workers, check: str) -> None:
    on_gpus.run(check, timeout=600)


# Few launches: processes that import JAX take seconds of a core each.
@pytest.mark.slow
def test_on_a_cpu() -> None:
    for (world, each), checks in ON_A_CPU.items():
        with workers.Workers(world, each, "cpu") as started:
            for check in checks:
                assert len(started.run(check, timeout=240)) == world
            if each == 1:
                hangs = r"^hangs in one\nprocess 1: no answer in 2 s\n(.*\n)*planted hang"
                with pytest.raises(AssertionError, match=hangs):
                    started.run("hangs in one", timeout=2)
                started.run("is one mesh")  # in new processes
                with pytest.raises(AssertionError) as raised:
                    started.run("fails in one")
                assert str(raised.value) == "fails in one\nprocess 1: AssertionError: planted in all but the first"
            else:
                ends = r"^ends in one\n(.*\n)*process 1: ended with status -6\n(.*\n)*planted"
                with pytest.raises(AssertionError, match=ends):
                    started.run("ends in one")
