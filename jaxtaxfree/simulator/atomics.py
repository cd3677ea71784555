"""Atomics that Triton's interpreter has no code for, and which of them leave memory as it is."""

import ctypes
from typing import Any

import numpy as np
from triton._C.libtriton import ir
from triton.runtime.interpreter import TensorHandle

_LOOKING = (ir.ATOMIC_OP.ADD, ir.ATOMIC_OP.OR, ir.ATOMIC_OP.XOR)  # operations that leave a word as it is, given 0


def looks(operation: Any, value: TensorHandle, semantics: Any) -> bool:
    """Whether a read-modify-write leaves every word as it is, and does not release: who only looks releases nothing."""
    return operation in _LOOKING and not value.data.any() and semantics != ir.MEM_SEMANTIC.RELEASE


def check_widths(ptr: TensorHandle, compare: TensorHandle, value: TensorHandle) -> None:
    """Raises unless a compare-and-swap has numbers as wide as the word: Triton does not convert them."""
    pointee = ptr.get_element_ty()
    for number in (compare, value):
        if number.data.dtype.itemsize * 8 != pointee.primitive_bitwidth:
            raise TypeError(
                f"tl.atomic_cas of a word {pointee} takes numbers of that type, not {number.dtype}: convert them, as "
                "by tl.cast(1, ptr.dtype.element_ty)."
            )


def fails(ptr: TensorHandle, compare: TensorHandle, value: TensorHandle) -> bool:
    """Whether a compare-and-swap would leave every word as it is."""
    wanted = np.broadcast_to(compare.data, ptr.data.shape).reshape(-1)
    if (compare.data == value.data).all():
        return True
    return all(_word(address, wanted.dtype)[0] != word for address, word in zip(ptr.data.reshape(-1), wanted))


def modify(
    operation: Any, ptr: TensorHandle, value: TensorHandle, mask: TensorHandle, number: np.dtype | None
) -> TensorHandle | None:
    """Exchanges of floats, and sums of floats that Triton keeps as bits.

    Args:
      number: as what NumPy computes with these bits; None if `value` has numbers.

    Returns: what was there before; None for atomics that Triton's interpreter has.
    """
    data = np.broadcast_to(value.data, ptr.data.shape)
    exchanges = operation == ir.ATOMIC_OP.XCHG and data.dtype.kind == "f"
    if not exchanges and (operation != ir.ATOMIC_OP.FADD or number is None):
        return None
    lanes = np.broadcast_to(mask.data, ptr.data.shape)
    old = np.zeros(ptr.data.shape, data.dtype)
    for lane in np.ndindex(ptr.data.shape):  # two lanes may have the same address
        if lanes[lane]:
            word = _word(ptr.data[lane], data.dtype)
            old[lane] = word[0]
            if number is None:
                word[0] = data[lane]
            else:
                terms = np.array([word[0], data[lane]]).view(number).astype(np.float32)
                word[0] = terms.sum().astype(number).view(data.dtype)
    return TensorHandle(old, value.dtype.scalar)


def _word(address: Any, dtype: np.dtype) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * dtype.itemsize).from_address(int(address)), dtype)
