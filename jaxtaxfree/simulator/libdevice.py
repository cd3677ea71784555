"""CUDA's mathematical functions, `triton.language.extra.libdevice`, in NumPy: those that kernels take."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton.language import core
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import TensorHandle

_NUMPYS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos", "cosh", "exp",
    "exp2", "expm1", "fabs", "floor", "fmod", "hypot", "isinf", "isnan", "ldexp", "log", "log10", "log1p", "log2",
    "nextafter", "pow", "rint", "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
_FUNCTIONS: dict[str, Callable] = {
    **{name: getattr(np, name) for name in _NUMPYS},
    "abs": np.abs,
    "erf": np.vectorize(math.erf, otypes=[float]),
    "erfc": np.vectorize(math.erfc, otypes=[float]),
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "fma": lambda x, y, z: x.astype(np.float64) * y + z,
    "fdiv_rn": np.divide,
    "fdivide": np.divide,
    "finite": np.isfinite,
    "isfinite": np.isfinite,
    "llabs": np.abs,
    "nearbyint": np.rint,
    "powi": np.pow,
    "round": lambda x: np.copysign(np.floor(np.abs(x)) + (np.abs(x) % 1 >= 0.5), x),  # halves away from 0
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


def call(symbol: str, args: Sequence[TensorHandle], type_: Any) -> TensorHandle:
    """What a function of CUDA's library gives, by its name there, such as `__nv_tanhf`."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    of_f32_or_f64 = [name[:-1]] if name[-1] in "fd" else []
    name = next((name for name in (name, *of_f32_or_f64) if name in _FUNCTIONS), None)
    if name is None:
        raise NotImplementedError(f"the simulator has no {symbol} of libdevice")
    out = _FUNCTIONS[name](*(arg.data for arg in args))
    return TensorHandle(out.astype(triton_interpreter._get_np_dtype(type_)), type_.scalar)


def _interpreted(function: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs, _semantic=triton_interpreter.interpreter_semantic)

    return call


# What stands for the functions while a kernel is interpreted, by their names.
functions = {name: _interpreted(function) for name, function in inspect.getmembers(cuda_libdevice, core.is_builtin)}


def bind(scope: Any) -> None:
    """Puts them in the place of the functions, which only a compiler can call, until the scope is restored."""
    for name, function in functions.items():
        for module in (libdevice, cuda_libdevice):
            if hasattr(module, name):
                scope.set_attr(module, name, function)


def is_one(value: Any) -> bool:
    """Whether a global of a kernel is one of the functions, which was imported by itself."""
    return getattr(value, "__module__", None) in (libdevice.__name__, cuda_libdevice.__name__)
