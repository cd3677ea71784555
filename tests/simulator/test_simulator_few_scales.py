"""Operands of 8 bits in the kernels for few rows: faults that are no race, and what the assembly makes of a byte."""

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import triton.language as tl

from jaxtaxfree.kernels.blocks import hopper_few, matmul, widen
from tests.helpers.simulator_kernels import KERNELS, TRANSPOSED, load
from tests.simulator.test_simulator_mutants import edit

KERNEL = {kernel.name: kernel for kernel in KERNELS}
BFLOAT16 = np.dtype(jnp.bfloat16)
# Two programs share K; N has more than one block; 24 rows come in two parts.
SHARED = (3, 32, 272, 0, True, None, 3, 2, TRANSPOSED)
WIDE = (2, 144, 144, 1, True, 1, 3, 1, TRANSPOSED)
PARTS = (21, 32, 208, 1, True, 1, 2, 1, 24, TRANSPOSED)
BOTH = "float8_e4m3fn x float8_e4m3fn"
FEW = (3, 144, 144, 1, True, False, 4)
# A module of a product, the kernel, a shape, and the edit.
FAULTS: dict[str, tuple[Any, str, tuple, str, str]] = {
    name: (hopper_few, "matmul_reduce_hopper_few", shape, old, new)
    for name, shape, old, new in (
        ("step of another program", (*SHARED, "int8 block"), "(blocks.first + step) * BLOCK_K", "step * BLOCK_K"),
        ("step", (*SHARED, "int8 block"), "gl.minimum(step + 1, steps - 1)", "step"),
        ("block of columns", (*WIDE, "int8 block"), "SCALED) + n // SCALED", "SCALED) + n * 0"),
        ("row of a block", (*PARTS, f"{BOTH} block"), "blocks.place.row + before + gl", "blocks.place.row + gl"),
        ("step of rows", (*SHARED, f"{BOTH} block"), "blocks.rows + block * blocks.count + m", "blocks.rows + m"),
        ("row", (*PARTS, f"{BOTH} row"), "m = place.row + before + gl", "m = place.row + gl"),
        ("column", (*SHARED, "int8 row"), "n = place.column + gl.arange(0, ring", "n = gl.arange(0, ring"),
        ("part", (*PARTS, f"{BOTH} block"), "following, ring, rest, ring.lhs.shape[1])", "following, ring, rest, 0)"),
    )
} | {
    f"portable {name}": (matmul, "matmul_all_reduce_few", (*FEW, TRANSPOSED, kind), old, new)
    for name, kind, old, new in (
        ("step", "int8 block", "at = start // SCALED * tl.cdiv(N, SCALED) + n", "at = n"),
        ("block of columns", "int8 block", "SCALED) + n // SCALED", "SCALED) + n * 0"),
        ("column", "int8 row", "tl.load(of_columns + n, mask", "tl.load(of_columns + n - column, mask"),
    )
}  # fmt: skip


# Of faults that are alike, `make test` plants one.
LIKE_OTHERS = ("step", "row of a block", "row", "step of rows", "portable step", "portable column")


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.soak] if name in LIKE_OTHERS else []) for name in FAULTS]
)
def test_the_scale_of_something_else_gives_a_wrong_result(fault: str, tmp_path: Path) -> None:
    """It is no race: whoever compares sees it."""
    product, name, shape, old, new = FAULTS[fault]
    kernel = KERNEL[name]
    wrong = load(edit(product, ((old, new),), tmp_path), product.__name__)
    module = load(
        Path(kernel.module.__file__ or ""), kernel.module.__name__, **{product.__name__.split(".")[-1]: wrong}
    )
    call = kernel.call(2, BFLOAT16, shape)
    with pytest.raises(AssertionError, match="result of rank"):
        call.run(getattr(module, kernel.function), seed=1)


def run_assembly(text: str, words: np.ndarray, operand: str = "$2") -> dict[str, np.ndarray]:
    """What the assembly of `widen` leaves in its registers, of words that it finds as its operand."""
    registers: dict[str, np.ndarray] = {operand: words.astype(np.uint32)}

    def value(name: str) -> np.ndarray:
        number = int(name.replace("0f", "0x", 1), 0) if name not in registers else 0
        return registers[name] if name in registers else np.full(words.shape, number, np.uint32)

    def halves(x: np.ndarray, dtype: Any) -> np.ndarray:
        return x.astype(np.uint32).view(dtype).reshape(-1, 2).astype(np.float32)

    for name, arguments in re.findall(r"([a-z][\w.]*) ([^;]*);", re.sub(r"//.*|\.reg[^;]*;", "", text)):
        first, *others = (each.strip() for each in re.findall(r"\{[^}]*\}|[^,]+", arguments))
        if name == "prmt.b32":
            a, b, selector = map(value, others)
            four = np.concatenate([x[:, None].view(np.uint8) for x in (a, b)], axis=1)
            picked = [np.take_along_axis(four, (selector[:, None] >> 4 * i & 15).astype(int), 1) for i in range(4)]
            found = np.ascontiguousarray(np.concatenate(picked, axis=1)).view(np.uint32)[:, 0]
        elif name in ("and.b32", "xor.b32"):
            found = getattr(np, {"and": "bitwise_and", "xor": "bitwise_xor"}[name[:3]])(*map(value, others))
        elif name == "sub.f32":
            found = value(others[0]).view(np.float32) - value(others[1]).view(np.float32)
        elif name.startswith("sub."):
            dtype = jnp.bfloat16 if "bf16" in name else np.float16
            left, right = (halves(value(each), dtype) for each in others)
            found = (left - right).astype(dtype).view(np.uint32)[:, 0]
        elif name == "cvt.rn.f16x2.e4m3x2":
            found = value(others[0]).astype(np.uint16).view(jnp.float8_e4m3fn).reshape(-1, 2)
            found = found.astype(np.float16).view(np.uint32)[:, 0]
        elif name == "cvt.f32.f16":
            found = value(others[0]).astype(np.uint16).view(np.float16).astype(np.float32)
        elif name == "cvt.rn.bf16x2.f32":
            pair = np.stack([registers[others[1]], registers[others[0]]], axis=1)  # the second one comes to lie low
            with np.errstate(invalid="ignore"):  # NaN
                found = pair.astype(jnp.bfloat16).view(np.uint32)[:, 0]
        elif name == "mov.b32" and first.startswith("{"):
            low, high = first.strip("{}").split(",")
            registers[low.strip()], registers[high.strip()] = value(others[0]) & 0xFFFF, value(others[0]) >> 16
            continue
        else:
            assert name in ("mov.b32", "cvt.u32.u16"), name
            found = value(others[0])
        registers[first] = found
    return registers


@pytest.mark.parametrize("dest", (tl.bfloat16, tl.float16), ids=str)
@pytest.mark.parametrize(
    ("source", "dtype"), ((tl.int8, "int8"), (tl.float8e4nv, "float8_e4m3fn"), (tl.float8e5, "float8_e5m2")), ids=str
)
def test_what_assembly_makes_of_two_bytes(source: Any, dtype: str, dest: Any) -> None:
    """Of all bytes, which the simulator takes to be what the assembly says of itself."""
    words = np.arange(2**16, dtype=np.uint16)
    wide = jnp.bfloat16 if dest == tl.bfloat16 else np.float16
    text = widen.assembly(source, dest)
    found = run_assembly(getattr(text, "value", text), words)
    for i, number in enumerate(words.view(jnp.dtype(dtype)).reshape(-1, 2).T):
        result = found[f"${i}"].astype(np.uint16).view(wide)
        np.testing.assert_array_equal(result.astype(np.float32), number.astype(np.float32))


@pytest.mark.parametrize(("source", "dtype"), ((tl.int8, "int8"), (tl.float8e4nv, "float8_e4m3fn")), ids=str)
def test_what_assembly_makes_of_four_bytes(source: Any, dtype: str) -> None:
    """f32: of two words first their low bytes, then their high ones."""
    words = np.arange(2**16, dtype=np.uint32) * 65537
    words ^= words >> 3 << 16  # no two halves alike
    text = widen.assembly_of_f32(source)
    found = run_assembly(getattr(text, "value", text), words, "$4")
    numbers = words.view(jnp.dtype(dtype)).reshape(-1, 4).T
    for i, byte in enumerate((0, 2, 1, 3)):
        np.testing.assert_array_equal(found[f"${i}"].view(np.float32), numbers[byte].astype(np.float32))
