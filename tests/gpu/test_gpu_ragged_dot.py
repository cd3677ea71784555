"""`ragged_dot` and `moe` of operands of 8 bits on a GPU: the kernel for Hopper, which one GPU has."""

import pytest

from tests.conftest import MeshFactory
from tests.helpers import moe_parity
from tests.helpers.ragged_dot_parity import check_blocks, check_eight_bits, check_promotion

pytestmark = pytest.mark.gpu(1, "9.0")


def test_parity_of_8_bits(gpu_mesh: MeshFactory) -> None:
    check_eight_bits(gpu_mesh(1, "tp"))


def test_parity_of_scales_of_blocks(gpu_mesh: MeshFactory) -> None:
    check_blocks(gpu_mesh(1, "tp"))


def test_parity_of_moe_of_8_bits(gpu_mesh: MeshFactory) -> None:
    moe_parity.check_eight_bits(gpu_mesh(1, "tp"))


def test_sums_leave_the_tensor_cores(gpu_mesh: MeshFactory) -> None:
    check_promotion(gpu_mesh(1, "tp"))
