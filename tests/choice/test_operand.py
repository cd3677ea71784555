"""What follows from the dtype and the layout of an operand, also of those that no kernel takes yet."""

import math
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtaxfree import simulator
from jaxtaxfree.ops import all_gather_matmul as gather_ops
from jaxtaxfree.ops import matmul_all_reduce as reduce_ops
from jaxtaxfree.ops import matmul_reduce_scatter as scatter_ops
from jaxtaxfree.ops.operand import Operand
from jaxtaxfree.ops.variant import named
from jaxtaxfree.settings import Settings
from tests.helpers.simulator_kernels import TILES, integers, launched
from tests.helpers.support import by_shape, chosen, product_call

MODULES = (gather_ops, scatter_ops, reduce_ops)


@pytest.mark.parametrize(
    ("dtype", "bits", "wire"),
    (
        ("float32", 32, "float32"),
        ("bfloat16", 16, "bfloat16"),
        ("float16", 16, "float16"),
        ("float8_e4m3fn", 8, "bfloat16"),
        ("float8_e5m2", 8, "bfloat16"),
        ("int8", 8, "bfloat16"),
        ("int4", 4, "bfloat16"),
    ),
)
def test_bits_and_wire(dtype: str, bits: int, wire: str) -> None:
    operand = Operand(dtype=jnp.dtype(dtype))
    assert (operand.bits, operand.wire) == (bits, np.dtype(wire))
    assert operand.nbytes(1000) == 125 * bits and operand.nbytes(3) == math.ceil(3 * bits / 8)
    assert operand.elements(128) == 1024 // bits


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("dtype", ("float32", "float8_e4m3fn", "int8"))
def test_every_kernel_has_a_configuration_for_8_bits_and_32(module: ModuleType, dtype: str) -> None:
    """Which `choose` asks of all kernels, before it asks what they refuse."""
    for world, rows in ((1, 1), (2, 64), (4, 300), (8, 4096)):
        call = product_call(module, rows * world, 4096, 8192, world=world, dtype=dtype, out_dtype="bfloat16")
        for variant in module.VARIANTS:
            config = by_shape(module, variant.name, call)
            assert isinstance(config, Settings)
            assert call.bytes_of_a_step(config.block_m, config.block_n, config.block_k) > 0
            if variant.name in ("hopper", "hopper_few"):
                assert any("it takes float16 and bfloat16, not " in why for why in variant.refuses(call, config))


@pytest.mark.parametrize("module", (scatter_ops, reduce_ops), ids=lambda module: module.__name__.rpartition(".")[2])
def test_which_kernel_sums_products_by_weights_transposed(module: ModuleType) -> None:
    """On Hopper, of 16 bits and of 8, that for many rows from as many on as no kernel for few takes."""
    form = {"world": 4, "rhs_transposed": True}
    found = {rows: chosen(module, product_call(module, rows, 4096, 8192, **form)) for rows in (16, 256, 260, 4096)}
    assert {rows: each.variant.name for rows, each in found.items()} == {
        16: "hopper_few", 256: "hopper_few", 260: "hopper_few", 4096: "hopper",
    }  # fmt: skip
    form |= {"dtype": "int8", "out_dtype": "bfloat16", "lhs_scales": "row", "rhs_scales": "block"}
    for rows, name in ((16, "hopper_few"), (4096, "hopper")):
        found = chosen(module, product_call(module, rows, 4096, 8192, **form))
        assert found.variant.name == name
        assert found.config.block_k == 128 and found.config.block_n <= 128
        assert name == "hopper_few" or found.config.pace > 0


def test_blocks_have_as_many_bytes_whatever_the_dtype() -> None:
    for module in MODULES:
        for kernel, nbytes in (("portable", 128), ("few", 256)):
            for dtype in ("float32", "bfloat16", "int8"):
                config = by_shape(module, kernel, product_call(module, 16, 4096, 8192, world=4, dtype=dtype))
                assert config.block_k == nbytes // np.dtype(jnp.dtype(dtype)).itemsize


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
@pytest.mark.parametrize("kernel", ("portable", "few"))
def test_kernels_send_partial_sums_of_8_bits_in_16(module: ModuleType, kernel: str) -> None:
    """Products of small whole numbers of 8 bits are exact in the simulator, though no operation passes them on yet."""
    world, m, k, n = 2, 16, 32, 16
    dtype, rows = np.dtype(jnp.float8_e4m3fn), world * m
    variant = named("", module.VARIANTS, kernel)
    exact = {} if module is gather_ops else {"exact_wire": False}
    keywords = launched(module, rows, k, n, world, dtype, variant.Config(**TILES, **exact), out_dtype="float32")
    lhs = [integers(rank, (m if module is gather_ops else rows, k), dtype) for rank in range(world)]
    rhs = [integers(10 + rank, (k, n), dtype) for rank in range(world)]
    scales = ({},) if variant.scales else ()
    outs, _ = simulator.run(variant.kernel, lhs, {"rhs": rhs} if module is gather_ops else rhs, {}, *scales, **keywords)
    if module is gather_ops:
        wanted = [np.concatenate(lhs).astype(np.float32) @ w.astype(np.float32) for w in rhs]
    else:
        total = sum(a.astype(np.float32) @ b.astype(np.float32) for a, b in zip(lhs, rhs))
        wanted = np.split(total, world) if module is scatter_ops else [total] * world
    np.testing.assert_array_equal(outs, wanted)


def test_the_narrower_operand_decides_how_rows_are_aligned() -> None:
    """Of 8 bits TMA takes rows of 16 elements."""
    refused = [
        any("TMA" in why for why in gather_ops.VARIANTS[0].refuses(call, None))
        for k in (4096, 4104)
        for dtype in ("bfloat16", "int8")
        for call in [product_call(gather_ops, 4096, k, 8192, world=4, dtype=dtype)]
    ]
    assert refused == [False, False, False, True]
