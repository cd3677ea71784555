"""`psum`, `all_gather` and `psum_scatter`: `lax`'s collectives for small arrays, where latency is all that counts."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from triton import next_power_of_2

from jaxtaxfree.dispatch import Case
from jaxtaxfree.kernels.collectives import all_gather_kernel, psum_kernel, psum_scatter_kernel
from jaxtaxfree.ops.matmul import UNMEASURED
from jaxtaxfree.primitive import (
    Unsupported,
    check_implementation,
    check_whole,
    linear,
    settings_of,
    symbolic,
    takes_reference,
)
from jaxtaxfree.settings import Settings, setting
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.teams import Team, check_axes, vary

# Of all ranks, that a program can wait for at a time.
MOST_MESSAGES = 8192
# Of all ranks, so that indices of words have 32 bits.
MOST_ELEMENTS = 2**28
# Bytes of a rank: of more than the first number, and of no more than the second, a gather takes words.
GATHERED_AS_WORDS = (32 << 10, 2 << 20)
DTYPES = ("float32", "bfloat16", "float16", "int32", "int16", "int8", "uint32", "uint16", "uint8")


def psum(
    x: Any,
    axis_name: str | Sequence[str],
    *,
    implementation: str | None = None,
    config: "Config | Mapping[str, Any] | None" = None,
) -> Any:
    """`lax.psum(x, axis_name)`, as one kernel for each array on GPUs.

    Args:
      x: pytree of this rank's arrays, of any shape.
      axis_name: the mesh axis, or axes, to sum along.
      implementation: "fused": the kernel; "xla": plain `lax`; None: whichever is faster as far as it was measured.
        "simulate": the kernel, run for all ranks on the CPU; see `jaxtaxfree.simulator`.
      config: how the kernel splits its work; what it does not say is chosen by size.

    Returns: the sums, the same bits on every rank. The kernel adds up in f32, in the order of the ranks, and rounds
      once; integers wrap around.

    Raises:
      ValueError: if there is no such implementation or setting.
      TypeError: if the axis or `config` is of another kind.
      NameError: if `axis_name` is not bound, because the call is not inside `jax.shard_map`.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here, with all reasons.
    """
    axes = check_axes(axis_name, "psum")

    def sum_of(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return lax.psum(leaf, axes)  # of a constant it is a product
        leaf = leaf.astype(jnp.int32) if leaf.dtype == bool else leaf
        return _apply(psum_p, leaf, axes, implementation, config)

    return jax.tree.map(sum_of, x)


def all_gather(
    x: Any,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    tiled: bool = False,
    implementation: str | None = None,
    config: "Config | Mapping[str, Any] | None" = None,
) -> Any:
    """`lax.all_gather(x, axis_name, axis=axis, tiled=tiled)`, as one kernel for each array on GPUs.

    Args:
      x: pytree of this rank's arrays [..., M, ...].
      axis: where the new dimension stands; if tiled, the dimension along which the arrays are concatenated.
      The others are those of `psum`.

    Returns: [..., world, M, ...], or [..., world * M, ...] if tiled: bit for bit what the ranks have.

    Raises: what `psum` raises, and
      ValueError: if there is no such dimension, or arrays are to be concatenated along one of size 0.
      TypeError: if `axis` is no whole number.
    """
    axes = check_axes(axis_name, "all_gather")

    def gather(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        dimension = _dimension("all_gather", "axis", axis, leaf.ndim + (not tiled))
        if tiled and not leaf.shape[dimension]:
            raise ValueError(f"all_gather cannot concatenate dimension {dimension} of {list(leaf.shape)}, which is 0.")
        if leaf.dtype == bool:
            return gather(leaf.astype(jnp.uint8)).astype(bool)
        return _apply(all_gather_p, leaf, axes, implementation, config, dimension=dimension, tiled=tiled)

    return jax.tree.map(gather, x)


def psum_scatter(
    x: Any,
    axis_name: str | Sequence[str],
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    implementation: str | None = None,
    config: "Config | Mapping[str, Any] | None" = None,
) -> Any:
    """`lax.psum_scatter(x, axis_name, scatter_dimension=scatter_dimension, tiled=tiled)`, as one kernel for each array.

    Args:
      x: pytree of this rank's arrays [..., world, ...], or [..., world * M, ...] if tiled.
      scatter_dimension: the dimension whose parts go to the ranks.
      The others are those of `psum`.

    Returns: this rank's part of the sum, [...], or [..., M, ...] if tiled; computed as by `psum`.

    Raises: what `psum` raises, and
      ValueError: if there is no such dimension, it is 0, or the ranks do not divide it.
      TypeError: if `scatter_dimension` is no whole number.
    """
    axes = check_axes(axis_name, "psum_scatter")
    world = lax.axis_size(axes)

    def scatter(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        dimension = _dimension("psum_scatter", "scatter_dimension", scatter_dimension, leaf.ndim)
        size = leaf.shape[dimension]
        if size % world or not size if tiled else size != world:
            wanted = f"a {'' if size else 'positive '}multiple of {world}" if tiled else world
            raise ValueError(
                f"psum_scatter cannot scatter dimension {dimension} of {list(leaf.shape)} over {world} ranks: with "
                f"tiled={tiled}, {size} is not {wanted}."
            )
        return _apply(psum_scatter_p, leaf, axes, implementation, config, dimension=dimension, tiled=tiled)

    return jax.tree.map(scatter, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """How a kernel splits its work.

    Attributes:
      protocol: "messages": elements travel in words that say by themselves whether they have arrived, which is twice
        the bytes without a fence; "words": the same at half the bytes, of sums of floats, and of gathers of elements of
        16 and 32 bits, in which words of ones alone (-1, NaN) take longer; "signals": as they are, and a signal after
        them.
      shots: of `psum`: 1, and every rank adds up everything; or 2, and each adds up its share, of which the ranks then
        gather the sums.
      block: elements that a program takes, of each rank's part: a power of 2.
      num_warps: warps of a program.
    """

    protocol: str = "messages"
    shots: int = setting(1, least=1, most=2)
    block: int = setting(256, least=16, most=1 << 14, power_of_2=True)
    num_warps: int = setting(2, least=1, most=16, power_of_2=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protocol not in ("messages", "words", "signals"):
            raise ValueError(f"There is no protocol {self.protocol!r}: choose 'messages', 'words' or 'signals'.")


def default_config(operation: str, size: int, world: int, dtype: Any) -> Config:
    """A configuration by size.

    Args:
      operation: "psum", "all_gather" or "psum_scatter".
      size: elements of x of `psum`; of a rank's part of the others.
      world: number of ranks.
      dtype: of the elements.
    """
    itemsize = np.dtype(dtype).itemsize
    shots = 2 if operation == "psum" and world > 2 and size * itemsize > 64 << 10 else 1
    longest = _longest_block(world, dtype)
    part = size * itemsize // (world if shots == 2 else 1)
    # Each thread has one access of 16 bytes. In the gather fewer of them wait for each other.
    if operation == "all_gather":
        by_words = itemsize > 1 and GATHERED_AS_WORDS[0] < part <= GATHERED_AS_WORDS[1]
        num_warps = 1 if part <= 256 << 10 else 4
    else:
        by_words = jnp.issubdtype(dtype, jnp.floating)
        num_warps = 1 if part <= 64 << 10 else 4 if part <= 512 << 10 else 8
    if by_words and (block := 512 * num_warps // itemsize) <= longest:
        return Config(protocol="words", shots=shots, block=block, num_warps=num_warps)
    if size * itemsize > (512 << 10 if shots == 2 else 128 << 10):
        # Two accesses of 16 bytes for each thread and rank.
        return Config(protocol="signals", shots=shots, block=8192 // itemsize, num_warps=8)
    messages = part * _words(dtype) // itemsize
    num_warps = 1 if messages <= 8192 else 2 if messages <= 32768 else 4
    block = min(128 * num_warps // _words(dtype), longest)
    return Config(protocol="messages", shots=shots, block=block, num_warps=num_warps)


def _longest_block(world: int, dtype: Any) -> int:
    """Elements that a program can receive as messages."""
    return MOST_MESSAGES // (_words(dtype) * next_power_of_2(world))


def _words(dtype: Any) -> int:
    """Messages of an element, which carry 16 bits each."""
    return max(1, np.dtype(dtype).itemsize // 2)


def _psum(x: jax.Array, *, axes: tuple[str, ...], config: Any = None) -> jax.Array:
    del config
    return lax.psum(x, axes)


def _all_gather(x: jax.Array, *, axes: tuple[str, ...], dimension: int, tiled: bool, config: Any = None) -> jax.Array:
    del config
    # lax does not lower a gather of symbolic shapes along a new dimension, nor a scatter that removes one.
    x = x if tiled else lax.expand_dims(x, [dimension])
    return lax.all_gather(x, axes, axis=dimension, tiled=True)


def _psum_scatter(x: jax.Array, *, axes: tuple[str, ...], dimension: int, tiled: bool, config: Any = None) -> jax.Array:
    del config
    out = lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    return out if tiled else lax.squeeze(out, [dimension])


def _fused_psum(x: jax.Array, *, axes: tuple[str, ...], config: Config | None, **how: Any) -> jax.Array:
    world = lax.axis_size(axes)
    _check("psum", x, world)
    keywords = launch("psum", x.size, 1, world=world, dtype=x.dtype, config=config)
    return _call(psum_kernel, x, axes, keywords, x.shape, **how)


def _fused_all_gather(
    x: jax.Array, *, axes: tuple[str, ...], dimension: int, tiled: bool, config: Config | None, **how: Any
) -> jax.Array:
    world = lax.axis_size(axes)
    _check("all_gather", x, world)
    outer = math.prod(x.shape[:dimension])
    keywords = launch("all_gather", x.size, outer, world=world, dtype=x.dtype, config=config)
    if tiled:
        shape = (*x.shape[:dimension], world * x.shape[dimension], *x.shape[dimension + 1 :])
    else:
        shape = (*x.shape[:dimension], world, *x.shape[dimension:])
    return _call(all_gather_kernel, x, axes, keywords, shape, **how)


def _fused_psum_scatter(
    x: jax.Array, *, axes: tuple[str, ...], dimension: int, tiled: bool, config: Config | None, **how: Any
) -> jax.Array:
    world = lax.axis_size(axes)
    _check("psum_scatter", x, world)
    outer = math.prod(x.shape[:dimension])
    keywords = launch("psum_scatter", x.size // world, outer, world=world, dtype=x.dtype, config=config)
    own = (x.shape[dimension] // world,) if tiled else ()
    shape = (*x.shape[:dimension], *own, *x.shape[dimension + 1 :])
    return _call(psum_scatter_kernel, x, axes, keywords, shape, **how)


def _call(
    kernel: Any,
    x: jax.Array,
    axes: tuple[str, ...],
    keywords: dict[str, Any],
    shape: tuple[int, ...],
    *,
    compute_capability: int,
    implementation: str | None = None,
) -> jax.Array:
    """The kernel on the elements of x in their order."""
    del compute_capability
    out = shmem_call(kernel, x.reshape(-1), axis_name=axes, implementation=implementation, **keywords)
    return out.reshape(shape)


def launch(
    operation: str, size: int, outer: int, *, world: int, dtype: Any, config: Config | None = None
) -> dict[str, Any]:
    """The keywords with which `shmem_call` launches the kernel of an operation.

    Args:
      operation: "psum", "all_gather" or "psum_scatter".
      size: elements of x of `psum`; of a rank's part of the others.
      outer: how many pieces a rank's part lies in, in the whole array.
      world: number of ranks.
      dtype: of the elements.
      config: None chooses by size.
    """
    dtype = np.dtype(dtype)
    config = config or default_config(operation, size, world, dtype)
    dense, two_shots = config.protocol == "signals", operation == "psum" and config.shots == 2
    gathers = operation == "all_gather"
    if config.protocol == "words" and not (dtype.itemsize > 1 if gathers else jnp.issubdtype(dtype, np.floating)):
        raise ValueError(
            "Words carry sums of floats, and gathers of elements of 16 and 32 bits; "
            f"{operation} of {dtype} takes the protocol 'messages' or 'signals'."
        )
    # What begins at a multiple of 16 elements can be moved by 16 bytes at a time.
    part = math.ceil(size / (16 * world)) * 16 if two_shots else size
    programs = math.ceil(part / config.block)
    inbox = (world, programs, config.block)
    inboxes: dict[str, tuple[int, ...]] = {"parts": inbox}
    if operation == "psum":
        inboxes["sums"] = inbox if two_shots else (0,)
        total, own = size, {"TWO_SHOT": two_shots}
    else:
        total, own = world * size, {"INNER": size // outer}
    if gathers:
        inboxes["doubts"] = inbox if config.protocol == "words" else (0,)
    if config.protocol == "signals":
        buffers = {"scratch": {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in inboxes.items()}}
    elif config.block > (most := _longest_block(world, dtype)):
        raise ValueError(f"{operation} over {world} ranks takes blocks of at most {most} of {dtype} as messages.")
    elif config.protocol == "words":
        sizes = {name: math.prod(shape) * dtype.itemsize // 4 for name, shape in inboxes.items()}
        buffers = {"messages": {name: jax.ShapeDtypeStruct((size,), np.int32) for name, size in sizes.items()}}
    else:
        buffers = {"messages": {name: (*shape, _words(dtype)) for name, shape in inboxes.items()}}
    return {
        "out_type": jax.ShapeDtypeStruct((total if gathers else size,), dtype),
        "grid": programs,
        **buffers,
        "signals": {"arrived": (1 + two_shots, programs, world) if dense else 0},
        "name": operation,
        "num_warps": config.num_warps,
        "cost_estimate": {
            "flops": 0 if gathers else (world - 1) * size,
            "bytes_accessed": 2 * world * size * dtype.itemsize,
        },
        "SIZE": total,
        "PART": part,
        "BLOCK": config.block,
        "PROTOCOL": config.protocol,
        **own,
    }


def _dimension(operation: str, name: str, dimension: int, dimensions: int) -> int:
    """The keyword `name`, a dimension, counted from 0; raises ValueError if there is none such."""
    dimension = check_whole(operation, name, dimension)
    if not -dimensions <= dimension < dimensions:
        raise ValueError(f"{operation} cannot take dimension {dimension} of {dimensions}.")
    return dimension % dimensions


def _apply(
    primitive: Any, x: jax.Array, axes: tuple[str, ...], implementation: str | None, config: Any, **params: Any
) -> jax.Array:
    check_implementation(implementation)
    world = lax.axis_size(axes)
    settings = dict(settings_of(primitive.name, Config, config))
    reasons = _unsupported(primitive.name, x, world)
    if takes_reference(primitive.name, [x], implementation, reasons):
        return _REFERENCES[primitive](x, axes=axes, **params)
    if settings:
        chosen = default_config(primitive.name, _elements(primitive.name, x, world), world, x.dtype)
        config = dataclasses.replace(chosen, **settings)
    return primitive.bind(vary(x, axes), axes=axes, implementation=implementation, config=config or None, **params)


def _elements(operation: str, x: Any, world: int) -> int:
    """Of x of `psum`; of a rank's part of the others."""
    return x.size // world if operation == "psum_scatter" else x.size


def _unsupported(operation: str, x: Any, world: int) -> list[str]:
    """All that keeps the kernel from taking x."""
    if reasons := symbolic(x):
        return reasons
    if x.dtype.name not in DTYPES:
        reasons.append(f"it takes {', '.join(DTYPES)}, not {x.dtype}")
    if unreduced := sorted(jax.typeof(x).mat.unreduced):
        reasons.append(f"it takes values of a rank, not terms of a sum that is unreduced along {unreduced}")
    if x.size == 0:
        reasons.append(f"the operand is empty: {list(x.shape)}")
    if (elements := world * _elements(operation, x, world)) > MOST_ELEMENTS:
        reasons.append(f"it takes at most {MOST_ELEMENTS} elements of all ranks, not {elements}")
    return reasons


def _check(operation: str, x: Any, world: int) -> None:
    if reasons := _unsupported(operation, x, world):
        raise Unsupported(operation, reasons)


# The most bytes for which implementation=None takes the kernel: of a rank's operand, of psum_scatter of its result.
FASTER_UP_TO = {"psum": 4 << 20, "all_gather": 4 << 20, "psum_scatter": 1 << 20}


def _slower(operation: str) -> Callable[..., str | None]:
    def why(x: Any, *, axes: tuple[str, ...], **_: Any) -> str | None:
        """Why XLA is taken."""
        world = lax.axis_size(axes)
        if world == 1:
            return "there is one rank, so nothing to send"
        most = FASTER_UP_TO[operation]
        if _elements(operation, x, world) * x.dtype.itemsize > most:
            return f"XLA is faster for more than {most} bytes of a rank" if most else UNMEASURED
        return None

    return why


def case(operation: str, x: Any, *, team: Team, **_: Any) -> Case:
    """What the tables know a call by."""
    return Case(
        operation=operation,
        device_kind=team.device_kind,
        same={"world": team.world, "dtype": x.dtype.name},
        along="size",
        size=_elements(operation, x, team.world),
        default=lambda size: default_config(operation, size, team.world, x.dtype),
        take=lambda settings: Config(**settings),
    )


def _transpose_psum(ct: Any, x: Any, *, axes: tuple[str, ...], **params: Any) -> jax.Array:
    if set(axes) <= x.aval.mat.varying:
        return vary(ct, axes)  # with types that say so, the sum is the same everywhere, and so is its cotangent
    return psum_p.bind(ct, axes=axes, **params)


def _transpose_all_gather(ct: Any, _: Any, **params: Any) -> jax.Array:
    return psum_scatter_p.bind(ct, **params | {"config": None})


def _transpose_psum_scatter(ct: Any, _: Any, **params: Any) -> jax.Array:
    return all_gather_p.bind(ct, **params | {"config": None})


def _batch_psum(dim: int, **_: Any) -> tuple[int, dict[str, Any]]:
    return dim, {}


def _batch_all_gather(dim: int, *, dimension: int, tiled: bool, **_: Any) -> tuple[int, dict[str, Any]]:
    if dim <= dimension:
        return dim, {"dimension": dimension + 1}
    return dim + (not tiled), {}


def _batch_psum_scatter(dim: int, *, dimension: int, tiled: bool, **_: Any) -> tuple[int, dict[str, Any]]:
    if dim <= dimension:
        return dim, {"dimension": dimension + 1}
    return dim - (not tiled), {}


psum_p = linear(
    "psum",
    reference=_psum,
    fused=_fused_psum,
    slower=_slower("psum"),
    case=functools.partial(case, "psum"),
    transpose=_transpose_psum,
    batch_dimension=_batch_psum,
)
all_gather_p = linear(
    "all_gather",
    reference=_all_gather,
    fused=_fused_all_gather,
    slower=_slower("all_gather"),
    case=functools.partial(case, "all_gather"),
    transpose=_transpose_all_gather,
    batch_dimension=_batch_all_gather,
)
psum_scatter_p = linear(
    "psum_scatter",
    reference=_psum_scatter,
    fused=_fused_psum_scatter,
    slower=_slower("psum_scatter"),
    case=functools.partial(case, "psum_scatter"),
    transpose=_transpose_psum_scatter,
    batch_dimension=_batch_psum_scatter,
)
_REFERENCES = {psum_p: _psum, all_gather_p: _all_gather, psum_scatter_p: _psum_scatter}
