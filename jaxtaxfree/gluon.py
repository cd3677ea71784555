"""Launches Gluon kernels, warp-specialised ones and TMA descriptors included.

Other kernels go through jax-triton, which compiles a Gluon kernel as if it were a Triton one and starts only the warps
of its first partition. This file stands beside it, on the same bindings of jaxlib.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import triton
from jax._src.lib import version as jaxlib_version
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from jaxtaxfree.kernels import shmem_gluon

OLDEST_COMPUTE_CAPABILITY = 90
CUSTOM_CALL_TARGET = "triton_kernel_call_ffi"  # of jaxlib, as jax-triton uses it


def check_support(name: str, compute_capability: int) -> None:
    """Whether Gluon kernels can be launched with the installed versions, on such a GPU.

    Raises:
      NotImplementedError: if they cannot.
    """
    if compute_capability < OLDEST_COMPUTE_CAPABILITY:
        raise NotImplementedError(
            f"{name} is a Gluon kernel, for NVIDIA GPUs of compute capability {OLDEST_COMPUTE_CAPABILITY / 10} and "
            f"higher, and this program is lowered for {compute_capability / 10}."
        )
    if triton.__version__.split(".")[:2] != ["3", "9"] or jaxlib_version[:2] != (0, 11):
        raise NotImplementedError(
            f"{name} is a Gluon kernel, and its launch is known for Triton 3.9 with jaxlib 0.11 only, not for "
            f"{triton.__version__} with {'.'.join(map(str, jaxlib_version))}."
        )


def gluon_call(
    *args: jax.Array,
    kernel: Any,
    out_type: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    name: str,
    num_warps: int,
    compute_capability: int,
    backend_options: Mapping[str, Any],
    descriptors: Mapping[str, Sequence[int]],
    cost_estimate: Mapping[str, int] | None,
    has_side_effect: bool,
    **named: Any,
) -> Sequence[jax.Array]:
    """Calls a Gluon kernel, as `jax_triton.triton_call` calls a Triton one.

    Args:
      *args, kernel, out_type, grid, name, num_warps, compute_capability, backend_options, cost_estimate,
        has_side_effect, **named: as there. The parameter `team` is a tuple whose first element is an array.
      descriptors: for each parameter that is to be a TMA descriptor the shape of a block.
    """
    arguments = _bind(kernel, [*args, *out_type], named)
    parameters = [parameter.name for parameter in kernel.params]
    signature: list[Any] = []
    constants: dict[tuple[int, ...], Any] = {(0,): kernel, (2,): parameters.index("team")}
    attributes = {}
    leaves = []  # what the compiled kernel takes: (value, type, shape of a block if it is a descriptor)
    for i, (parameter, value) in enumerate(zip(kernel.params, arguments)):
        if parameter.is_constexpr or value is None:
            signature.append("constexpr")
            constants[1, i] = value
            continue
        block = descriptors.get(parameter.name)
        signature.append(jax.tree.map(lambda leaf, block=block: _type(leaf, block), value))
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            leaves.append((leaf, _type(leaf, block), block))
            if _is_buffer(leaf) and not block:
                attributes[1, i, *(key.idx for key in path)] = [["tt.divisibility", 16]]
    types = {"KERNEL": "constexpr", "arguments": tuple(signature), "TEAM": "constexpr"}
    compiled = triton.compile(
        GluonASTSource(shmem_gluon.run, types, constants, attributes),
        target=GPUTarget("cuda", compute_capability, 32),
        options={"num_warps": num_warps, **backend_options},
    )

    operands = [leaf for leaf, _, _ in leaves if isinstance(leaf, jax.Array)]
    results = list(out_type)
    call_parameters = list(_parameters(name, leaves, compiled.metadata.tensordesc_meta))
    if scratch := compiled.metadata.global_scratch_size:
        # Triton's calling convention has this pointer behind the kernel's parameters. jaxlib would put memory there
        # that it allocates at each launch, which no command buffer can hold.
        results.append(jax.ShapeDtypeStruct((math.prod(grid) * scratch,), "uint8"))
        call_parameters.append(_bindings().create_array_parameter(0, compiled.metadata.global_scratch_align))
    launched = _bindings().TritonKernel(
        compiled.name,
        compiled.metadata.num_warps,  # of all partitions
        1,
        compiled.metadata.shared,
        compiled.asm["ptx"],
        "",
        compute_capability,
    )
    launch = _bindings().TritonKernelCall(launched, *(*grid, 1, 1)[:3], call_parameters)
    cost = {"cost_estimate_json": json.dumps(dict(cost_estimate))} if cost_estimate else {}
    call = jax.ffi.ffi_call(CUSTOM_CALL_TARGET, results, has_side_effect=has_side_effect)
    return call(*operands, opaque=zlib.compress(launch.to_proto(name, b"")), **cost)[: len(out_type)]


def _bindings() -> Any:
    from jax._src.lib import gpu_triton  # there only where JAX has support for GPUs

    return gpu_triton


def _bind(kernel: Any, buffers: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The value of each parameter of the kernel; operands and results as they are, or as shape and dtype."""
    left = iter(buffers)
    defaults = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default}
    values = {**defaults, **named}
    return [values[parameter.name] if parameter.name in values else next(left) for parameter in kernel.params]


def _is_buffer(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _type(leaf: Any, block: Sequence[int] | None) -> str:
    """Triton's name for the type of an argument."""
    if block:
        dtype = canonicalize_dtype(leaf.dtype)
        layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.dtype(dtype))
        return f"tensordesc<{dtype}[{','.join(map(str, block))}],{layout!r}>"
    if _is_buffer(leaf):
        return f"*{canonicalize_dtype(leaf.dtype)}"
    if isinstance(leaf, bool):
        return "u1"
    return "i32" if isinstance(leaf, int) else "fp32"


def _parameters(name: str, leaves: Sequence[tuple], descriptors: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """What a launch passes to the compiled kernel.

    Args:
      descriptors: what the compiler says of each descriptor.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    described = iter(descriptors)
    for leaf, type_, block in leaves:
        if block:
            description = next(described)
            strides = [math.prod(leaf.shape[i + 1 :]) for i in range(len(leaf.shape))]
            if any(stride * leaf.dtype.itemsize % 16 for stride in strides[:-1]):
                raise NotImplementedError(
                    f"{name} moves {leaf.dtype}{list(leaf.shape)} by TMA, which needs rows of a multiple of 16 bytes."
                )
            yield _bindings().create_tma_descriptor_parameter(
                elem_type=TMA_DTYPE_DEVICE_TO_HOST[description["elem_type"]],
                swizzle=description["swizzle"],
                shape=leaf.shape,
                strides=strides,
                block_shape=description["block_size"],
                oob_fill=0,
            )
            for size in leaf.shape:
                yield _bindings().create_scalar_parameter(size, "i32")
            for stride in strides:
                yield _bindings().create_scalar_parameter(stride, "i64")
        elif _is_buffer(leaf):
            yield _bindings().create_array_parameter(0, 16)
        else:
            yield _bindings().create_scalar_parameter(leaf, type_)
