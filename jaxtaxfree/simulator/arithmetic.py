"""Shortcuts for the arithmetic on addresses, indices and f32, in which a kernel spends nearly all its time.

Triton's semantics ask about types, promotion and broadcasting at each operator, which takes 20 to 40 us. Of signed
integers, pointers and f32 among themselves the answers are known; everything else takes Triton's way.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import TensorHandle

_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


def _numpy(dtype: Any) -> type | None:
    # By identity: comparing Triton's types takes as long as adding numbers.
    return np.int32 if dtype is tl.int32 else np.int64 if dtype is tl.int64 else None


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x - np.fmod(x, y)) // y  # C's division


_OPERATORS: dict[str, tuple[Callable, bool]] = {  # and whether it compares
    "add": (np.add, False),
    "sub": (np.subtract, False),
    "mul": (np.multiply, False),
    "floordiv": (_divide, False),
    "mod": (np.fmod, False),
    "and": (np.bitwise_and, False),
    "lshift": (np.left_shift, False),
    "lt": (np.less, True),
    "le": (np.less_equal, True),
    "gt": (np.greater, True),
    "ge": (np.greater_equal, True),
    "eq": (np.equal, True),
    "ne": (np.not_equal, True),
}
_REFLECTED = ("add", "sub", "mul")
_OF_INTEGERS = ("floordiv", "mod", "and", "lshift")
_F32 = np.finfo(np.float32)


def bind(scope: Any) -> None:
    """Puts the shortcuts in front of the operators of `tl.tensor`, until the scope is restored."""
    for name, (operator, compares) in _OPERATORS.items():
        slow = getattr(tl.tensor, f"__{name}__")
        if name not in _OF_INTEGERS:
            slow = _shortcut_of_floats(operator, compares, slow)
        scope.set_attr(tl.tensor, f"__{name}__", _shortcut(operator, compares, slow, name == "add", name == "and"))
    for name in _REFLECTED:
        reflected = functools.partial(_reflect, _OPERATORS[name][0])
        slow = _shortcut_of_floats(reflected, False, getattr(tl.tensor, f"__r{name}__"))
        scope.set_attr(tl.tensor, f"__r{name}__", _shortcut(reflected, False, slow))
    broadcast = TritonSemantic.broadcast_impl_value
    scope.set_attr(TritonSemantic, "broadcast_impl_value", _broadcast(broadcast))
    scope.set_attr(tl.tensor, "to", _to(tl.tensor.to))
    scope.set_attr(tl.tensor, "__init__", _initialize(tl.tensor.__init__))
    scope.set_attr(tl.block_type, "__init__", _initialize_block_type(tl.block_type.__init__))
    scope.set_attr(triton_interpreter, "_get_np_dtype", _numpy_dtype(triton_interpreter._get_np_dtype))


def _reflect(operator: Callable, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return operator(y, x)


def _shortcut(
    operator: Callable, compares: bool, slow: Callable, points: bool = False, logical: bool = False
) -> Callable:
    def apply(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        mine = _numpy(self.dtype)
        if mine is None:
            if self.dtype is tl.int1 and logical and type(other) is tl.tensor and other.dtype is tl.int1:
                return _tensor(operator(self.handle.data, other.handle.data), tl.int1, _shape(self, other))
            if points and type(self.dtype) is tl.pointer_type:
                advanced = _advance(self, other)
                return slow(self, other, *args, **kwargs) if advanced is None else advanced
            return slow(self, other, *args, **kwargs)
        x = self.handle.data
        if type(other) is int:
            if not _INT32_MIN <= other <= _INT32_MAX:
                return slow(self, other, *args, **kwargs)
            like, dtype, y = self, self.dtype, mine(other)
        elif type(other) is tl.tensor and _numpy(other.dtype):
            like, y = _shape(self, other), other.handle.data
            dtype = tl.int64 if self.dtype is not other.dtype else self.dtype
            if dtype is tl.int64:
                x, y = x.astype(np.int64, copy=False), y.astype(np.int64, copy=False)
        else:
            return slow(self, other, *args, **kwargs)
        return _tensor(operator(x, y), tl.int1 if compares else dtype, like)

    return apply


def _shortcut_of_floats(operator: Callable, compares: bool, slow: Callable) -> Callable:
    def apply(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if self.dtype is tl.float32:
            if type(other) is tl.tensor:
                if other.dtype is tl.float32:
                    data = operator(self.handle.data, other.handle.data)
                    return _tensor(data, tl.int1 if compares else tl.float32, _shape(self, other))
            elif (type(other) is float or type(other) is int) and (other == 0 or _F32.tiny <= abs(other) <= _F32.max):
                data = operator(self.handle.data, np.float32(other))
                return _tensor(data, tl.int1 if compares else tl.float32, self)
        return slow(self, other, *args, **kwargs)

    return apply


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
    like = other if other.type.is_block() and other.handle.data.shape == shape else None
    return _tensor(np.broadcast_to(x.handle.data, shape), x.dtype, like)


def _shape(x: Any, y: Any) -> Any:
    """The one of two tensors that has the shape of their sum; None if neither has."""
    if not y.type.is_block():
        return x
    if not x.type.is_block() or x.handle.data.shape == y.handle.data.shape:
        return y
    return None


def _advance(pointer: Any, offset: Any) -> Any:
    """pointer + offset, or None if that needs Triton."""
    size = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
    if type(offset) is int:
        return _tensor(pointer.handle.data + np.uint64(size * offset % (1 << 64)), pointer.dtype, pointer)
    if type(offset) is tl.tensor and _numpy(offset.dtype):
        data = pointer.handle.data + offset.handle.data.astype(np.uint64) * np.uint64(size)
        return _tensor(data, pointer.dtype, _shape(pointer, offset))
    return None


def _to(slow: Callable) -> Callable:
    def to(self: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return slow(self, dtype, *args, **kwargs)
        if self.dtype is dtype:
            return self
        mine, target = _numpy(self.dtype), _numpy(dtype)
        if mine and target:
            return _tensor(self.handle.data.astype(target), dtype, self)
        if mine is np.int64 and type(dtype) is tl.pointer_type:
            return _tensor(self.handle.data.view(np.uint64), dtype, self)
        if target is np.int64 and type(self.dtype) is tl.pointer_type:
            return _tensor(self.handle.data.view(np.int64), dtype, self)
        return slow(self, dtype)

    return to


def _tensor(data: np.ndarray, dtype: Any, like: Any) -> Any:
    """A tensor of a shape that another one has, if there is one: that saves asking again what the shape is."""
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    if like is None:
        return tl.tensor(handle, tl.block_type(dtype, list(data.shape)))
    tensor = object.__new__(tl.tensor)
    tensor.handle, tensor.dtype, tensor.shape, tensor.numel = handle, dtype, like.shape, like.numel
    if like.dtype is dtype:
        tensor.type = like.type
    else:
        tensor.type = tl.block_type(dtype, list(like.type.shape)) if like.type.is_block() else dtype
    return tensor


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
