"""Shortcuts for the arithmetic on blocks of addresses, indices and f32, and for what comes of scalars.

Triton's semantics ask about types, promotion and broadcasting at each operator, which takes 20 to 40 us. Of signed
integers, booleans, pointers and f32 among themselves the answers are known; everything else takes Triton's way.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import TensorHandle

from jaxtaxfree.simulator import scalars
from jaxtaxfree.simulator.scalars import I1, I32, I64, Scalar

F32 = tl.float32
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def is_integer(dtype: Any) -> bool:
    # By identity: comparing Triton's types takes as long as adding numbers.
    return dtype is I32 or dtype is I64


def _is_short(dtype: Any) -> bool:
    return dtype is tl.bfloat16 or dtype is tl.float16


def _divide(x: Any, y: Any) -> np.ndarray:
    return (x - np.fmod(x, y)) // y  # C's division


_COMPUTING: dict[str, Callable] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_INTEGERS: dict[str, Callable] = {
    "floordiv": _divide,
    "mod": np.fmod,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}
_BITS: dict[str, Callable] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_COMPARING: dict[str, Callable] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_F32 = np.finfo(np.float32)


def bind(scope: Any) -> None:
    """Puts the shortcuts in front of the operators of `tl.tensor`, until the scope is restored."""
    for name, operator in {**_COMPUTING, **_INTEGERS, **_BITS}.items():
        for reflected in (False, True):
            full = f"__r{name}__" if reflected else f"__{name}__"
            slow, of = getattr(tl.tensor, full), functools.partial(_reflect, operator) if reflected else operator
            if name in _COMPUTING:
                slow = _shortcut_of_floats(of, False, slow)
            bits, shifts = name in _BITS, "shift" in name
            scope.set_attr(tl.tensor, full, _shortcut(of, False, slow, bits=bits, shifts=shifts))
    for name, operator in _COMPARING.items():
        slow = _shortcut_of_floats(operator, True, getattr(tl.tensor, f"__{name}__"))
        scope.set_attr(tl.tensor, f"__{name}__", _shortcut(operator, True, slow))
    scope.set_attr(tl.tensor, "__add__", _shortcut_of_pointers(tl.tensor.__add__))
    broadcast = TritonSemantic.broadcast_impl_value
    scope.set_attr(TritonSemantic, "broadcast_impl_value", _broadcast(broadcast))
    scope.set_attr(TritonSemantic, "make_tensor", lambda self, handle, type_: scalars.make(handle, type_))
    scope.set_attr(TritonSemantic, "scalar_constant", _scalar_constant(TritonSemantic.scalar_constant))
    scope.set_attr(TritonSemantic, "to_tensor", _to_tensor(TritonSemantic.to_tensor))
    scope.set_attr(tl.tensor, "to", _to(tl.tensor.to))
    scope.set_attr(tl.tensor, "__init__", _initialize(tl.tensor.__init__))
    scope.set_attr(tl.block_type, "__init__", _initialize_block_type(tl.block_type.__init__))
    scope.set_attr(triton_interpreter, "_get_np_dtype", _numpy_dtype(triton_interpreter._get_np_dtype))


def _reflect(operator: Callable, x: Any, y: Any) -> np.ndarray:
    return operator(y, x)


def _shortcut(operator: Callable, compares: bool, slow: Callable, bits: bool = False, shifts: bool = False) -> Callable:
    def apply(self: Any, other: Any) -> Any:
        dtype, kind = self.dtype, type(other)
        if kind is tl.constexpr and not shifts:
            return apply(self, other.value)
        if dtype is I32 or dtype is I64:
            if kind is int:
                if not _INT32_MIN <= other <= _INT32_MAX:
                    return slow(self, other)
                return tensor(operator(self.handle.data, other), I1 if compares else dtype, self)
            if kind is tl.tensor or kind is Scalar:
                # NumPy takes a number beside a block as one of the block's type, which has to hold it.
                x = self.value if type(self) is Scalar and kind is tl.tensor else self.handle.data
                y = other.value if kind is Scalar and type(self) is tl.tensor else other.handle.data
                if dtype is not other.dtype:
                    if not is_integer(other.dtype):
                        return slow(self, other)
                    dtype = I64
                    x, y = (np.asarray(data, np.int64) for data in (x, y))
                return tensor(operator(x, y), I1 if compares else dtype, block_of(self, other))
        elif bits and dtype is I1:
            if kind is bool:
                return tensor(operator(self.handle.data, other), I1, self)
            if (kind is Scalar or kind is tl.tensor) and other.dtype is I1:
                return tensor(operator(self.handle.data, other.handle.data), I1, block_of(self, other))
        return slow(self, other)

    return apply


def _shortcut_of_pointers(slow: Callable) -> Callable:
    """`__add__`."""

    def apply(self: Any, other: Any) -> Any:
        if type(self.dtype) is tl.pointer_type:
            size = scalars.stride(self.dtype)
            if type(other) is int:
                return tensor(self.handle.data + np.uint64(size * other % (1 << 64)), self.dtype, self)
            if type(other) is Scalar and is_integer(other.dtype):
                return tensor(self.handle.data + np.uint64(size * other.value % (1 << 64)), self.dtype, self)
            if type(other) is tl.tensor and is_integer(other.dtype):
                data = other.handle.data.astype(np.uint64)
                data *= np.uint64(size)
                start = np.uint64(self.value) if type(self) is Scalar else self.handle.data
                return tensor(start + data, self.dtype, block_of(self, other))
        return slow(self, other)

    return apply


def _shortcut_of_floats(operator: Callable, compares: bool, slow: Callable) -> Callable:
    def apply(self: Any, other: Any) -> Any:
        if self.dtype is F32:
            if type(other) is tl.tensor:
                if other.dtype is F32:
                    data = operator(self.handle.data, other.handle.data)
                    return tensor(data, I1 if compares else F32, block_of(self, other))
            elif (type(other) is float or type(other) is int) and (other == 0 or _F32.tiny <= abs(other) <= _F32.max):
                data = operator(self.handle.data, np.float32(other))
                return tensor(data, I1 if compares else F32, self)
        return slow(self, other)

    return apply


def _scalar_constant(slow: Callable) -> Callable:
    """`TritonSemantic.scalar_constant`."""

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        scalar = scalars.constant(value, dtype)
        return slow(self, value, dtype) if scalar is None else scalar

    return scalar_constant


def _to_tensor(slow: Callable) -> Callable:
    """`TritonSemantic.to_tensor`, through which the value of each assignment goes."""

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is Scalar or kind is tl.tensor:
            return x
        if kind is int and _INT32_MIN <= x <= _INT32_MAX:
            return Scalar(x, I32)
        if kind is tuple and not check_type:
            return x
        return slow(self, x, check_type)

    return to_tensor


def _broadcast(slow: Callable) -> Callable:
    """`TritonSemantic.broadcast_impl_value`."""

    def broadcast(self: Any, x: Any, y: Any) -> tuple[Any, Any]:
        blocks = x.type.is_block(), y.type.is_block()
        if not any(blocks) or (all(blocks) and x.handle.data.shape == y.handle.data.shape):
            return x, y
        if all(blocks):
            try:
                shape = np.broadcast_shapes(x.handle.data.shape, y.handle.data.shape)
            except ValueError:
                return slow(self, x, y)
        else:
            shape = (x if blocks[0] else y).handle.data.shape
        return _spread(x, shape, y), _spread(y, shape, x)

    return broadcast


def _spread(x: Any, shape: tuple[int, ...], other: Any) -> Any:
    """A tensor in another shape, which the other one may have."""
    if x.type.is_block() and x.handle.data.shape == shape:
        return x
    return tensor(spread(x.handle.data, shape), x.dtype, None)


def spread(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`np.broadcast_to`, which takes longer than to copy a small array."""
    out = np.empty(shape, data.dtype)
    out[...] = data
    return out


def block_of(x: Any, y: Any) -> Any:
    """The one of two tensors that is a block; the second if neither is."""
    return y if x.type is x.dtype else x


def _to(slow: Callable) -> Callable:
    def to(self: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            bits = kwargs == {"bitcast": True} and not args
            if bits and (self.dtype is F32 or self.dtype is I32) and (dtype is F32 or dtype is I32):
                return tensor(self.handle.data.view(np.float32 if dtype is F32 else np.int32), dtype, self)
            return slow(self, dtype, *args, **kwargs)
        if self.dtype is dtype:
            return self
        mine = self.dtype
        if (is_integer(mine) or mine is I1) and (is_integer(dtype) or dtype is F32):
            numpy = np.int32 if dtype is I32 else np.int64 if dtype is I64 else np.float32
            return tensor(self.handle.data.astype(numpy), dtype, self)
        if mine is I64 and type(dtype) is tl.pointer_type:
            return tensor(self.handle.data.view(np.uint64), dtype, self)
        if dtype is I64 and type(mine) is tl.pointer_type:
            return tensor(self.handle.data.view(np.int64), dtype, self)
        if (mine is F32 and _is_short(dtype)) or (dtype is F32 and _is_short(mine)):
            builder = triton_interpreter.interpreter_semantic.builder
            return tensor(builder.cast_impl(self.handle, dtype).data, dtype, self)
        return slow(self, dtype)

    return to


def tensor(data: np.ndarray, dtype: Any, like: Any) -> Any:
    """A tensor that is a scalar if another one is, or a block if there is none."""
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    if like is not None and like.type is like.dtype:
        return scalars.make(handle, dtype)
    if type(dtype) is tl.pointer_type:
        dtype = _interned(dtype)
    block = object.__new__(tl.tensor)
    block.handle, block.dtype = handle, dtype
    block.type, block.shape, block.numel = _blocks.get((id(dtype), data.shape)) or _block(dtype, data.shape)
    return block


_blocks: dict[tuple, tuple[Any, Any, Any]] = {}  # by the id of the element's type, which is kept, and the shape
_pointers: dict[tuple, Any] = {}


def _block(dtype: Any, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """The type, shape and number of elements of a block's tensor. Asking Triton takes longer than most arithmetic."""
    one = tl.tensor(None, tl.block_type(dtype, list(shape)))
    known = _blocks[id(dtype), shape] = one.type, one.shape, one.numel
    return known


def _interned(pointer: Any) -> Any:
    """The same type of pointers as one object, because kernels make theirs anew at each cast."""
    key = id(pointer.element_ty), pointer.address_space, pointer.const
    known = _pointers.get(key)
    if known is None or known.element_ty is not pointer.element_ty:
        known = _pointers[key] = pointer
    return known


def _initialize(slow: Callable) -> Callable:
    """`tl.tensor.__init__`, which derives the same of each shape again."""
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type_: Any) -> None:
        shape = tuple(type_.shape) if type_.is_block() else ()
        if shape not in shapes:
            slow(self, handle, type_)
            shapes[shape] = (self.numel, self.shape)
            return
        self.handle, self.type, self.dtype = handle, type_, type_.scalar
        self.numel, self.shape = shapes[shape]

    return init


def _initialize_block_type(slow: Callable) -> Callable:
    """`tl.block_type.__init__`, likewise."""
    known: dict[tuple, tuple[Any, dict[str, Any]]] = {}  # the element's type is kept, because its id is in the key

    def init(self: Any, element: Any, shape: Any) -> None:
        key = (id(element), *shape)
        if (attributes := known.get(key)) is None:
            slow(self, element, shape)
            known[key] = (element, dict(vars(self)))
        else:
            vars(self).update(attributes[1])

    return init


_by_name = {
    name: triton_interpreter._get_np_dtype(tl.dtype(name))
    for name in (*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES, *tl.dtype.FP_TYPES)
}


def _numpy_dtype(slow: Callable) -> Callable:
    """Triton's translation of types, which builds its whole table at each question."""

    def dtype(type_: Any) -> np.dtype:
        if type(type_) is tl.pointer_type:
            return np.dtype(np.uint64)
        return _by_name.get(type_.name) or slow(type_)

    return dtype
