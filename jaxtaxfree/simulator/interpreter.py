"""Triton's interpreter, made to run many programs by turns: kernels rewritten once, and a builder that asks a machine.

Triton's own interpreter turns a kernel into Python that computes on NumPy arrays. It decides so when the kernel is
decorated; here the kernels are compiled ones, so their functions, and those that they call, are rewritten again, with
globals of their own: the kernels' modules stay as they are.
"""

import builtins
import contextlib
import ctypes
import dataclasses
import functools
import gc
import inspect
import types
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton._C.libtriton import ir
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import ConstexprFunction, JITFunction

from jaxtaxfree import language
from jaxtaxfree.simulator import aggregates, arithmetic, atomics, functions, libdevice, scalars
from jaxtaxfree.simulator.events import MARKER

_SEMANTICS = {
    ir.MEM_SEMANTIC.RELAXED: "relaxed",
    ir.MEM_SEMANTIC.ACQUIRE: "acquire",
    ir.MEM_SEMANTIC.RELEASE: "release",
    ir.MEM_SEMANTIC.ACQUIRE_RELEASE: "acq_rel",
}
_SCOPES = {ir.MEM_SYNC_SCOPE.CTA: "cta", ir.MEM_SYNC_SCOPE.GPU: "gpu", ir.MEM_SYNC_SCOPE.SYSTEM: "sys"}
# Types of which Triton keeps the bits, as integers, by their names; NumPy can compute with them.
_AS_BITS = {
    "bf16": np.dtype(jnp.bfloat16),
    "fp8e4nv": np.dtype(jnp.float8_e4m3fn),
    "fp8e5": np.dtype(jnp.float8_e5m2),
    "fp8e4b8": np.dtype(jnp.float8_e4m3fnuz),
    "fp8e5b16": np.dtype(jnp.float8_e5m2fnuz),
}
_YOUNG = 50_000  # objects that may be made before Python looks for cycles among them


class Machine(Protocol):
    """What the builder needs of a simulation. Addresses are arrays of the lanes that are not masked out."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs of the launch that runs."""
        ...

    @property
    def program_index(self) -> tuple[int, int, int]:
        """Place in the grid of the program that runs."""
        ...

    def load(self, addresses: np.ndarray, size: int, volatile: bool) -> None:
        """Before a load."""

    def store(self, addresses: np.ndarray, size: int) -> None:
        """Before a store."""

    def atomic(
        self,
        addresses: np.ndarray,
        size: int,
        semantics: str,
        scope: str,
        looks: bool,
        act: Callable[[], Any],
        conditional: bool = False,
    ) -> Any:
        """Around an atomic; `looks` if it leaves the words as they are: a program that polls sleeps there.

        One that is `conditional` releases only if it changes a word.
        """

    def portions(self, lanes: np.ndarray) -> Sequence[np.ndarray]:
        """In which portions the lanes of an atomic store arrive."""
        ...

    def barrier(self) -> None:
        """At a block barrier."""

    def product(self) -> None:
        """At a `tl.dot`."""

    def failed_assert(self, message: str) -> None:
        """At a `tl.device_assert` that does not hold."""

    def failed_assumption(self) -> None:
        """At a `tl.assume` that does not hold."""


@dataclasses.dataclass(frozen=True)
class _Options(triton_interpreter.InterpreterOptions):
    # The counters of the device API may wrap around, and the checks of every sum would take most of the time.
    sanitize_overflow: bool = False
    debug: bool = True  # `tl.device_assert`


class Builder(triton_interpreter.InterpreterBuilder):
    """Triton's builder, with every access to memory reported to a machine."""

    def __init__(self, machine: Machine):
        super().__init__()
        self.options = _Options()
        self._machine = machine

    def create_get_program_id(self, axis: int) -> TensorHandle:
        return TensorHandle(np.array([self._machine.program_index[axis]], np.int32), tl.int32)

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        return self._machine.program_index

    @grid_idx.setter
    def grid_idx(self, _: object) -> None:
        pass

    @property
    def grid_dim(self) -> tuple[int, int, int]:
        return self._machine.grid

    def create_get_num_programs(self, axis: int) -> TensorHandle:
        return TensorHandle(np.array([self._machine.grid[axis]], np.int32), tl.int32)

    def create_load(self, ptr: TensorHandle, cache_policy: Any, is_volatile: bool) -> TensorHandle:
        self._machine.load(ptr.data.reshape(-1), _size(ptr), is_volatile)
        return _read(ptr, functions.ones(ptr.data.shape), None)

    def read_integer(self, ptr: TensorHandle, wide: bool) -> int:
        """A load of one i32 or i64."""
        self._machine.load(ptr.data, 8 if wide else 4, False)
        return (ctypes.c_int64 if wide else ctypes.c_int32).from_address(int(ptr.data[0])).value

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle, other: Any, cache_policy: Any, is_volatile: bool
    ) -> TensorHandle:
        addresses = _lanes(ptrs, mask)
        if addresses.size:
            self._machine.load(addresses, _size(ptrs), is_volatile)
        return _read(ptrs, mask.data, other)

    def create_store(self, ptr: TensorHandle, val: TensorHandle, cache_policy: Any) -> None:
        self._machine.store(ptr.data.reshape(-1), _size(ptr))
        memory.store(ptr.data, val.data, functions.ones(ptr.data.shape))

    def create_masked_store(self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, policy: Any) -> None:
        addresses = _lanes(ptrs, mask)
        if addresses.size:
            self._machine.store(addresses, _size(ptrs))
        memory.store(ptrs.data, value.data, mask.data)

    def create_atomic_rmw(
        self, operation: Any, ptr: TensorHandle, value: TensorHandle, mask: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        def act() -> TensorHandle:
            number = _AS_BITS.get(value.dtype.scalar.name)
            old = atomics.modify(operation, ptr, value, mask, number)
            if old is not None:
                return old
            return super(Builder, self).create_atomic_rmw(operation, ptr, value, mask, sem, scope)

        addresses = _lanes(ptr, mask)
        if not addresses.size:
            return act()
        looks = atomics.looks(operation, value, sem)
        return self._machine.atomic(addresses, _size(ptr), _SEMANTICS[sem], _SCOPES[scope], looks, act)

    def create_atomic_cas(
        self, ptr: TensorHandle, compare: TensorHandle, value: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        def act() -> TensorHandle:
            return super(Builder, self).create_atomic_cas(ptr, compare, value, sem, scope)

        atomics.check_widths(ptr, compare, value)
        looks = atomics.fails(ptr, compare, value)
        return self._machine.atomic(
            ptr.data.reshape(-1), _size(ptr), _SEMANTICS[sem], _SCOPES[scope], looks, act, conditional=True
        )

    def create_atomic_load(self, ptr: TensorHandle, mask: TensorHandle, sem: Any, scope: Any) -> TensorHandle:
        def act() -> TensorHandle:
            return super(Builder, self).create_masked_load(ptr, mask, None, None, True)

        addresses = _lanes(ptr, mask)
        if not addresses.size:
            return act()
        return self._machine.atomic(addresses, _size(ptr), _SEMANTICS[sem], _SCOPES[scope], True, act)

    def create_atomic_store(self, ptr: TensorHandle, value: TensorHandle, mask: TensorHandle, sem: Any, scope: Any):
        lanes = np.broadcast_to(mask.data, ptr.data.shape)
        for portion in self._machine.portions(lanes) if lanes.any() else ():
            arriving = TensorHandle(portion, tl.int1)
            act = functools.partial(super().create_masked_store, ptr, value, arriving, None)
            self._machine.atomic(_lanes(ptr, arriving), _size(ptr), _SEMANTICS[sem], _SCOPES[scope], False, act)

    def create_atomic_poll(
        self, ptr: TensorHandle, expected: TensorHandle, timeout_ns: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        # Without a bound in time: the simulation ends when nobody can go on.
        wanted = np.broadcast_to(expected.data, ptr.data.shape)
        for lane in np.ndindex(ptr.data.shape):
            one = TensorHandle(np.array([ptr.data[lane]]), ptr.dtype)
            mask = TensorHandle(np.ones(1, bool), tl.int1)
            while self.create_atomic_load(one, mask, sem, scope).data[0] != wanted[lane]:
                pass
        return TensorHandle(np.ones(ptr.data.shape, bool), tl.int1)

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, args: list, type_: Any, pure: bool
    ) -> TensorHandle:
        del library, path, pure
        return libdevice.call(symbol, args, type_)

    def create_assert(self, condition: TensorHandle, message: str) -> None:
        if not condition.data.all():
            self._machine.failed_assert(message)

    def create_assume(self, condition: TensorHandle) -> None:
        if not condition.data.all():
            self._machine.failed_assumption()

    def create_barrier(self) -> None:
        self._machine.barrier()

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: Any, imprecise: Any):
        self._machine.product()
        return super().create_dot(_widen(a), _widen(b), d, precision, imprecise)

    # Triton keeps bf16 and the types of 8 bits as integers, and neither rounds to nearest nor computes with them.

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        if dst_type.scalar.name in _AS_BITS:
            return _narrow(_widen(src).data, dst_type.scalar)
        return super().cast_impl(_widen(src), dst_type)

    create_si_to_fp = create_ui_to_fp = create_fp_to_si = create_fp_to_ui = cast_impl
    create_fp_ext = create_fp_trunc = cast_impl

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        if rounding_mode == ir.ROUNDING_MODE.RTZ:
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    def create_int_cast(self, src: TensorHandle, dst_type: Any, is_signed: bool) -> TensorHandle:
        return TensorHandle(src.data.astype(triton_interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable) -> TensorHandle:
        if _is_bits(lhs):
            out = op(_widen(lhs).data, _widen(rhs).data)
            return TensorHandle(out, tl.int1) if out.dtype == bool else _narrow(out, lhs.dtype.scalar)
        out = super().binary_op(lhs, rhs, op)
        # Triton leaves the type of what was compared on the result, and makes integers of it in a later splat.
        return TensorHandle(out.data, tl.int1) if out.data.dtype == bool else out

    def unary_op(self, arg: TensorHandle, op: Callable) -> TensorHandle:
        if _is_bits(arg):
            return _narrow(op(_widen(arg).data), arg.dtype.scalar)
        return super().unary_op(arg, op)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        out = super().create_fma(_widen(x), _widen(y), _widen(z))
        return _narrow(out.data, z.dtype.scalar) if _is_bits(z) else out

    def create_clampf(self, arg: TensorHandle, lo: TensorHandle, hi: TensorHandle, propagate_nans: Any) -> TensorHandle:
        out = super().create_clampf(_widen(arg), _widen(lo), _widen(hi), propagate_nans)
        return _narrow(out.data, arg.dtype.scalar) if _is_bits(arg) else out


def _read(ptrs: TensorHandle, lanes: np.ndarray, other: TensorHandle | None) -> TensorHandle:
    element = ptrs.get_element_ty()
    dtype = triton_interpreter._get_np_dtype(element)
    rest = functions.zeros(ptrs.data.shape, dtype.char) if other is None else other.data
    handle = object.__new__(TensorHandle)
    handle.data, handle.dtype, handle.attr = memory.load(ptrs.data, lanes, rest, dtype), element, {}
    return handle


def _size(ptrs: TensorHandle) -> int:
    return max(1, ptrs.get_element_ty().primitive_bitwidth // 8)


def _lanes(ptrs: TensorHandle, mask: TensorHandle) -> np.ndarray:
    if mask.data.all():
        return ptrs.data.reshape(-1)
    lanes = mask.data
    return ptrs.data[lanes if lanes.shape == ptrs.data.shape else np.broadcast_to(lanes, ptrs.data.shape)]


def _is_bits(handle: TensorHandle) -> bool:
    return handle.dtype.scalar.name in _AS_BITS


def _widen(handle: TensorHandle) -> TensorHandle:
    """What is kept as bits, as f32, which holds all of it."""
    dtype = _AS_BITS.get(handle.dtype.scalar.name)
    if dtype is None:
        return handle
    return TensorHandle(np.ascontiguousarray(handle.data).view(dtype).astype(np.float32), tl.float32)


def _narrow(data: np.ndarray, type_: Any) -> TensorHandle:
    """Numbers as the bits of a type. What is too large for 8 bits becomes the largest number, as on GPUs."""
    dtype = _AS_BITS[type_.name]
    if dtype.itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        data = np.clip(data, -largest, largest)
    return TensorHandle(np.asarray(data).astype(dtype).view(f"u{dtype.itemsize}"), type_)


def _reduction(slow: Callable) -> Callable:
    """`tl.reduce` or `tl.associative_scan`, also of what is kept as bits."""

    def call(operands: Any, *args: Any, **kwargs: Any) -> Any:
        many = isinstance(operands, tuple)
        types_ = [operand.dtype for operand in operands] if many else [operands.dtype]
        if not any(type_.name in _AS_BITS for type_ in types_):
            results = slow(operands, *args, **kwargs)
            return tuple(map(scalars.of, results)) if isinstance(results, tuple) else scalars.of(results)
        wide = tuple(
            operand.to(tl.float32) if type_.name in _AS_BITS else operand
            for operand, type_ in zip(operands if many else (operands,), types_)
        )
        results = slow(wide, *args, **kwargs)
        results = tuple(result.to(type_) for result, type_ in zip(results, types_))
        return results if many else results[0]

    return call


class Function(functools.partial):
    """A `triton.jit` function as Python, rewritten at its first call.

    A `partial` of no arguments: from then on Python calls what was rewritten without a frame in between.

    Attributes:
      fn: what Triton's reductions call.
    """

    __name__: str
    _kernel: JITFunction
    _hook: Callable[[Callable], Callable] | None

    def __new__(cls, kernel: JITFunction, hook: Callable[[Callable], Callable] | None = None) -> "Function":
        function: Function = super().__new__(cls, lambda *args, **kwargs: function.fn(*args, **kwargs))
        function._kernel, function._hook = kernel, hook
        function.__name__ = kernel.fn.__name__
        return function

    @functools.cached_property
    def fn(self) -> Callable:
        function = _Rewriter(self._kernel).rewrite_ast()
        function = self._hook(function) if self._hook else function
        partial: Any = self
        partial.__setstate__((function, (), {}, vars(self)))
        return function


class _Rewriter(triton_interpreter.FunctionRewriter):
    """Rewrites a function as Triton's interpreter does, but into globals of its own."""

    def __init__(self, kernel: JITFunction):
        super().__init__(kernel.fn)
        self._kernel = kernel

    def _get_jit_fn_file_line(self) -> tuple[str, int]:
        return self._kernel.file_name, self._kernel.def_file_line_number

    def _compile_and_exec(self, transformed_ast: Any) -> Callable:
        module = self.fn.__globals__
        names = {
            MARKER: module.get("__name__", ""),
            "interpreter_semantic": triton_interpreter.interpreter_semantic,
            "_InterpreterComparison": triton_interpreter._InterpreterComparison,
        }
        # With names of its own: a method of an aggregate does not hide the module's function that it is named after.
        own: dict[str, Any] = {}
        exec(compile(transformed_ast, self.filename, "exec"), _Globals(module, names), own)
        return own[self.fn.__name__]


class _Globals(dict):
    """A copy of a module's globals in which what only a compiler can call is interpreted."""

    def __init__(self, module: dict[str, Any], names: dict[str, Any]):
        # Python's own functions are a dictionary in most modules and a module in `__main__`.
        names = {"__builtins__": builtins} | names
        super().__init__({name: convert(value) for name, value in module.items() if name not in names} | names)


class _Module:
    """A module whose functions are interpreted."""

    def __init__(self, module: types.ModuleType):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = convert(getattr(self._module, name))
        setattr(self, name, value)
        return value


_functions: dict[int, Function] = {}  # by the id of the kernel, which they keep alive
_replaced: dict[int, tuple[Any, Callable]] = {}  # by the id of what they stand for, which is kept alive
_hooks: dict[tuple[str, str], Callable[[Callable], Callable]] = {}


def hook(module: str, name: str) -> Callable:
    """Registers a decorator for a function of a kernel module, applied when the function is interpreted."""

    def register(decorator: Callable[[Callable], Callable]) -> Callable:
        _hooks[module, name] = decorator
        return decorator

    return register


def replace(*originals: Any) -> Callable:
    """Registers what stands for functions of a language that cannot be called as they are."""

    def register(function: Callable) -> Callable:
        for original in originals:
            _replaced[id(original)] = original, function
        return function

    return register


def convert(value: Any) -> Any:
    """What stands for a value of a kernel's globals while it is interpreted."""
    if id(value) in _replaced:
        return _replaced[id(value)][1]
    if isinstance(value, JITFunction):
        # By identity: Triton compares functions by their source, and takes long to.
        if id(value) not in _functions:
            _functions[id(value)] = Function(value, _hooks.get((value.fn.__module__, value.fn.__name__)))
        return _functions[id(value)]
    if isinstance(value, types.ModuleType):
        if value.__name__.startswith("triton.language"):
            return value  # rebound in place, by `interpreting`
        return _module(value)
    if isinstance(value, tl.constexpr):
        return value.value  # of a global, which in Python is just a number
    if isinstance(value, ConstexprFunction):
        return _constant_function(value)
    if aggregates.is_one(value):
        return aggregates.convert(value, convert)
    if libdevice.is_one(value) and value.__name__ in libdevice.functions:
        return libdevice.functions[value.__name__]
    if tl.core.is_builtin(value):
        return functions.function(value)
    return value


def _constant_function(function: ConstexprFunction) -> Callable:
    """A function of constants, which an interpreted kernel has as numbers already."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or any(type(arg) is tl.constexpr or type(arg) is list or type(arg) is tuple for arg in args):
            return function(*args, **kwargs)
        return function.fn(*args)

    return call


@functools.cache
def _module(module: types.ModuleType) -> _Module:
    return _Module(module)


@contextlib.contextmanager
def interpreting(builder: Builder) -> Generator[None]:
    """Binds Triton's language to a builder. One thread at a time."""
    with language.rebound():
        semantic = triton_interpreter.interpreter_semantic
        before = semantic.builder
        scope = _bind()
        semantic.builder = builder
        try:
            # Addresses and counters wrap around as they do on a GPU, and NaN are numbers like others.
            with np.errstate(all="ignore"), warnings.catch_warnings(), _rare_collections():
                warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
                yield
        finally:
            semantic.builder = before
            scope.restore()


@contextlib.contextmanager
def _rare_collections() -> Generator[None]:
    """Lets Python look for cycles less often: a simulation makes many objects and hardly any cycles."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _YOUNG), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _bind() -> Any:
    def visible() -> None:
        """Stands for a kernel that sees both modules of the language."""

    visible = types.FunctionType(visible.__code__, {"tl": tl, "core": tl.core})
    slow, triton_interpreter._patch_attr = triton_interpreter._patch_attr, _bind_builtin
    try:
        scope = triton_interpreter._patch_lang(visible)
    finally:
        triton_interpreter._patch_attr = slow
    # What Triton itself has written in Triton.
    for module in (tl, tl.standard, tl.math):
        for name, member in inspect.getmembers(module, lambda member: isinstance(member, JITFunction)):
            scope.set_attr(module, name, convert(member))
    for name, member in inspect.getmembers(tl.tensor, lambda member: isinstance(member, JITFunction)):
        scope.set_attr(tl.tensor, name, _method(convert(member)))
    for name in ("reduce", "associative_scan"):
        reduction = _reduction(getattr(tl, name))
        for module in (tl, tl.core):
            scope.set_attr(module, name, reduction)
    arithmetic.bind(scope)
    libdevice.bind(scope)
    return scope


def _bind_builtin(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Like Triton's `_patch_attr`, without the layer that checks whether a compiler calls."""
    del builder
    scope.set_attr(owner, name, functions.function(member))


def _method(function: Function) -> Callable:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


_POINTEES = {
    "bool": tl.int1,
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
    "float8_e4m3fnuz": tl.float8e4b8,
    "float8_e5m2fnuz": tl.float8e5b16,
}


def pointer(address: int, dtype: np.dtype) -> Any:
    """A kernel's argument that points to an array."""
    pointee = _POINTEES.get(dtype.name) or getattr(tl, dtype.name, None)
    if pointee is None:
        raise TypeError(f"Triton has no type for arrays of {dtype}.")
    type_ = tl.pointer_type(pointee)
    return scalars.Scalar(address, type_)


def argument(value: Any) -> Any:
    """A kernel's argument that is not constexpr."""
    if isinstance(value, tuple):
        return tuple(argument(item) for item in value)
    return scalars.of(triton_interpreter._implicit_cvt(value))


def constants(kernel: triton.JITFunction) -> set[str]:
    """Names of the parameters that are constexpr."""
    return {parameter.name for parameter in kernel.params if parameter.is_constexpr}
