"""Gluon's language, bound to the simulator: what a Gluon kernel's functions mean here.

Values are those of Triton's interpreter, and layouts mean nothing. Whatever has the same meaning in both languages is
called as it is; here stands the rest. Of inline assembly, the few instructions are known that a kernel needs in order
to talk to other GPUs.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper

from jaxtaxfree.simulator import functions, interpreter
from jaxtaxfree.simulator.agents import GluonMachine
from jaxtaxfree.simulator.machine import Machine
from jaxtaxfree.simulator.shared import Memory, TensorDescriptor, integer, tensor


def _machine() -> GluonMachine:
    machine = Machine.running
    assert isinstance(machine, GluonMachine)
    return machine


# Tensors.


@interpreter.replace(gl.arange)
def _arange(start: Any, end: Any, layout: Any = None) -> Any:
    del layout
    return tl.arange(start, end)


@interpreter.replace(gl.full)
def _full(shape: Sequence[Any], value: Any, dtype: Any, layout: Any = None) -> Any:
    del layout
    return tl.full(shape, value, dtype)


@interpreter.replace(gl.convert_layout, gl.set_auto_layout)
def _convert_layout(value: Any, layout: Any, assert_trivial: Any = False) -> Any:
    del layout, assert_trivial
    return value


@interpreter.replace(gl.multiple_of, gl.max_contiguous, gl.max_constancy)
def _hint(value: Any, values: Any) -> Any:
    del values
    return value


@interpreter.replace(gl.reduce)
def _reduce(*args: Any, **kwargs: Any) -> Any:
    return tl.reduce(*args, **kwargs)


@interpreter.replace(gl.associative_scan)
def _associative_scan(*args: Any, **kwargs: Any) -> Any:
    return tl.associative_scan(*args, **kwargs)


@interpreter.replace(gl.static_range)
def _static_range(*args: Any) -> range:
    return range(*map(integer, args))


@interpreter.replace(gl.static_assert)
def _static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


@interpreter.replace(gl.barrier)
def _barrier(cluster: bool = False) -> None:
    _refuse(cluster, "clusters")
    _machine().barrier()


@interpreter.replace(gl.num_warps)
def _num_warps() -> int:
    return _machine().warps


@interpreter.replace(gl.num_ctas)
def _num_ctas() -> int:
    return 1


def _refuse(wanted: Any, what: str) -> None:
    if wanted:
        raise NotImplementedError(f"The simulator knows no {what}.")


functions.shortcut(gl.load)(functions.load)
functions.shortcut(gl.store)(functions.store)


class _Remembered:
    """A kind of layout, or what makes one, of which equal ones are made once: kernels make theirs anew at each use."""

    def __init__(self, make: Callable):
        self._make = make
        self._known: dict[Any, tuple[Any, Any]] = {}  # what was made, and of what, whose ids may be in the key

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = _key((*args, *kwargs.items()))
        if key not in self._known:
            self._known[key] = self._make(*args, **kwargs), (args, kwargs)
        return self._known[key][0]

    def __getattr__(self, name: str) -> Any:
        value = _Remembered(getattr(self._make, name))
        setattr(self, name, value)
        return value


def _key(value: Any) -> Any:
    kind = type(value)
    if kind is int or kind is str or kind is bool or value is None:
        return value
    if kind is tl.constexpr:
        return _key(value.value)
    return tuple(map(_key, value)) if isinstance(value, (list, tuple, tl.tuple)) else (kind, id(value))


for _layout in (
    gl.BlockedLayout,
    gl.DotOperandLayout,
    gl.NVMMADistributedLayout,
    gl.NVMMASharedLayout,
    gl.SliceLayout,
    gl.SwizzledSharedLayout,
):
    interpreter.replace(_layout)(_Remembered(_layout))


# Shared memory, partitions and mbarriers.


@interpreter.replace(gl.allocate_shared_memory)
def _allocate_shared_memory(element_ty: Any, shape: Sequence[Any], layout: Any, value: Any = None) -> Memory:
    return _machine().allocate(element_ty, [integer(size) for size in shape], layout, value)


@interpreter.replace(gl.warp_specialize)
def _warp_specialize(
    functions_and_args: Sequence[tuple[Callable, Sequence[Any]]],
    worker_num_warps: Sequence[Any],
    worker_num_regs: Sequence[Any] | None = None,
) -> Any:
    del worker_num_regs
    return _machine().warp_specialize(functions_and_args, [integer(warps) for warps in worker_num_warps])


@interpreter.replace(hopper.mbarrier.allocate_mbarrier)
def _allocate_mbarrier(batch: Any = None, two_ctas: bool = False) -> Memory:
    _refuse(two_ctas, "clusters")
    shape = [1] if batch is None else [integer(batch), 1]
    return _machine().allocate(tl.int64, shape, hopper.mbarrier.MBarrierLayout())


@interpreter.replace(hopper.mbarrier.init)
def _init(mbarrier: Memory, count: Any) -> None:
    _machine().init_barrier(mbarrier, integer(count))


@interpreter.replace(hopper.mbarrier.invalidate)
def _invalidate(mbarrier: Memory) -> None:
    _machine().invalidate_barrier(mbarrier)


@interpreter.replace(hopper.mbarrier.expect)
def _expect(mbarrier: Memory, bytes_per_cta: Any = None, pred: Any = True, *, from_cta: Any = None) -> None:
    _refuse(from_cta, "clusters")
    if pred:
        _machine().arrive(mbarrier, 1, integer(bytes_per_cta))


@interpreter.replace(hopper.mbarrier.arrive, ampere.mbarrier.arrive)
def _arrive(mbarrier: Memory, *, count: Any = 1, pred: Any = True, from_cta: Any = None) -> None:
    _refuse(from_cta, "clusters")
    if pred:
        _machine().arrive(mbarrier, integer(count))


@interpreter.replace(hopper.mbarrier.wait)
def _wait(mbarrier: Memory, phase: Any, pred: Any = True, deps: Sequence[Any] = ()) -> None:
    del deps
    if pred:
        _machine().wait_barrier(mbarrier, integer(phase))


# Asynchronous operations.


@interpreter.replace(hopper.fence_async_shared)
def _fence_async_shared(cluster: bool = False) -> None:
    _refuse(cluster, "clusters")
    _machine().fence_shared()


@interpreter.replace(hopper.tma.make_tensor_descriptor)
def _make_tensor_descriptor(
    base: Any,
    shape: Sequence[Any],
    strides: Sequence[Any],
    block_shape: Sequence[Any],
    layout: Any,
    padding_option: str = "zero",
) -> TensorDescriptor:
    _refuse(padding_option != "zero", "other padding than by zeros")
    sizes, steps, block = (tuple(map(integer, values)) for values in (shape, strides, block_shape))
    return TensorDescriptor(integer(base), sizes, steps, block, base.dtype.element_ty, layout)


@interpreter.replace(hopper.tma.async_load)
def _async_load(
    tensor_desc: TensorDescriptor,
    coord: Sequence[Any],
    barrier: Memory,
    result: Memory,
    pred: Any = True,
    multicast: bool = False,
    cache_policy: Any = None,
) -> None:
    del cache_policy
    _refuse(multicast, "clusters")
    if pred:
        _machine().load_block(tensor_desc, [integer(at) for at in coord], barrier, result)


@interpreter.replace(hopper.tma.async_store)
def _async_store(tensor_desc: TensorDescriptor, coord: Sequence[Any], src: Memory, cache_policy: Any = None) -> None:
    del cache_policy
    _machine().store_block(tensor_desc, [integer(at) for at in coord], src)


@interpreter.replace(hopper.tma.store_wait)
def _store_wait(pendings: Any, read_only: Any = True) -> None:
    _machine().wait_stores(integer(pendings), bool(read_only))


@interpreter.replace(hopper.warpgroup_mma_init)
def _warpgroup_mma_init(value: Any) -> Any:
    return value


@interpreter.replace(hopper.warpgroup_mma)
def _warpgroup_mma(
    a: Any,
    b: Memory,
    acc: Any,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Any:
    del precision, max_num_imprecise_acc
    return _machine().product_of(a, b, acc, bool(use_acc), bool(is_async))


@interpreter.replace(hopper.warpgroup_mma_wait)
def _warpgroup_mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] | None = None) -> Any:
    if deps is None:
        raise ValueError("warpgroup_mma_wait needs deps.")
    values = _machine().wait_products(integer(num_outstanding), deps)
    return values[0] if len(values) == 1 else tuple(values)


@interpreter.replace(ampere.mma_v2)
def _mma_v2(a: Any, b: Any, acc: Any, input_precision: Any = None) -> Any:
    del input_precision
    left, right = (operand.to(tl.float32).handle.data for operand in (a, b))
    return tensor(acc.handle.data + np.matmul(left, right), acc.dtype)


# Inline assembly.

_EIGHT_BITS = (tl.int8, tl.float8e4nv, tl.float8e5)
_LOAD = re.compile(r"ld\.(acquire|relaxed)\.(sys|gpu|cta)\.global\.[bsu](32|64) \$0, \[\$1\];")
_ADD = re.compile(r"red\.(release|relaxed)\.(sys|gpu|cta)\.global\.add\.[su](32|64) \[\$0\], \$1;")
_PROXY_FENCE = re.compile(r"fence\.proxy\.async(?:\.(global|shared::cta))?;")
# Of `kernels/blocks/widen.py`.
_WIDEN = re.compile(r"\{ // two (\w+) as (\w+) .*\}")
_CLOCK = re.compile(r"mov\.u64 \$0, %globaltimer;")


@interpreter.replace(gl.inline_asm_elementwise)
def _inline_asm_elementwise(
    asm: str, constraints: Any, args: Sequence[Any], dtype: Any, is_pure: Any, pack: Any = 1
) -> Any:
    del constraints, is_pure, pack
    return _run(asm, args, dtype)


@interpreter.replace(gl.inline_asm)
def _inline_asm(
    asm: Any, constraints: Any = "", args: Sequence[Any] = (), result_types: Any = (), is_pure: Any = False
) -> Any:
    del constraints, is_pure
    return _run(asm, args, result_types)


def _run(asm: Any, args: Sequence[Any], result: Any) -> Any:
    text = " ".join(str(asm).split())
    if found := _LOAD.fullmatch(text):
        pointers = args[0]
        if not pointers.dtype.is_ptr():
            pointers = pointers.to(tl.pointer_type(result))
        return tl.atomic_load(pointers, sem=found[1], scope=found[2])
    if found := _ADD.fullmatch(text):
        return tl.atomic_add(args[0], args[1], sem=found[1], scope=found[2])
    if found := _PROXY_FENCE.fullmatch(text):
        if found[1] != "global":
            _machine().fence_shared()
        if found[1] != "shared::cta":
            _machine().fence_proxy()
        return ()
    if found := _WIDEN.fullmatch(text):
        kind = next(dtype for dtype in _EIGHT_BITS if dtype.name == found[1])
        pairs = args[0].to(tl.int32)
        return tuple(
            ((pairs >> shift) & 255).to(tl.uint8).to(kind, bitcast=True).to(wide)
            for shift, wide in zip((0, 8), result, strict=True)
        )
    if _CLOCK.fullmatch(text):
        return interpreter.argument(_machine().scheduler.step).to(tl.int64)
    raise NotImplementedError(f"The simulator does not know this assembly: {text}")
