"""Shared memory of a program, the mbarriers that lie in it, and the descriptors by which TMA finds what is outside."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter

from jaxtaxfree.call import described_as
from jaxtaxfree.simulator import functions, interpreter
from jaxtaxfree.simulator.events import Event
from jaxtaxfree.simulator.memory import POISON, Part
from jaxtaxfree.simulator.scalars import Scalar

_ALIGNMENT = 16  # bytes, of what TMA reads and writes outside of shared memory
_UNIT = 4  # log2 of the bytes by which accesses to shared memory are told apart, unless they are smaller


class SharedMachine(Protocol):
    """What runs the accesses to shared memory."""

    def load_shared(self, view: "Memory") -> np.ndarray: ...

    def store_shared(self, view: "Memory", values: np.ndarray) -> None: ...

    def outside(self, view: "Memory", what: str) -> Exception:
        """The error of an index that is out of bounds."""
        ...


@dataclasses.dataclass(eq=False)
class Buffer(Part):
    """An allocation in the shared memory of a program.

    Attributes:
      data: its bytes.
      itemsize: bytes of an element, for reports.
      barriers: those that have been initialised in it, by their offsets.
      touched: the units of accesses that have been asked for, by the ids of their addresses, which are kept.
    """

    data: np.ndarray = dataclasses.field(kw_only=True)
    itemsize: int = dataclasses.field(kw_only=True)
    barriers: dict[int, "Mbarrier"] = dataclasses.field(default_factory=dict, kw_only=True)
    touched: dict[int, tuple[np.ndarray, int, np.ndarray]] = dataclasses.field(default_factory=dict, kw_only=True)

    @classmethod
    def allocate(cls, name: str, program: int, rank: int, shape: Sequence[int], itemsize: int) -> "Buffer":
        data = np.full(math.prod(shape) * itemsize + 16, POISON, np.uint8)
        offset = -data.ctypes.data % 16
        data = data[offset : data.size - 16 + offset]
        start = data.ctypes.data
        note = f" in shared memory of program {program}"
        place = (rank, start, start + data.size, tuple(shape), note, _UNIT)
        return cls(name, "shared", *place, data=data, itemsize=itemsize)

    def units(self, addresses: np.ndarray, size: int) -> np.ndarray:
        # Views are accessed again and again, each with one array of addresses.
        known = self.touched.get(id(addresses))
        if known is not None and known[1] == self.unit:
            return known[2]
        units = super().units(addresses, size)
        self.touched[id(addresses)] = addresses, self.unit, units
        return units

    def element(self, address: int, size: int) -> str:
        del size
        return super().element(address, self.itemsize)


@dataclasses.dataclass(slots=True, eq=False)
class Mbarrier:
    """An mbarrier: it counts arrivals and the bytes that have been announced and have not come.

    Attributes:
      name: for reports.
      address: where it lies.
      lane: its thread among the clocks: what those who have arrived knew.
      count: arrivals of a phase.
      made: its initialisation.
      phase: the one that goes on, from 0 on.
      pending: arrivals that it lacks.
      bytes: announced and not here yet.
      waited: the phases that somebody has seen complete.
      loads: of each phase that nobody has seen complete, the first load that was begun in it.
    """

    name: str
    address: int
    lane: int
    count: int
    made: Event
    phase: int = 0
    pending: int = 0
    bytes: int = 0
    waited: int = 0
    loads: dict[int, Event] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        arrived = self.count - self.pending
        text = f"phase {self.phase} of {self.name} has {arrived} of {self.count} arrivals"
        return f"{text}, and {self.bytes} bytes have not come" if self.bytes else text


class Pattern:
    """Which bytes of a buffer a view takes: the same in all programs, so that it is worked out once.

    Attributes:
      offsets: for each element its byte in the buffer.
      itemsize: bytes of an element.
    """

    def __init__(self, offsets: np.ndarray, itemsize: int):
        self.offsets, self.itemsize = offsets, itemsize
        self._views: dict[Any, Pattern] = {}

    def view(self, key: Any, offsets: Callable[[np.ndarray], np.ndarray], itemsize: int) -> "Pattern":
        """A view of this one, which the key tells from others."""
        pattern = self._views.get(key)
        if pattern is None:
            pattern = self._views[key] = Pattern(offsets(self.offsets), itemsize)
        return pattern

    @functools.cached_property
    def accesses(self) -> tuple[np.ndarray, int]:
        """Offsets that cover it, and the bytes at each: a power of two, as large as it can be."""
        starts = np.sort(self.offsets, axis=None)
        size = self.itemsize
        while size < 1 << _UNIT and starts.size % 2 == 0:
            pairs = starts.reshape(-1, 2)
            if (pairs[:, 0] % (2 * size)).any() or (pairs[:, 1] - pairs[:, 0] != size).any():
                break
            starts, size = pairs[:, 0], 2 * size
        return starts.astype(np.uint64), size

    @functools.cached_property
    def indices(self) -> np.ndarray:
        return self.offsets // self.itemsize

    @functools.cached_property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last."""
        return int(np.ptp(self.offsets)) + self.itemsize


@functools.cache
def whole(shape: tuple[int, ...], itemsize: int) -> Pattern:
    """The pattern of a whole buffer."""
    return Pattern(np.arange(0, math.prod(shape) * itemsize, itemsize).reshape(shape), itemsize)


class Memory:
    """A view of shared memory, as `gl.allocate_shared_memory` returns it.

    Layouts are kept and mean nothing: elements lie as in an array. So a part of a buffer that is written by one layout
    and read by another one gives other values than on a GPU.

    Args:
      buffer: where it lies.
      pattern: what of it.
    """

    def __init__(self, machine: "SharedMachine", buffer: Buffer, pattern: Pattern, dtype: Any, layout: Any):
        self._machine = machine
        self.buffer, self.pattern, self.dtype, self.layout = buffer, pattern, dtype, layout
        offsets = self.offsets = pattern.offsets
        self.shape, self.rank, self.numel = list(offsets.shape), offsets.ndim, offsets.size
        self._views: dict[Any, Memory] = {}

    @property
    def type(self) -> Any:
        return SimpleNamespace(
            element_ty=self.dtype, shape=self.shape, layout=self.layout, nbytes_per_cta=self.nbytes_per_cta
        )

    @property
    def nbytes_per_cta(self) -> int:
        return self.numel * _itemsize(self.dtype)

    def load(self, layout: Any = None) -> Any:
        del layout
        return tensor(self._machine.load_shared(self), self.dtype)

    def store(self, value: Any) -> None:
        shape = [integer(size) for size in value.shape]
        if value.dtype != self.dtype or shape != self.shape:
            raise TypeError(f"{value.dtype}{shape} does not fit into shared {self.dtype}{self.shape}.")
        self._machine.store_shared(self, value.handle.data)

    def index(self, index: Any) -> "Memory":
        at = integer(index)
        if not 0 <= at < self.shape[0]:
            raise self._machine.outside(self, f"[{at}]")
        return self._view(at, lambda offsets: offsets[at])

    def slice(self, start: Any, length: Any, dim: Any = 0) -> "Memory":
        first, count, axis = map(integer, (start, length, dim))
        if first < 0 or first + count > self.shape[axis]:
            raise self._machine.outside(self, f"[{first}:{first + count}] of dimension {axis}")
        return self._view((first, count, axis), lambda offsets: offsets.take(range(first, first + count), axis))

    def permute(self, order: Sequence[Any]) -> "Memory":
        axes = tuple(map(integer, order))
        return self._view(("permute", axes), lambda offsets: offsets.transpose(axes))

    def reshape(self, shape: Sequence[Any]) -> "Memory":
        sizes = tuple(map(integer, shape))
        return self._view(("reshape", sizes), lambda offsets: offsets.reshape(sizes))

    def reinterpret(self, dtype: Any = None, shape: Sequence[Any] | None = None, layout: Any = None) -> "Memory":
        dtype = self.dtype if dtype is None else dtype
        sizes = self.shape if shape is None else [integer(size) for size in shape]
        layout = self.layout if layout is None else layout
        item = _itemsize(dtype)
        size = math.prod(sizes) * item
        if size > self.nbytes_per_cta or self.pattern.extent > self.nbytes_per_cta:
            raise self._machine.outside(self, f"{dtype}{sizes}")

        def offsets(of: np.ndarray) -> np.ndarray:
            return int(of.flat[0]) + np.arange(0, size, item).reshape(sizes)

        pattern = self.pattern.view(("reinterpret", item, *sizes), offsets, item)
        return Memory(self._machine, self.buffer, pattern, dtype, layout)

    def _view(self, key: Any, offsets: Callable[[np.ndarray], np.ndarray]) -> "Memory":
        view = self._views.get(key)
        if view is None:
            pattern = self.pattern.view(key, offsets, self.pattern.itemsize)
            view = self._views[key] = Memory(self._machine, self.buffer, pattern, self.dtype, self.layout)
        return view

    def _keep_alive(self) -> None:
        """Says to the compiler that the memory is still in use."""

    @functools.cached_property
    def accesses(self) -> tuple[np.ndarray, int]:
        """Addresses that cover it, and the bytes at each."""
        starts, size = self.pattern.accesses
        return starts + np.uint64(self.buffer.start), size

    @property
    def elements(self) -> np.ndarray:
        """A copy of what it holds."""
        return self._all()[self.pattern.indices]

    @elements.setter
    def elements(self, values: np.ndarray) -> None:
        self._all()[self.pattern.indices] = values

    def _all(self) -> np.ndarray:
        return self.buffer.data.view(numpy_type(self.dtype))


@dataclasses.dataclass(frozen=True)
class TensorDescriptor:
    """What a kernel gets for a TMA descriptor.

    Attributes:
      address: of the array in global memory.
      sizes, steps: its shape and strides, in elements.
      block_shape: of the block that an operation moves.
      dtype: of the elements, one of Triton's.
      layout: that the block has in shared memory; means nothing here.
    """

    address: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    block_shape: tuple[int, ...]
    dtype: Any
    layout: Any = None

    def __post_init__(self) -> None:
        size = _itemsize(self.dtype)
        if not len(self.sizes) == len(self.steps) == len(self.block_shape):
            raise ValueError(f"A block of {self.block_shape} does not fit into an array of {self.sizes}.")
        if (
            self.steps[-1] != 1
            or self.address % _ALIGNMENT
            or any(step * size % _ALIGNMENT for step in self.steps[:-1])
        ):
            raise ValueError(
                f"TMA needs arrays whose last dimension is contiguous, and all others lie multiples of {_ALIGNMENT} "
                f"bytes apart: not {self.dtype} of strides {self.steps} at {self.address:#x}."
            )
        if self.block_shape[-1] * size % _ALIGNMENT:
            raise ValueError(
                f"TMA moves rows of multiples of {_ALIGNMENT} bytes, not of {self.block_shape[-1] * size}."
            )

    @classmethod
    def of(cls, address: int, array: np.ndarray, block_shape: tuple[int, ...], layout: Any) -> "TensorDescriptor":
        """The descriptor of a whole array that lies at an address."""
        sizes, steps = described_as(array.shape, block_shape)
        dtype = interpreter.pointer(address, array.dtype).dtype.element_ty
        return cls(address, sizes, steps, tuple(block_shape), dtype, layout(list(block_shape), dtype))

    @property
    def shape(self) -> tuple[Any, ...]:
        return interpreter.argument(self.sizes)

    @property
    def strides(self) -> tuple[Any, ...]:
        return interpreter.argument(self.steps)

    @property
    def block_type(self) -> Any:
        return tl.block_type(self.dtype, list(self.block_shape))

    @property
    def nbytes_per_cta(self) -> int:
        return math.prod(self.block_shape) * _itemsize(self.dtype)

    def block(self, coordinates: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """For each element of a block its address, and whether it is inside of the array."""
        item = _itemsize(self.dtype)
        first = self.address + item * sum(at * step for at, step in zip(coordinates, self.steps, strict=True))
        addresses = _offsets(self.block_shape, self.steps, item) + np.uint64(first % (1 << 64))
        ends = zip(coordinates, self.block_shape, self.sizes)
        if all(at >= 0 and at + size <= end for at, size, end in ends):
            return addresses, functions.ones(self.block_shape)
        inside = functions.ones(self.block_shape)
        for axis, (at, size, end) in enumerate(zip(coordinates, self.block_shape, self.sizes)):
            along = at + np.arange(size)
            within = (along >= 0) & (along < end)
            inside = inside & within.reshape([-1 if i == axis else 1 for i in range(len(self.sizes))])
        return addresses, inside


@functools.cache
def _offsets(block_shape: tuple[int, ...], steps: tuple[int, ...], itemsize: int) -> np.ndarray:
    """The bytes from the first element of a block to each of them."""
    along = [np.arange(size) * step * itemsize for size, step in zip(block_shape, steps)]
    return functools.reduce(np.add.outer, along).astype(np.uint64)


def numpy_type(dtype: Any) -> np.dtype:
    return _numpy_types.get(id(dtype)) or np.dtype(triton_interpreter._get_np_dtype(dtype))


# By identity, because Triton's types take long to compare.
_numpy_types = {
    id(type_): np.dtype(triton_interpreter._get_np_dtype(type_))
    for type_ in (tl.float32, tl.bfloat16, tl.float16, tl.int32, tl.int64, tl.uint8)
}


def _itemsize(dtype: Any) -> int:
    return max(1, dtype.primitive_bitwidth // 8)


def integer(value: Any) -> int:
    """A number that a kernel has as a constant or as a scalar."""
    if type(value) is Scalar:
        return int(value.value)
    if type(value) is int:
        return value
    if hasattr(value, "handle"):
        return int(value.handle.data.reshape(-1)[0])
    return int(value.value if isinstance(value, tl.constexpr) else value)


def tensor(data: np.ndarray, dtype: Any) -> Any:
    """A kernel's tensor."""
    handle = triton_interpreter.TensorHandle(data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(data.shape)) if data.ndim else dtype)
