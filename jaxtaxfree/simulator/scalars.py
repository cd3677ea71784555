"""Scalar integers, booleans and pointers as Python numbers.

Nearly all values of a kernel are scalars: indices, addresses and conditions. An operator of Triton on a NumPy array of
one element takes 20 to 40 us, most of which goes into questions about types and shapes. Of scalars of five types among
themselves and of Python's numbers the answers are known; everything else takes the way of blocks, and then Triton's.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

# By identity: comparing Triton's types takes as long as adding numbers.
I1, I32, I64 = tl.int1, tl.int32, tl.int64
_MIN32, _MAX32 = -(2**31), 2**31 - 1
_MIN64, _MAX64 = -(2**63), 2**63 - 1
_ADDRESSES = 2**64
_BITS = {id(I32): 32, id(I64): 64}


class Scalar(tl.tensor):
    """A tensor without dimensions, of type i1, i32, i64 or a pointer.

    Attributes:
      value: the number; of a pointer the address.
      handle: what Triton's interpreter computes with, made when somebody asks for it.
    """

    shape: Any = tl.tuple([])
    numel: Any = tl.constexpr(1)

    def __init__(self, value: Any, dtype: Any):
        self.value, self.dtype, self.type = value, dtype, dtype

    def __getattr__(self, name: str) -> Any:
        # Called for what is not there: one of the two that each follow from the other.
        if name == "handle":
            handle = self.handle = object.__new__(TensorHandle)
            dtype = self.dtype
            numpy = np.int32 if dtype is I32 else np.int64 if dtype is I64 else np.bool_ if dtype is I1 else np.uint64
            handle.data, handle.dtype, handle.attr = np.array([self.value], numpy), dtype, {}
            return handle
        if name == "value":
            value = self.value = self.handle.data.item()
            return value
        raise AttributeError(name)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def to(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        mine = self.dtype
        if args or kwargs:
            return tl.tensor.to(self, dtype, *args, **kwargs)
        if mine is dtype:
            return self
        value = self.value
        if dtype is I64:
            if mine is I32 or mine is I1:
                return Scalar(int(value), I64)
            if type(mine) is tl.pointer_type:
                return Scalar(value - _ADDRESSES if value > _MAX64 else value, I64)
        elif dtype is I32:
            if mine is I64 or mine is I1:
                return Scalar(_wrap(int(value), 32), I32)
        elif type(dtype) is tl.pointer_type and (mine is I64 or type(mine) is tl.pointer_type):
            return Scalar(value % _ADDRESSES, dtype)
        elif dtype is I1 and (mine is I32 or mine is I64):
            return Scalar(value != 0, I1)
        return tl.tensor.to(self, dtype)

    def __neg__(self) -> Any:
        bits = _BITS.get(id(self.dtype))
        return Scalar(_wrap(-self.value, bits), self.dtype) if bits else tl.tensor.__neg__(self)

    def __invert__(self) -> Any:
        if self.dtype is I1:
            return Scalar(not self.value, I1)
        return Scalar(~self.value, self.dtype) if id(self.dtype) in _BITS else tl.tensor.__invert__(self)

    def logical_and(self, other: Any) -> Any:
        if self.dtype is I1 and type(other) is Scalar and other.dtype is I1:
            return Scalar(self.value and other.value, I1)
        return tl.tensor.logical_and(self, other)

    def logical_or(self, other: Any) -> Any:
        if self.dtype is I1 and type(other) is Scalar and other.dtype is I1:
            return Scalar(self.value or other.value, I1)
        return tl.tensor.logical_or(self, other)


def _wrap(value: int, bits: int) -> int:
    """As a GPU's integers wrap around."""
    half = 1 << bits - 1
    return (value + half) % (2 * half) - half


def of(tensor: Any) -> Any:
    """The same tensor as a `Scalar`, if it can be one."""
    return make(tensor.handle, tensor.type) if type(tensor) is tl.tensor else tensor


def make(handle: TensorHandle, type_: Any) -> Any:
    """What `tl.tensor(handle, type_)` is."""
    if type_ is I32 or type_ is I64 or type_ is I1 or type(type_) is tl.pointer_type:
        scalar = object.__new__(Scalar)
        scalar.handle, scalar.dtype, scalar.type = handle, type_, type_
        return scalar
    return tl.tensor(handle, type_)


def constant(value: Any, dtype: Any) -> Any:
    """A Python number as a scalar of a type, or None if Triton has to say what becomes of it."""
    if type(value) is int:
        if dtype is I32:
            return Scalar(value, I32) if _MIN32 <= value <= _MAX32 else None
        if dtype is I64:
            return Scalar(value, I64) if _MIN64 <= value <= _MAX64 else None
    if type(value) is bool and dtype is I1:
        return Scalar(value, I1)
    return None


def common(x: Any, y: Any) -> tuple[Any, Any, Any] | None:
    """Two operands, of which at least one is a `Scalar`, as numbers, and the type of what an operator makes of them."""
    if type(x) is not Scalar:
        known = common(y, x)
        return known and (known[1], known[0], known[2])
    mine = x.dtype
    if type(y) is Scalar:
        theirs = y.dtype
        if mine is theirs and type(mine) is not tl.pointer_type:
            return x.value, y.value, mine
        if (mine is I64 and theirs is I32) or (mine is I32 and theirs is I64):
            return x.value, y.value, I64
    elif type(y) is int:
        if (mine is I32 or mine is I64) and _MIN32 <= y <= _MAX32:
            return x.value, y, mine
    elif type(y) is bool:
        if mine is I1:
            return x.value, y, I1
    elif type(y) is tl.constexpr:
        return common(x, y.value)
    return None


def _quotient(x: int, y: int) -> int:
    """C's division, which rounds towards 0."""
    quotient = x // y
    return quotient + 1 if quotient < 0 and quotient * y != x else quotient


def _remainder(x: int, y: int) -> int:
    """C's remainder, which has the sign of x."""
    remainder = x % y
    return remainder - y if remainder and (x < 0) != (y < 0) else remainder


def _computing(name: str, compute: Callable[[int, int], int]) -> Callable:
    """An operator on integers."""
    slow = _slow(name)

    def apply(self: Any, other: Any) -> Any:
        mine, kind = self.dtype, type(other)
        if kind is Scalar:
            theirs, y = other.dtype, other.value
        elif kind is int and _MIN32 <= other <= _MAX32:
            theirs, y = mine, other
        elif kind is tl.constexpr:
            return apply(self, other.value)
        else:
            return slow(self, other)
        if mine is I32 and theirs is I32:
            value = compute(self.value, y)
            return Scalar(value if _MIN32 <= value <= _MAX32 else _wrap(value, 32), I32)
        if (mine is I64 or mine is I32) and (theirs is I64 or theirs is I32):
            value = compute(self.value, y)
            return Scalar(value if _MIN64 <= value <= _MAX64 else _wrap(value, 64), I64)
        return slow(self, other)

    return apply


def _dividing(name: str, compute: Callable[[int, int], int]) -> Callable:
    """An operator that is not defined for some integers, where Triton says what becomes of it."""
    slow, fast = _slow(name), _computing(name, compute)
    shifts = name in ("lshift", "rshift")

    def apply(self: Any, other: Any) -> Any:
        kind = type(other)
        # Triton warns of a constant that shifts too far.
        y = other.value if kind is Scalar or (kind is tl.constexpr and not shifts) else other
        if type(y) is not int or (not 0 <= y < 32 if shifts else y == 0):
            return slow(self, other)
        return fast(self, other)

    return apply


def _comparing(name: str, compare: Callable[[Any, Any], bool]) -> Callable:
    slow = _slow(name)

    def apply(self: Any, other: Any) -> Any:
        mine, kind = self.dtype, type(other)
        if kind is Scalar:
            theirs, y = other.dtype, other.value
        elif kind is int and _MIN32 <= other <= _MAX32:
            theirs, y = mine, other
        elif kind is tl.constexpr:
            return apply(self, other.value)
        else:
            return slow(self, other)
        if (mine is I32 or mine is I64) and (theirs is I32 or theirs is I64):
            return Scalar(compare(self.value, y), I1)
        return slow(self, other)

    return apply


def _deciding(name: str, compute: Callable[[Any, Any], Any]) -> Callable:
    """An operator on the bits of integers, or on booleans."""
    slow = _slow(name)

    def apply(self: Any, other: Any) -> Any:
        known = common(self, other)
        return slow(self, other) if known is None else Scalar(compute(known[0], known[1]), known[2])

    return apply


def _adding(fast: Callable) -> Callable:
    """`__add__`, of pointers too."""
    slow = _slow("add")

    def apply(self: Any, other: Any) -> Any:
        pointer = self.dtype
        if type(pointer) is not tl.pointer_type:
            return fast(self, other)
        if type(other) is Scalar and (other.dtype is I32 or other.dtype is I64):
            offset = other.value
        elif type(other) is int and _MIN64 <= other <= _MAX64:
            offset = other
        else:
            return slow(self, other)
        return Scalar((self.value + stride(pointer) * offset) % _ADDRESSES, pointer)

    return apply


def stride(pointer: Any) -> int:
    """Bytes from one element to the next."""
    return max(1, pointer.element_ty.primitive_bitwidth // 8)


def _slow(name: str) -> Callable:
    """The operator of blocks."""
    name = f"__{name}__"
    return lambda self, other: getattr(tl.tensor, name)(self, other)


def _reflected(name: str, forward: Callable) -> Callable:
    """other o scalar. Python asks for it also where the other one is a block, because a `Scalar` is a tensor too."""
    slow = _slow(f"r{name}")

    def apply(self: Any, other: Any) -> Any:
        if type(other) is int and self.dtype is I32 and _MIN32 <= other <= _MAX32:
            return forward(Scalar(other, I32), self)
        if isinstance(other, tl.tensor):
            return getattr(tl.tensor, f"__{name}__")(other, self)
        # A constant becomes one of this scalar's type, if it does not take part in the choice of the type.
        number = constant(other.value if type(other) is tl.constexpr else other, self.dtype)
        return slow(self, other) if number is None or abs(number.value) > _MAX32 else forward(number, self)

    return apply


_COMPUTING = {"sub": operator.sub, "mul": operator.mul}
_DIVIDING = {"floordiv": _quotient, "mod": _remainder, "lshift": operator.lshift, "rshift": operator.rshift}
_DECIDING = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_COMPARING = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_operators = {
    "add": _adding(_computing("add", operator.add)),
    **{name: _computing(name, compute) for name, compute in _COMPUTING.items()},
    **{name: _dividing(name, compute) for name, compute in _DIVIDING.items()},
    **{name: _deciding(name, compute) for name, compute in _DECIDING.items()},
}
for _name, _operator in _operators.items():
    setattr(Scalar, f"__{_name}__", _operator)
    setattr(Scalar, f"__r{_name}__", _reflected(_name, _operator))
for _name, _compare in _COMPARING.items():
    setattr(Scalar, f"__{_name}__", _comparing(_name, _compare))
