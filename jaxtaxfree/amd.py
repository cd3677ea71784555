"""Launches of Triton kernels on AMD's GPUs: compiled here, because jax-triton 0.4.1 cannot with Triton 3.9.

Programs with such a launch were built, and never run: nobody had a GPU of AMD.
"""

import functools
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import triton
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jaxtaxfree.call import places_of, pointers_of
from jaxtaxfree.target import name_of

WAVE = 64  # threads
CUSTOM_CALL_TARGET = "triton_kernel_call_ffi"


def amd_call(
    *args: jax.Array | dict[str, jax.Array],
    kernel: Any,
    out_type: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    name: str,
    num_warps: int,
    num_stages: int,
    compute_capability: int,
    backend_options: Mapping[str, Any],
    cost_estimate: Mapping[str, int] | None,
    aliases: Sequence[tuple[int, int]],
    has_side_effect: bool,
    multiples: Sequence[str],
    **named: Any,
) -> Sequence[jax.Array]:
    """Calls a Triton kernel on a GPU of AMD, with the arguments of `jax_triton.triton_call`.

    Args:
      *args: operands; arrays by their names are one parameter, a tuple.
      compute_capability: 0x942 for gfx942.
      aliases: (number of an operand, number of the result that it becomes).
      multiples: the parameters whose numbers 16 divides.
      **named: the kernel's other parameters; `team` is a tuple whose first element is an array.
    """
    pointers = pointers_of(kernel, named)
    buffers = dict(zip(pointers, (*args, *out_type)))
    source, flat = _source(kernel, {**named, **buffers}, multiples)
    compiled = triton.compile(
        source,
        target=GPUTarget("hip", name_of(compute_capability), WAVE),
        options={"num_warps": num_warps, "num_stages": num_stages, **backend_options},
    )
    bindings = _bindings()
    parameters = [
        bindings.create_scalar_parameter(value, type_)
        if not hasattr(value, "dtype")
        else bindings.create_array_parameter(0, 16)
        for value, type_ in flat
    ]
    launched = bindings.TritonKernel(
        compiled.name, num_warps, 1, compiled.metadata.shared, _file_of(compiled.asm["hsaco"]), "", 0
    )
    launch = bindings.TritonKernelCall(launched, *(*grid, 1, 1)[:3], parameters)
    cost = {"cost_estimate_json": json.dumps(dict(cost_estimate))} if cost_estimate else {}
    operands = [value for value, _ in flat if isinstance(value, jax.Array)]
    places = places_of(kernel, args, named)
    call = jax.ffi.ffi_call(
        CUSTOM_CALL_TARGET,
        list(out_type),
        has_side_effect=has_side_effect,
        input_output_aliases={places[operand]: result for operand, result in aliases},
    )
    return call(*operands, opaque=zlib.compress(launch.to_proto(name, b"")), **cost)


def _source(
    kernel: Any, values: Mapping[str, Any], multiples: Sequence[str]
) -> tuple[ASTSource, list[tuple[Any, str]]]:
    """What to compile, and what the compiled kernel takes: values with their types."""
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    flat: list[tuple[Any, str]] = []
    for i, parameter in enumerate(kernel.params):
        default = parameter.default if parameter.has_default else None
        value = values.get(parameter.name, default)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        value = tuple(value.values()) if isinstance(value, dict) else value
        own = [(part, _type_of(part)) for part in (value if isinstance(value, tuple) else (value,))]
        signature[parameter.name] = tuple(type_ for _, type_ in own) if isinstance(value, tuple) else own[0][1]
        for place, (_, type_) in enumerate(own):
            if type_.startswith("*") or parameter.name in multiples:
                attributes[(i, place) if isinstance(value, tuple) else (i,)] = [["tt.divisibility", 16]]
        flat += own
    return ASTSource(kernel, signature, constants, attributes), flat


def _type_of(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"*{canonicalize_dtype(value.dtype)}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="jaxtaxfree-")


def _file_of(code: bytes) -> str:
    """A file that holds a kernel's code as long as this process lives: jaxlib takes its name."""
    path = os.path.join(_folder().name, hashlib.sha256(code).hexdigest()[:32])
    if not os.path.exists(path):
        with open(path, "wb") as file:
            file.write(code)
    return path


def _bindings() -> Any:
    from jax._src.lib import gpu_triton  # there only where JAX has support for GPUs

    return gpu_triton
