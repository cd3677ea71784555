"""Training with data and tensor parallelism: fused kernels beside XLA's own collectives, for many steps."""

import pytest

from tests.helpers.training import Arrangement, Training, arrangements, kernels_beside_collectives


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


# The kernels' place is taken by their references.
@pytest.mark.slow
def test_on_a_cpu() -> None:
    (given,) = arrangements(0)
    with Training(given, steps=20, seconds=60) as training:
        result = training.run()
        assert not result.error, "\n".join((result.error, *(each[-3000:] for each in training.wrote())))
    assert result.steps == 20 and 0 <= result.difference < 1e-4 and result.beside == 0


@pytest.mark.slow
def test_a_step_that_hangs_is_named() -> None:
    given = Arrangement(1, (1, 2), 2, "tiny", 2, 8, "float32", "cpu")
    with Training(given, steps=100, seconds=60, hang_at=14) as training:
        result = training.run(patience=3)
    assert result.error == "hangs: process 0 has done fused step 11"  # two more are under way
    with Training(Arrangement(1, (1, 2), 2, "unknown", platform="cpu"), steps=1, seconds=1) as training:
        assert training.run().error == "process 0 failed: process 0 has not begun"
        assert "KeyError: 'unknown'" in training.wrote()[0]


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
