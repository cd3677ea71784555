"""Iris's own device functions and kernels in the simulator: right, or a finding that names the line at fault."""

import pathlib

import numpy as np
import pytest

from jaxtaxfree import simulator
from tests.helpers import iris_cases, iris_examples, iris_kernels, iris_words


def assert_as_expected(case: iris_words.Case, policy: str = "random") -> None:
    """Of a call that is right, one interleaving; of another one as many as show it."""
    for seed in range(8 if case.error else 1):
        settings = {"world": iris_words.WORLD_SIZE, "results": case.result, "seed": seed, "policy": policy}
        try:
            outs, _ = simulator.run_iris(case.launch, **settings)
        except simulator.SimulationError as error:
            assert case.error is not None, error
            assert type(error) is case.error and case.says in str(error), (case.function, case.name, error)
            return
        if not case.error:
            for rank, out in enumerate(outs):
                expected = np.asarray(case.expected(rank), np.float64)
                np.testing.assert_array_equal(out.astype(np.float64), expected, f"{case.function} {case.name}")
    assert not case.error, f"{case.function} {case.name} is right in every interleaving"


@pytest.mark.parametrize("function", iris_words.FUNCTIONS)
def test_device_functions(function: str) -> None:
    """Some of the parameters of Iris's unit tests; of the scopes all."""
    cases = [case for case in iris_words.cases() if case.function == function]
    chosen = cases[1::7] if function in ("atomic_cas", "atomic_xchg") else cases[5::13]
    for case in chosen:
        assert_as_expected(case)
    if function.startswith("atomic"):
        assert len({case.error for case in chosen}) == 2, "no scope that reaches other ranks, or none that does not"


@pytest.mark.soak
@pytest.mark.parametrize("function", iris_words.FUNCTIONS)
def test_device_functions_as_iris_tests_them(function: str) -> None:
    cases = [case for case in iris_words.cases() if case.function == function]
    for case in cases:
        assert_as_expected(case)
    assert len(cases) == {"atomic_add": 180, "atomic_cas": 27, "atomic_xchg": 27}.get(
        function, 72 if function.startswith("atomic") else 16
    )


@pytest.mark.parametrize("name", iris_cases.CCL)
def test_ccl(name: str) -> None:
    iris_cases.ccl(name).run(1, ("random", "straggler"))


@pytest.mark.soak
@pytest.mark.parametrize("name", iris_cases.CCL)
def test_ccl_in_many_interleavings(name: str) -> None:
    iris_cases.ccl(name).run(10)


@pytest.mark.parametrize("name", iris_cases.OPS)
def test_ops(name: str) -> None:
    iris_cases.ops(name).run(1, ("random",))


@pytest.mark.soak
@pytest.mark.parametrize("name", iris_cases.OPS)
def test_ops_in_many_interleavings(name: str) -> None:
    iris_cases.ops(name).run(10)


def test_older_compilers_put_no_barrier_in_front_of_a_release() -> None:
    """The lock of this kernel is released without `tl.debug_barrier` behind the stores: right from Triton 3.9 on."""
    with pytest.raises(simulator.DataRaceError) as found:
        iris_cases.ccl("all_reduce spinlock").run(1, triton="3.8")
    assert "in persistent_all_reduce_spinlock" in str(found.value)
    assert "as Triton before 3.9 compiles it" in str(found.value)


@pytest.mark.parametrize("name", iris_examples.EXAMPLES)
def test_examples(name: str) -> None:
    iris_examples.EXAMPLES[name]().run(1, patience=20_000)


@pytest.mark.soak
@pytest.mark.parametrize("name", iris_examples.EXAMPLES)
def test_examples_in_many_interleavings(name: str) -> None:
    iris_examples.EXAMPLES[name]().run(10, patience=20_000)


@pytest.mark.parametrize("name", iris_examples.BARE_RELEASES)
def test_examples_that_older_compilers_break(name: str) -> None:
    with pytest.raises(simulator.DataRaceError, match="before 3"):
        iris_examples.EXAMPLES[name]().run(2, triton="3.8")


ALL_REDUCE, HBM_BUFFER = "iris.ccl.triton.all_reduce", "iris.ops.all_gather_matmul_hbm_buffer"
FAULTS = {
    "ring: relaxed news": (
        ALL_REDUCE,
        "all_reduce ring",
        '                        sem="release",\n',
        '                        sem="relaxed",\n',
    ),
    "ring: narrow wait": (
        ALL_REDUCE,
        "all_reduce ring",
        'tl.atomic_cas(local_flag_ptr, 0, 0, sem="acquire", scope="sys")',
        'tl.atomic_cas(local_flag_ptr, 0, 0, sem="acquire", scope="gpu")',
    ),
    "ring: relaxed reset": (
        ALL_REDUCE,
        "all_reduce ring",
        'tl.atomic_xchg(local_flag_ptr, 0, sem="release", scope="sys")',
        'tl.atomic_xchg(local_flag_ptr, 0, sem="relaxed", scope="sys")',
    ),
    "ring: no wait for the reset": (
        ALL_REDUCE,
        "all_reduce ring",
        "                        != 0\n                    ):\n",
        "                        == 7\n                    ):\n",
    ),
    "spinlock: relaxed lock": (
        ALL_REDUCE,
        "all_reduce spinlock",
        'iris.atomic_cas(locks_ptr + tile_id, 0, 1, iris_rank, dest_rank, heap_bases, sem="acquire", scope="sys")',
        'iris.atomic_cas(locks_ptr + tile_id, 0, 1, iris_rank, dest_rank, heap_bases, sem="relaxed", scope="sys")',
    ),
    "one_shot: news for the GPU": (
        "iris.ops.matmul_all_reduce",
        "matmul_all_reduce one_shot",
        'tl.atomic_xchg(lock_ptr, 1, sem="release", scope="sys")',
        'tl.atomic_xchg(lock_ptr, 1, sem="release", scope="gpu")',
    ),
    "hbm_buffer: news for the block": (
        HBM_BUFFER,
        "all_gather_matmul_hbm_buffer",
        'tl.atomic_xchg(flags_ptr + flag_idx, 1, sem="release", scope="gpu")',
        'tl.atomic_xchg(flags_ptr + flag_idx, 1, sem="release", scope="cta")',
    ),
    "hbm_buffer: relaxed wait": (
        HBM_BUFFER,
        "all_gather_matmul_hbm_buffer",
        'tl.atomic_add(flags_ptr + flag_idx, 0, sem="acquire", scope="gpu")',
        'tl.atomic_add(flags_ptr + flag_idx, 0, sem="relaxed", scope="gpu")',
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_planted_into_iris(fault: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, call, text, instead = FAULTS[fault]
    faulty, module = iris_kernels.planted(name, text, instead, tmp_path), iris_kernels.module
    monkeypatch.setattr(iris_kernels, "module", lambda asked="iris": faulty if asked == name else module(asked))
    make = iris_cases.ccl if call in iris_cases.CCL else iris_cases.ops
    with pytest.raises(simulator.DataRaceError, match=rf"{name.split('.')[-1]}\.py:\d+ in "):
        make(call).run(3)
