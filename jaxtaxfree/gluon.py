"""Launches Gluon kernels, warp-specialised ones and TMA descriptors included.

Other kernels go through jax-triton, which compiles a Gluon kernel as if it were a Triton one and starts only the warps
of its first partition. This file stands beside it, on the same bindings of jaxlib.
"""

import atexit
import contextlib
import io
import json
import math
import sys
import threading
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import triton
from jax._src.lib import version as jaxlib_version
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from jaxtaxfree.call import Descriptor, block_of, described_as, is_alone, members, places_of, runs_once
from jaxtaxfree.kernels import shmem_gluon
from jaxtaxfree.target import is_amd, name_of

OLDEST_COMPUTE_CAPABILITY = 90
CUSTOM_CALL_TARGET = "triton_kernel_call_ffi"  # of jaxlib, as jax-triton uses it


@atexit.register
def _let_go_of_triton() -> None:
    """Lets Python take Triton's Gluon apart when the process ends, of which nanobind reports each remaining piece.

    Triton's C++ keeps the classes of layouts for ever once it has compiled a Gluon kernel, and through the globals of
    their methods all else that Gluon is made of. Python empties the globals of a module at the end only if the module
    is still there: so each holds itself.
    """
    for name, module in list(sys.modules.items()):
        if f"{name}.".startswith(f"{gl.__name__}."):
            vars(module)["_itself"] = module


def unsupported(name: str, compute_capability: int) -> str | None:
    """Why Gluon kernels cannot be launched with the installed versions or on such a GPU; None if they can."""
    if compute_capability < OLDEST_COMPUTE_CAPABILITY or is_amd(compute_capability):
        return (
            f"{name} is a Gluon kernel, for NVIDIA GPUs of compute capability {OLDEST_COMPUTE_CAPABILITY / 10} and "
            f"higher, and this program is lowered for {name_of(compute_capability)}."
        )
    if triton.__version__.split(".")[:2] != ["3", "9"] or jaxlib_version[:2] not in ((0, 11), (0, 12)):
        return (
            f"{name} is a Gluon kernel, and its launch is known for Triton 3.9 with jaxlib 0.11 or 0.12, not for "
            f"{triton.__version__} with {'.'.join(map(str, jaxlib_version))}."
        )
    return None


def gluon_call(
    *args: jax.Array | dict[str, jax.Array],
    kernel: Any,
    out_type: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    name: str,
    num_warps: int,
    compute_capability: int,
    backend_options: Mapping[str, Any],
    descriptors: Mapping[str, Descriptor],
    cost_estimate: Mapping[str, int] | None,
    aliases: Sequence[tuple[int, int]],
    has_side_effect: bool,
    multiples: Sequence[str],
    **named: Any,
) -> Sequence[jax.Array]:
    """Calls a Gluon kernel, as `jax_triton.triton_call` calls a Triton one.

    Args:
      *args, kernel, out_type, grid, name, num_warps, compute_capability, backend_options, cost_estimate,
        has_side_effect, **named: as there. The parameter `team` is a tuple whose first element is an array. Arrays by
        their names are one parameter, a tuple.
      descriptors: for each parameter that is to be a TMA descriptor what `call.block_of` takes; see `call.members`.
      aliases: (number of an operand, number of the result that it becomes).
      multiples: the parameters whose numbers 16 divides.
    """
    source, arguments = _source(kernel, [*args, *out_type], named, descriptors, multiples)
    with _not_assembled():
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", compute_capability, 32),
            options={"num_warps": num_warps, **backend_options},
        )
    operands = [argument.value for argument in arguments if isinstance(argument.value, jax.Array)]
    results = list(out_type)
    parameters = list(_parameters(name, arguments, compiled.metadata.tensordesc_meta))
    if scratch := compiled.metadata.global_scratch_size:
        # For descriptors that the kernel makes itself. Triton's calling convention has this pointer behind the
        # kernel's parameters. jaxlib would allocate memory for it at each launch, which no CUDA graph can hold.
        results.append(jax.ShapeDtypeStruct((math.prod(grid) * scratch,), "uint8"))
        parameters.append(_bindings().create_array_parameter(0, compiled.metadata.global_scratch_align))
    launched = _bindings().TritonKernel(
        compiled.name,
        compiled.metadata.num_warps,  # of all partitions
        1,
        compiled.metadata.shared,
        compiled.asm["ptx"],
        "",
        compute_capability,
    )
    launch = _bindings().TritonKernelCall(launched, *(*grid, 1, 1)[:3], parameters)
    cost = {"cost_estimate_json": json.dumps(dict(cost_estimate))} if cost_estimate else {}
    places = places_of(kernel, args, named)
    call = jax.ffi.ffi_call(
        CUSTOM_CALL_TARGET,
        results,
        has_side_effect=has_side_effect,
        input_output_aliases={places[operand]: result for operand, result in aliases},
    )
    operands = runs_once(operands, results, has_side_effect)
    return call(*operands, opaque=zlib.compress(launch.to_proto(name, b"")), **cost)[: len(out_type)]


_compiles = threading.local()  # `here` is set in a thread that compiles for a launch
_lock = threading.Lock()  # of what follows
_users = 0  # threads that compile with it
_before: Any = None  # the hook of somebody else


@contextlib.contextmanager
def _not_assembled() -> Generator[None]:
    """Triton compiles to PTX and no further: jaxlib takes that, and assembles it for the GPU that it finds.

    Triton would run `ptxas`, 0.1 to 1 s a kernel. Its hook is one for all threads: the first that compiles puts ours
    in its place, and the last takes it out. What other threads compile meanwhile stays whole.
    """
    global _users, _before
    knobs = triton.knobs.runtime
    with _lock:
        if not _users:
            _before, knobs.add_stages_inspection_hook = knobs.add_stages_inspection_hook, _inspect
        _users += 1
    _compiles.here = True
    try:
        yield
    finally:
        _compiles.here = False
        with _lock:
            _users -= 1
            if not _users:
                knobs.add_stages_inspection_hook = _before


def _inspect(*of: Any) -> Any:
    """Triton asks without arguments what the hook changes, for its keys, and then with the stages."""
    answer = _before(*of) if _before else None
    here = getattr(_compiles, "here", False)
    if of and here:
        of[1]["cubin"] = lambda ptx, metadata: b""
    if not of:
        key, digest = answer or ("", "")
        return (f"{key}-not-assembled", f"{digest}-not-assembled") if here else (key, digest)
    return answer


def shared_memory(opaque: bytes) -> int:
    """Bytes of shared memory of a block of a kernel, from what jaxlib launches it by: a TritonAnyKernelCall."""
    kernel = _field(_field(zlib.decompress(opaque), 1), 1)
    return _field(kernel, 3)


def _field(message: bytes, number: int) -> Any:
    """The first field of this number in an encoded protocol buffer of numbers and bytes; 0 if there is none."""
    stream = io.BytesIO(message)

    def varint() -> int:
        byte = stream.read(1)[0]
        return byte & 127 | (varint() << 7 if byte >> 7 else 0)

    while stream.tell() < len(message):
        found, kind = divmod(varint(), 8)
        if kind not in (0, 2):
            return 0  # of another kind, which nothing here has
        value = varint()
        value = stream.read(value) if kind == 2 else value
        if found == number:
            return value
    return 0


def _bindings() -> Any:
    from jax._src.lib import gpu_triton  # there only where JAX has support for GPUs

    return gpu_triton


class _Argument(NamedTuple):
    """What a launch passes to the kernel: an operand, a result, or a number.

    Attributes:
      value: results are shape and dtype.
      type: as Triton calls it.
      block: the shape of a block, if it is passed as a descriptor.
      shape: that in which the descriptor reads it.
    """

    value: Any
    type: str
    block: Sequence[int] | None
    shape: Sequence[int] = ()

    @classmethod
    def of(cls, value: Any, described: Descriptor | None) -> "_Argument":
        if isinstance(value, bool):
            return cls(value, "i1", None)
        if isinstance(value, int):
            return cls(value, "i32" if -(2**31) <= value < 2**31 else "i64", None)
        if isinstance(value, float):
            return cls(value, "fp32", None)
        dtype = canonicalize_dtype(value.dtype)
        if not described:
            return cls(value, f"*{dtype}", None)
        block, shape = block_of(described, value.shape)
        # `gl.dtype` knows integers by other names.
        known = dtype.replace("i", "int") if dtype.startswith("i") else dtype
        layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.dtype(known))
        return cls(value, f"tensordesc<{dtype}[{','.join(map(str, block))}],{layout!r}>", block, shape)


def _source(
    kernel: Any,
    buffers: Sequence[Any],
    named: Mapping[str, Any],
    descriptors: Mapping[str, Descriptor],
    multiples: Sequence[str],
) -> tuple[GluonASTSource, list[_Argument]]:
    """What to compile for a kernel and these operands and results, and what the compiled kernel takes."""
    names = [parameter.name for parameter in kernel.params]
    types: list[Any] = []
    constants: dict[tuple[int, ...], Any] = {(0,): kernel, (2,): None if is_alone(kernel) else names.index("team")}
    attributes = {}
    arguments = []
    left = iter(buffers)
    for i, parameter in enumerate(kernel.params):
        default = parameter.default if parameter.has_default else None
        is_buffer = parameter.name not in named and not parameter.has_default
        value = next(left) if is_buffer else named.get(parameter.name, default)
        if parameter.is_constexpr or value is None:
            types.append("constexpr")
            constants[1, i] = value
            continue
        parts = (
            [(parameter.name, part) for part in value] if isinstance(value, tuple) else members(parameter.name, value)
        )
        own = [_Argument.of(part, descriptors.get(name)) for name, part in parts]
        is_tuple = isinstance(value, tuple | dict)
        types.append(tuple(argument.type for argument in own) if is_tuple else own[0].type)
        for place, argument in enumerate(own):
            if argument.type.startswith("*") or parameter.name in multiples:
                attributes[(1, i, place) if is_tuple else (1, i)] = [["tt.divisibility", 16]]
        arguments += own
    signature = {"KERNEL": "constexpr", "arguments": tuple(types), "TEAM": "constexpr"}
    return GluonASTSource(shmem_gluon.run, signature, constants, attributes), arguments


def _parameters(name: str, arguments: Sequence[_Argument], descriptors: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """The arguments in jaxlib's words.

    Args:
      descriptors: what the compiler says of each descriptor.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    described = iter(descriptors)
    for value, type_, block, read in arguments:
        if block:
            description = next(described)
            shape, strides = described_as(read, block)
            if any(stride * value.dtype.itemsize % 16 for stride in strides[:-1]):
                raise NotImplementedError(
                    f"{name} moves {value.dtype}{list(read)} by TMA, which needs rows of a multiple of 16 bytes."
                )
            yield _bindings().create_tma_descriptor_parameter(
                elem_type=TMA_DTYPE_DEVICE_TO_HOST[description["elem_type"]],
                swizzle=description["swizzle"],
                shape=shape,
                strides=strides,
                block_shape=description["block_size"],
                oob_fill=0,
            )
            for size in shape:
                yield _bindings().create_scalar_parameter(size, "i32")
            for stride in strides:
                yield _bindings().create_scalar_parameter(stride, "i64")
        elif type_.startswith("*"):
            yield _bindings().create_array_parameter(0, 16)
        else:
            yield _bindings().create_scalar_parameter(value, type_)
