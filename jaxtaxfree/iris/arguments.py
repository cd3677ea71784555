"""What the parameters of an Iris kernel may be."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import triton.language as tl


class Number:
    """A whole number that a kernel takes and that differs between ranks, such as `(RANK + 1) % WORLD`.

    Made of `RANK`, `WORLD` and integers by `+`, `-`, `*`, `//` and `%`.
    """

    def __init__(self, text: str, compute: Callable[[int, int], int]):
        self.text = text  # in the wrapper's words
        self.compute = compute  # of a rank and the number of ranks

    def __repr__(self) -> str:
        return self.text.replace("iris_rank", "RANK")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and other.text == self.text

    def __hash__(self) -> int:
        return hash(self.text)

    def _with(self, sign: str, function: Callable[[int, int], int], other: Any, turned: bool = False) -> "Number":
        if isinstance(other, int | np.integer) and not isinstance(other, bool):
            value = int(other)
            other = Number(str(value), lambda rank, world: value)
        if not isinstance(other, Number):
            return NotImplemented
        left, right = (other, self) if turned else (self, other)
        return Number(
            f"({left.text} {sign} {right.text})",
            lambda rank, world: function(left.compute(rank, world), right.compute(rank, world)),
        )

    def __add__(self, other: Any) -> "Number":
        return self._with("+", operator.add, other)

    def __radd__(self, other: Any) -> "Number":
        return self._with("+", operator.add, other, True)

    def __sub__(self, other: Any) -> "Number":
        return self._with("-", operator.sub, other)

    def __rsub__(self, other: Any) -> "Number":
        return self._with("-", operator.sub, other, True)

    def __mul__(self, other: Any) -> "Number":
        return self._with("*", operator.mul, other)

    def __rmul__(self, other: Any) -> "Number":
        return self._with("*", operator.mul, other, True)

    def __floordiv__(self, other: Any) -> "Number":
        return self._with("//", operator.floordiv, other)

    def __mod__(self, other: Any) -> "Number":
        return self._with("%", operator.mod, other)


class Table:
    """A pointer to i64 that the wrapper has: see `BASES` and `CONTEXT`."""

    def __init__(self, name: str, text: str):
        self.name, self.text = name, text

    def __repr__(self) -> str:
        return self.name


RANK = Number("iris_rank", lambda rank, world: rank)
WORLD = Number("WORLD", lambda rank, world: world)
BASES = Table("BASES", "iris_context + 2")
CONTEXT = Table("CONTEXT", "iris_context")


@dataclasses.dataclass(frozen=True)
class Out:
    """A result of the kernel: memory of this rank alone, which holds what the kernel stores there, and garbage besides.

    Attributes:
      shape, dtype: of the result.
    """

    shape: tuple[int, ...]
    dtype: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", shape_of("Out", self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))


@dataclasses.dataclass(frozen=True)
class Symmetric:
    """A buffer on the symmetric heap, the same on every rank: see `symmetric`."""

    shape: tuple[int, ...]
    dtype: Any
    fill: float | None = None
    source: Any = dataclasses.field(default=None, compare=False)
    result: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes_before(self) -> int:
        """How much is stored into it before the kernel begins."""
        return 0 if self.fill is None and self.source is None else self.size * self.dtype.itemsize


def symmetric(like: Any, dtype: Any = None, *, fill: float | None = None, result: bool = False) -> Symmetric:
    """A buffer on the symmetric heap, which peers reach by the table of bases.

    Args:
      like: an array, which the buffer holds when the kernel begins; or the buffer's shape.
      dtype: of a buffer that is given by its shape.
      fill: a number that all of the buffer holds when the kernel begins, such as 0 in flags. None leaves it as it was,
        and its two copies take turns from call to call: garbage.
      result: the buffer is a result of the call as well. Peers may store into it until their kernels end. So the call
        takes a launch more, in which all ranks meet.

    Raises:
      TypeError: if an array is given with a dtype or `fill`, or a shape without a dtype.
    """
    if hasattr(like, "shape") and hasattr(like, "dtype"):
        if dtype is not None or fill is not None:
            raise TypeError("symmetric takes an array, or a shape with dtype= and perhaps fill=, not both.")
        return Symmetric(tuple(like.shape), np.dtype(like.dtype), source=like, result=result)
    if dtype is None:
        raise TypeError(f"symmetric takes a shape with its dtype, or an array, not {like!r} alone.")
    if fill is not None and not isinstance(fill, int | float | np.number):
        raise TypeError(f"symmetric fills a buffer with a number, not with {fill!r}: pass the array itself.")
    fill = fill.item() if isinstance(fill, np.number) else fill
    return Symmetric(shape_of("symmetric", like), np.dtype(dtype), fill, result=result)


def shape_of(what: str, shape: Any) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, tuple | list) else (shape,)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in sizes):
        raise ValueError(f"{what} takes a shape of whole numbers that are not negative, not {shape!r}.")
    return tuple(map(int, sizes))


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer of a workspace, as a parameter of a kernel."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


_TRITON_NAMES = {
    "bool": "int1",
    "float8_e4m3fn": "float8e4nv",
    "float8_e5m2": "float8e5",
}


def triton_dtype(dtype: Any) -> str:
    """The name in `triton.language` of a dtype.

    Raises:
      TypeError: if it has none.
    """
    name = np.dtype(dtype).name
    name = _TRITON_NAMES.get(name, name)
    if not isinstance(getattr(tl, name, None), tl.dtype):
        raise TypeError(f"Triton has no dtype for {np.dtype(dtype).name}.")
    return name


@dataclasses.dataclass
class Arguments:
    """The arguments of a call by what they are, each by the name of its parameter, in the kernel's order."""

    operands: dict[str, Any] = dataclasses.field(default_factory=dict)
    outs: dict[str, Out] = dataclasses.field(default_factory=dict)
    symmetric: dict[str, Symmetric] = dataclasses.field(default_factory=dict)
    buffers: dict[str, Buffer] = dataclasses.field(default_factory=dict)
    special: dict[str, Number | Table] = dataclasses.field(default_factory=dict)
    constants: dict[str, Any] = dataclasses.field(default_factory=dict)


def sort(kernel: Any, name: str, given: Mapping[str, Any], buffers: Iterable[Buffer] | None) -> Arguments:
    """Sorts what a kernel's parameters are given.

    Args:
      buffers: those of the workspace that the call takes part in; None: it takes part in none.

    Raises:
      TypeError: with all reasons, if they do not fit the kernel.
    """
    reasons = [f"it has no parameter {key!r}" for key in given if key not in kernel.arg_names]
    missing = [each.name for each in kernel.params if not each.has_default and each.name not in given]
    if missing:
        reasons.append(f"nothing says what its parameters {', '.join(missing)} are")
    found = Arguments()
    constant = {each.name for each in kernel.params if each.is_constexpr}
    for key in kernel.arg_names:
        if key in given:
            kind, why = _kind(key, given[key], key in constant, buffers)
            if why:
                reasons.append(why)
            else:
                value = given[key]
                getattr(found, kind)[key] = value.item() if isinstance(value, np.generic) else value
    if reasons:
        raise TypeError(f"The Iris kernel {name} does not fit its call: {'; '.join(reasons)}.")
    return found


def _kind(key: str, value: Any, constant: bool, buffers: Iterable[Buffer] | None) -> tuple[str, str | None]:
    """The field of `Arguments` for a value, and why it cannot be this parameter."""
    if isinstance(value, Number | Table):
        return "special", None
    for kind, name in ((Out, "outs"), (Symmetric, "symmetric"), (Buffer, "buffers")):
        if isinstance(value, kind):
            why = f"{key!r} is a constant, and is given {kind.__name__}" if constant else None
            if kind is Symmetric and buffers is not None:
                why = f"{key!r} is given a buffer of its own: let the workspace have it"
            if isinstance(value, Buffer) and value not in (buffers or ()):
                why = f"{key!r} is given a buffer of a workspace that is not the call's"
            return name, why
    if isinstance(value, jax.Array | np.ndarray):
        if value.ndim == 0:
            return "operands", (
                f"{key!r} is given an array without dimensions: give a number of Python, or an array [1] that the "
                "kernel loads"
            )
        return "operands", f"{key!r} is a constant, and is given an array" if constant else None
    try:
        hash(value)
    except TypeError:
        return "constants", f"{key!r} is given {value!r}, which cannot be hashed"
    return "constants", None
