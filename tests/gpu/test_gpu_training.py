"""Training with data and tensor parallelism: fused kernels beside XLA's own collectives, for many steps."""

import dataclasses
import re

import pytest

from tests.helpers.training import (
    MAGNIFIED,
    Arrangement,
    Training,
    arrangements,
    first_beyond,
    kernels_beside_collectives,
)


@pytest.mark.soak
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(given, marks=pytest.mark.gpu(given.gpus), id=given.name)
        for given in dict.fromkeys((*arrangements(2), *arrangements(8)))
    ],
)
def test_losses_are_those_of_xla(given: Arrangement) -> None:
    with Training(given, steps=10_000, seconds=540) as training:
        result = training.run()
        assert not result.error, "\n".join((result.error, *(each[-3000:] for each in training.wrote())))
    assert result.steps >= (1000 if not given.shared else 100)


# On a CPU the kernels' place is taken by their references.
(ON_A_CPU,) = arrangements(0)


@pytest.mark.soak
def test_on_a_cpu() -> None:
    with Training(ON_A_CPU, steps=20, seconds=60) as training:
        result = training.run()
        assert not result.error, "\n".join((result.error, *(each[-3000:] for each in training.wrote())))
    assert result.steps == 20 and 0 <= result.difference < 1e-4 and (result.movings, result.beside) == (1, 0)
    with Training(dataclasses.replace(ON_A_CPU, size="unknown"), steps=1, seconds=1) as training:
        assert training.run().error.endswith("failed: process 0 has not begun; process 1 has not begun")
        assert "KeyError: 'unknown'" in training.wrote()[0]


@pytest.mark.soak
def test_a_step_that_hangs_is_named() -> None:
    """After ten steps of each implementation, whose losses agree."""
    with Training(ON_A_CPU, steps=100, seconds=60, hang_at=14) as training:
        result = training.run(patience=5)
        wrote = training.wrote()
    # The last process has two steps under way; the other one waits for it.
    done = r"hangs: process 0 has done fused step 1[1-3]; process 1 has done fused step 11"
    assert re.fullmatch(done, result.error), "\n".join((result.error, *(each[-3000:] for each in wrote)))


def test_what_rounding_does_not_explain() -> None:
    wanted = [2.0, 1.5, 1.0]
    assert first_beyond([2.1, 1.5, 1.0], wanted, 0.0, 0.125) is None
    assert first_beyond([2.0, 1.5, 1.5], wanted, 0.375 / MAGNIFIED, 0.125) is None
    assert first_beyond([2.0, 1.5, 1.5], wanted, 0.25 / MAGNIFIED, 0.125) == 2
    assert first_beyond([2.5, 1.5, 1.0], wanted, 1.0, 0.125) == 0
    assert first_beyond([2.0, float("nan"), 1.0], wanted, 1.0, 0.125) == 1


def test_kernels_beside_collectives() -> None:
    text = """
      %a = f32[8] custom-call(%x), custom_call_target="triton_kernel_call_ffi"
      %all-reduce-start = f32[8] all-reduce-start(%a), to_apply=%add
      %b = f32[8] custom-call(%a), custom_call_target="triton_kernel_call_ffi"
      %c = f32[8] custom-call(%a), custom_call_target="__cublas$gemm"
      %d = f32[8] custom-call(%b), custom_call_target="triton_kernel_call_ffi"
      %all-reduce-done = f32[8] all-reduce-done(%all-reduce-start)
      %e = f32[8] custom-call(%d), custom_call_target="triton_kernel_call_ffi"
    """
    assert kernels_beside_collectives(text) == 2
