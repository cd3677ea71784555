"""The functions of Triton's language as an interpreted kernel calls them: without the layers that ask who calls.

For those that kernels call most, what comes of the usual arguments is known without Triton, as in `arithmetic`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import TensorHandle

from jaxtaxfree.simulator import scalars
from jaxtaxfree.simulator.arithmetic import F32, is_integer, spread, tensor
from jaxtaxfree.simulator.scalars import I1, I32, I64, Scalar

_shortcuts: dict[Any, Callable[[Callable], Callable]] = {}  # by what Triton defines, given what they call otherwise
# Functions that tensors have as members, by these.
_free = {
    member: getattr(tl.core, name)
    for name, member in vars(tl.tensor).items()
    if name[0] != "_" and tl.core.is_builtin(member) and tl.core.is_builtin(getattr(tl.core, name, None))
}


def function(builtin: Callable) -> Callable:
    """One of the language's functions, or of its tensors' members, as an interpreted kernel calls it."""
    builtin = _innermost(_free.get(builtin, builtin))
    semantic = triton_interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return builtin(*args, **kwargs)

    shortcut = _shortcuts.get(builtin)
    return shortcut(call) if shortcut else call


def _innermost(builtin: Callable) -> Callable:
    while (inner := getattr(builtin, "__wrapped__", None)) is not None:
        builtin = inner
    return builtin


def shortcut(*builtins: Callable) -> Callable:
    """Registers a shortcut: given the function itself, it returns what kernels call.

    Triton's functions call each other with `_semantic`, which is the same for all.
    """

    def register(make: Callable[[Callable], Callable]) -> Callable:
        for builtin in builtins:
            _shortcuts[_innermost(builtin)] = make
        return make

    return register


@shortcut(tl.where)
def _where(slow: Callable) -> Callable:
    def where(condition: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
        kind = type(condition)
        if kind is bool or (kind is Scalar and condition.dtype is I1):
            chosen = _chosen(bool(condition), x, y)
            if chosen is not None:
                return chosen
        if isinstance(condition, tl.tensor) and condition.dtype is I1:
            block = next((each for each in (condition, x, y) if type(each) is tl.tensor and each.type.is_block()), None)
            dtype = x.dtype if isinstance(x, tl.tensor) else y.dtype if isinstance(y, tl.tensor) else None
            first, second = _numbers(x, dtype), _numbers(y, dtype)
            if block is not None and first is not None and second is not None:
                try:
                    data = np.where(condition.handle.data, first, second)
                except ValueError:  # Triton says what is wrong with the shapes
                    return slow(condition, x, y)
                return tensor(data, dtype, block)
        return slow(condition, x, y)

    return where


def _chosen(condition: bool, x: Any, y: Any) -> Any:
    """x or y, or None if Triton has to say what type it gets."""
    if type(x) is Scalar and type(y) is Scalar and x.dtype is y.dtype:
        return x if condition else y
    if type(x) is Scalar or type(y) is Scalar:
        known = scalars.common(x, y)
        return known and Scalar(known[0] if condition else known[1], known[2])
    if type(x) is int and type(y) is int:
        first, second = scalars.constant(x, I32), scalars.constant(y, I32)
        return None if first is None or second is None else first if condition else second
    return None


def _numbers(x: Any, dtype: Any) -> Any:
    """What NumPy computes with for a tensor of this type, or for a constant beside one; None for others."""
    if isinstance(x, tl.tensor):
        return x.handle.data if x.dtype is dtype else None
    if dtype is F32 and (type(x) is float or type(x) is int):
        return np.float32(x)
    number = scalars.constant(x, dtype) if is_integer(dtype) else None
    return None if number is None else number.handle.data


def _extreme(of_numbers: Callable, of_blocks: Callable, slow: Callable) -> Callable:
    """`tl.minimum` or `tl.maximum`."""

    def extreme(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is Scalar or type(y) is Scalar:
            known = scalars.common(x, y)
            if known is not None and known[2] is not I1:
                return Scalar(of_numbers(known[0], known[1]), known[2])
        block = x if type(x) is tl.tensor else y
        if type(block) is tl.tensor and is_integer(block.dtype) and block.type.is_block():
            first, second = _numbers(x, block.dtype), _numbers(y, block.dtype)
            if first is not None and second is not None:
                return tensor(of_blocks(first, second), block.dtype, block)
        return slow(x, y, *args, **kwargs)

    return extreme


shortcut(tl.minimum)(functools.partial(_extreme, min, np.minimum))
shortcut(tl.maximum)(functools.partial(_extreme, max, np.maximum))


# Blocks and their shapes.


def _sizes(shape: Any) -> list[int] | None:
    """A shape as numbers, or None if it is none."""
    if isinstance(shape, tl.constexpr):
        shape = shape.value
    if not isinstance(shape, (list, tuple, tl.tuple)):
        return None
    sizes = [size.value if type(size) is tl.constexpr else size for size in shape]
    return sizes if sizes and all(type(size) is int for size in sizes) else None


@shortcut(tl.arange)
def _arange(slow: Callable) -> Callable:
    known: dict[tuple[int, int], Any] = {}

    def arange(start: Any, end: Any, _semantic: Any = None) -> Any:
        start, end = (at.value if type(at) is tl.constexpr else at for at in (start, end))
        if (block := known.get((start, end))) is None:
            block = known[start, end] = slow(start, end)
        return tensor(block.handle.data, I32, block)

    return arange


@shortcut(tl.full)
def _full(slow: Callable) -> Callable:
    semantic = triton_interpreter.interpreter_semantic

    def full(shape: Any, value: Any, dtype: Any, _semantic: Any = None) -> Any:
        sizes = _sizes(shape)
        dtype = dtype.value if type(dtype) is tl.constexpr else dtype
        if sizes is not None and type(value) in (int, float, Scalar):
            one = value.to(dtype) if type(value) is Scalar else semantic.scalar_constant(value, dtype)
            data = one.handle.data
            return tensor(np.full(sizes, data[0], data.dtype), dtype, None)
        return slow(shape, value, dtype)

    return full


@shortcut(tl.tensor.__getitem__)
def _getitem(slow: Callable) -> Callable:
    everything = slice(None)

    def getitem(self: Any, slices: Any, _semantic: Any = None) -> Any:
        if type(self) is tl.tensor and type(slices) is tuple and self.type.is_block():
            taken = sum(item is not None for item in slices)
            if taken == len(self.type.shape) and all(item is None or item == everything for item in slices):
                return tensor(self.handle.data[slices], self.dtype, None)
        return slow(self, slices)

    return getitem


@shortcut(tl.core.reshape)
def _reshape(slow: Callable) -> Callable:
    def reshape(block: Any, *shape: Any, **kwargs: Any) -> Any:
        sizes = _sizes(shape[0] if len(shape) == 1 and type(shape[0]) is not int else shape)
        if not kwargs and sizes and type(block) is tl.tensor and math.prod(sizes) == block.handle.data.size:
            return tensor(block.handle.data.reshape(sizes), block.dtype, None)
        return slow(block, *shape, **kwargs)

    return reshape


@shortcut(tl.core.permute)
def _permute(slow: Callable) -> Callable:
    def permute(block: Any, *axes: Any, _semantic: Any = None) -> Any:
        order = _sizes(axes[0] if len(axes) == 1 and type(axes[0]) is not int else axes)
        if order and type(block) is tl.tensor and sorted(order) == list(range(len(block.shape))):
            return tensor(block.handle.data.transpose(order), block.dtype, None)
        return slow(block, *axes)

    return permute


@shortcut(tl.broadcast_to)
def _broadcast_to(slow: Callable) -> Callable:
    def broadcast_to(block: Any, *shape: Any, _semantic: Any = None) -> Any:
        sizes = _sizes(shape[0] if len(shape) == 1 and type(shape[0]) is not int else shape)
        if sizes and type(block) is tl.tensor and block.type.is_block():
            data = block.handle.data
            if data.ndim == len(sizes) and all(old in (1, new) for old, new in zip(data.shape, sizes)):
                return tensor(spread(data, tuple(sizes)), block.dtype, None)
        return slow(block, *shape)

    return broadcast_to


@shortcut(tl.dot)
def _dot(slow: Callable) -> Callable:
    semantic = triton_interpreter.interpreter_semantic

    def dot(x: Any, y: Any, acc: Any = None, input_precision: Any = None, **options: Any) -> Any:
        if not options and type(x) is type(y) is type(acc) is tl.tensor and x.dtype is y.dtype and acc.dtype is F32:
            left, right, sums = (block.handle.data.shape for block in (x, y, acc))
            plain = len(left) == 2 and left[1] == right[0] and sums == (left[0], right[1])
            if plain and x.dtype in (F32, tl.bfloat16):
                total = semantic.builder.create_dot(x.handle, y.handle, acc.handle, input_precision, 0)
                return tensor(total.data, F32, acc)
        return slow(x, y, acc, input_precision, **options)

    return dot


def _index(of: str, slow: Callable) -> Callable:
    """`tl.program_id` or `tl.num_programs`."""
    semantic = triton_interpreter.interpreter_semantic

    def index(axis: Any, _semantic: Any = None) -> Any:
        if type(axis) is int and 0 <= axis < 3:
            return Scalar(getattr(semantic.builder, of)[axis], I32)
        return slow(axis)

    return index


shortcut(tl.program_id)(functools.partial(_index, "grid_idx"))
shortcut(tl.num_programs)(functools.partial(_index, "grid_dim"))


# Memory.


def load(slow: Callable) -> Callable:
    """`tl.load` and `gl.load`, but for volatile ones; hints to the cache mean nothing."""
    semantic = triton_interpreter.interpreter_semantic

    def load(pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Any:
        element = _element(pointer)
        # Lanes that are masked out are 0 anyway.
        zero = other is None or ((type(other) is int or type(other) is float) and other == 0 and mask is not None)
        if element is None or not zero or "volatile" in hints:
            return slow(pointer, mask, other, **hints)
        if mask is None or mask is True:
            if type(pointer) is Scalar and (element is I32 or element is I64):
                return Scalar(semantic.builder.read_integer(pointer.handle, element is I64), element)
            return tensor(semantic.builder.create_load(pointer.handle, None, False).data, element, pointer)
        if (lanes := _mask(mask, pointer)) is None:
            return slow(pointer, mask, other, **hints)
        handle = semantic.builder.create_masked_load(pointer.handle, lanes, None, None, False)
        return tensor(handle.data, element, pointer)

    return load


def store(slow: Callable) -> Callable:
    """`tl.store` and `gl.store`."""
    semantic = triton_interpreter.interpreter_semantic

    def store(pointer: Any, value: Any, mask: Any = None, **hints: Any) -> Any:
        element, lanes = _element(pointer), None
        if element is not None and isinstance(value, tl.tensor):
            value = value.to(element)
            shape = pointer.handle.data.shape
            data = value.handle.data
            if data.shape != shape and type(value) is Scalar:
                value = tensor(spread(data, shape), element, pointer)
            if value.handle.data.shape == shape:
                if mask is None or mask is True:
                    return semantic.builder.create_store(pointer.handle, value.handle, None)
                if (lanes := _mask(mask, pointer)) is not None:
                    return semantic.builder.create_masked_store(pointer.handle, value.handle, lanes, None)
        return slow(pointer, value, mask, **hints)

    return store


shortcut(tl.load)(load)
shortcut(tl.store)(store)


def _element(pointer: Any) -> Any:
    """What a pointer, or each of a block, points to; None for a type that is not kept in memory as it is."""
    if not isinstance(pointer, tl.tensor) or type(pointer.dtype) is not tl.pointer_type or pointer.dtype.const:
        return None
    element = pointer.dtype.element_ty
    return element if type(element) is tl.dtype and element.name != "int1" else None


def _mask(mask: Any, pointer: Any) -> TensorHandle | None:
    """Which lanes, if it is known without Triton."""
    if not isinstance(mask, tl.tensor) or mask.dtype is not I1:
        return None
    handle, shape = mask.handle, pointer.handle.data.shape
    if handle.data.shape == shape:
        return handle
    if type(mask) is not Scalar:
        return None
    lanes = object.__new__(TensorHandle)
    lanes.data, lanes.dtype, lanes.attr = ones(shape) if mask.value else zeros(shape, "?"), I1, {}
    return lanes


@functools.cache
def ones(shape: tuple[int, ...]) -> np.ndarray:
    """All lanes, as an array that nobody may write to."""
    array = np.ones(shape, np.bool_)
    array.flags.writeable = False
    return array


@functools.cache
def zeros(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Zeros of a type by its name, which is quicker to look up than the type, in an array that nobody may write to."""
    array = np.zeros(shape, dtype)
    array.flags.writeable = False
    return array
