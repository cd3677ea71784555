"""`matmul_reduce_scatter`: the row-parallel half of a tensor-parallel layer."""

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
from jaxtaxfree.kernels.matmul_reduce_decode_hopper import matmul_reduce_decode_hopper_kernel
from jaxtaxfree.kernels.matmul_reduce_scatter import matmul_reduce_scatter_kernel
from jaxtaxfree.kernels.matmul_reduce_scatter_hopper import PLACES, matmul_reduce_scatter_hopper_kernel
from jaxtaxfree.kernels.matmul_reduce_scatter_small import matmul_reduce_scatter_small_kernel
from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import matmul
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from jaxtaxfree.primitive import (
    Unsupported,
    bilinear,
    check_implementation,
    check_whole,
    collective,
    settings_of,
    takes_reference,
)
from jaxtaxfree.settings import setting
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.teams import Team, check_axes


def matmul_reduce_scatter(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    scatter_dimension: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    config: "Config | Mapping[str, Any] | None" = None,
) -> jax.Array:
    """`lax.psum_scatter(lhs @ rhs, axis_name, scatter_dimension=scatter_dimension, tiled=True)`, as one kernel on GPUs.

    Each rank multiplies the rows that others own first and sends them as they are done, tile by tile, so the transfer
    hides behind the product of the rows that are still to come. Call it inside `jax.shard_map`.

    Args:
      lhs: this rank's part of the contracted dimension, for the rows of all ranks, [..., world * M, ..., K].
      rhs: the same part, [K, N]; by the reference also a vector [K].
      axis_name: the mesh axis, or axes, over which the contracted dimension is sharded and the result will be.
      scatter_dimension: the dimension of the result that is scattered.
      precision: as in `jnp.matmul`; of f32 operands on GPUs, None means TF32 unless `jax_default_matmul_precision`
        says more.
      preferred_element_type: dtype of the result. The kernel's sums are f32 in any case. Each rank's part is rounded to
        the operands' dtype on its way, unless the result is small or `config` asks for `exact_wire`, and the sum is
        rounded once.
      bias: [N], the whole of it on every rank, added once to the sum over all ranks, before the activation.
      activation: None, "silu", "gelu_tanh", "gelu_exact", `jax.nn.silu`, or `jax.nn.gelu`, which is "gelu_tanh".
      residual: of the result's shape, added last.
      implementation: "fused": the kernel; "xla": plain `lax`; None: the kernel where it can run and is not known to be
        slower, decided when the program is lowered, from shapes and tables. The logger "jaxtaxfree" says at DEBUG why
        not. Gradients gather in a kernel where there are 2048 rows or more. "simulate": the kernel, run for all ranks
        on the CPU; see `jaxtaxfree.simulator`.
      config: how the kernel splits its work; what it does not say is chosen by shape. Its tiles are those of the
        portable kernel, unless it says `hopper`.

    Returns: [..., M, ..., N], this rank's rows of the sum over all ranks. The kernel adds up in the same order in every
      call, which may be another one than XLA's.

    Bias, activation and residual are applied in f32; by the kernel to its f32 sums, before they are rounded, and by XLA
    to what `lax.psum_scatter` gives. In a program that is differentiated the product is an operation by itself, so
    that its gradients stay fused: it is rounded to the dtype of the result before they are applied.

    Raises:
      ValueError: if the operands do not fit together, the dimension that is scattered is 0, or there is no such
        implementation, activation or setting.
      TypeError: if an axis or `config` is of another kind.
      NameError: if `axis_name` is not bound.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here, with all reasons.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    axes = check_axes(axis_name, "matmul_reduce_scatter")
    check_implementation(implementation)
    scatter_dimension, shape = _check_operands(lhs, rhs, scatter_dimension, axes)
    params: dict[str, Any] = {
        "axes": axes,
        "scatter_dimension": scatter_dimension,
        **matmul.check_precision(precision, preferred_element_type),
    }
    epilogue, operands = epilogues.check(
        "matmul_reduce_scatter", lhs, rhs, shape, activation, bias=bias, residual=residual
    )
    settings = settings_of("matmul_reduce_scatter", Config, config)
    reasons = _unsupported(lhs, rhs, *operands, epilogue=epilogue, **params)
    if takes_reference("matmul_reduce_scatter", [lhs, rhs], implementation, reasons):
        return reference(lhs, rhs, *operands, epilogue=epilogue, **params)
    params |= {"rhs_transposed": False, "implementation": implementation, "config": settings}
    if epilogue:
        return matmul.bind(with_epilogue_p, lhs, rhs, *operands, epilogue=epilogue, **params)[0]
    return matmul.bind(matmul_reduce_scatter_p, lhs, rhs, **params)


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    scatter_dimension: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    config: Any = None,
) -> jax.Array:
    """What the operation means, in plain `lax`; `operands` are those of the epilogue."""
    del config
    rhs = rhs.T if rhs_transposed else rhs
    product = jnp.matmul(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type)
    total = lax.psum_scatter(product, axes, scatter_dimension=scatter_dimension, tiled=True)
    return epilogue.apply([total], epilogue.split(rhs, operands)[1], total.dtype) if epilogue else total


def fused(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    scatter_dimension: int,
    precision: Any,
    preferred_element_type: Any,
    config: tuple[tuple[str, Any], ...] | None,
    compute_capability: int,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """The operation by one kernel."""
    if reasons := _unsupported(
        lhs,
        rhs,
        *operands,
        axes=axes,
        scatter_dimension=scatter_dimension,
        precision=precision,
        preferred_element_type=preferred_element_type,
        epilogue=epilogue,
    ):
        raise Unsupported("matmul_reduce_scatter", reasons)
    precision = matmul.triton_precision(precision)
    assert precision is not None  # _unsupported has seen to it
    world = lax.axis_size(axes)
    rows, lengths = matmul.rows_first(lhs, scatter_dimension)
    m, k = rows.shape[0] // world, rows.shape[1]
    n = rhs.shape[0] if rhs_transposed else rhs.shape[1]
    on = {"dtype": lhs.dtype, "compute_capability": compute_capability}
    residual = epilogue.split(rhs, operands)[1].get("residual")
    form = {"residual": None if residual is None else residual.dtype, "rhs_transposed": rhs_transposed}
    settings = dict(config or ())
    chosen = choose(m, k, n, world=world, out_dtype=preferred_element_type, settings=settings, **on, **form)
    kernel, keywords = launch(
        m,
        k,
        n,
        world=world,
        dtype=lhs.dtype,
        out_dtype=preferred_element_type or lhs.dtype,
        precision=precision,
        rhs_transposed=rhs_transposed,
        epilogue=epilogue,
        config=chosen,
    )
    others = epilogue.rows_first(operands, scatter_dimension)
    arrays = (rows, rhs, *others)
    if chosen.hopper and not chosen.small:
        # rhs in blocks and in halves of them; a dimension for the ranks, the residual's as that of the result.
        arrays = (rows.reshape(world, m, k), rhs, rhs, *(x if x.ndim == 1 else x[None] for x in others))
    out = shmem_call(
        kernel,
        *arrays,
        axis_name=axes,
        implementation=implementation,
        **keywords,
    )
    return matmul.rows_back(out, lengths, scatter_dimension)


def launch(
    m: int,
    k: int,
    n: int,
    *,
    world: int,
    dtype: Any,
    out_dtype: Any,
    precision: str,
    config: "Config",
    rhs_transposed: bool = False,
    epilogue: Epilogue = NONE,
) -> tuple[Any, dict[str, Any]]:
    """The kernel for lhs [world * m, k] and rhs [k, n], and the keywords with which `shmem_call` launches it."""
    size = np.dtype(dtype).itemsize
    wire = np.dtype(np.float32 if config.exact_wire else dtype)
    tiles = matmul.tiles(m, n, config)
    tile = (config.block_m, config.block_n)
    peers = max(1, world - 1)  # no scratch is empty
    common = {
        "name": "matmul_reduce_scatter",
        "cost_estimate": {
            "flops": 2 * world * m * n * k,
            "bytes_accessed": size * (world * m * k + k * n + m * n) + 2 * wire.itemsize * (world - 1) * m * n,
        },
    }
    if config.hopper and config.small:
        assert not rhs_transposed
        on = {"world": world, "dtype": dtype, "out_dtype": out_dtype, "scattered": True, "gathered": False}
        return matmul_reduce_decode_hopper_kernel, {
            **common,
            **matmul.reduce_decode_hopper_keywords(m, k, n, **on, config=config),
            **epilogue.keywords("bias", "residual"),
        }
    if config.hopper:
        assert not rhs_transposed
        return matmul_reduce_scatter_hopper_kernel, {
            **common,
            **hopper_keywords(m, k, n, out_dtype, config, epilogue),
            "out_type": jax.ShapeDtypeStruct((1, m, n), out_dtype),
            "scratch": {
                "partials": jax.ShapeDtypeStruct((peers, tiles, *tile), wire),
                "outbox": jax.ShapeDtypeStruct((config.programs, PLACES.value, *tile), wire),
            },
            "signals": {"arrived": (peers, tiles), "tickets": 1},
            "CHUNK": config.chunk,
            "PACE": matmul.pace(config.pace, k, wire.itemsize, config.chunk * wire.itemsize, config.programs),
        }
    keywords = {
        **common,
        "out_type": jax.ShapeDtypeStruct((m, n), out_dtype),
        **matmul.tile_keywords(m, k, n, precision, config),
        "RHS_TRANSPOSED": rhs_transposed,
        "EXACT_WIRE": config.exact_wire,
        **epilogue.keywords("bias", "residual"),
    }
    if config.small:
        programs = matmul.tiles(world * m, n, config)
        return matmul_reduce_scatter_small_kernel, keywords | {
            "grid": programs,
            "scratch": {"partials": jax.ShapeDtypeStruct((world, m, n), wire)},
            "signals": {"arrived": (programs, world)},
        }
    places = config.lag if config.lag <= peers * tiles else 1  # with a longer lag nothing is carried
    # A step of K carries whole lines of 128 bytes, at most 16 bytes a thread. The last steps carry nothing, so that all
    # has arrived when the tile is published.
    threads = 32 * config.num_warps
    steps = max(1, math.ceil(k / config.block_k) - 3)
    part = min(math.ceil(math.prod(tile) * wire.itemsize / steps / 128) * 32, 4 * threads)
    return matmul_reduce_scatter_kernel, keywords | {
        "grid": world * tiles,
        "scratch": {
            "partials": jax.ShapeDtypeStruct((peers, tiles, *tile), wire),
            "outbox": jax.ShapeDtypeStruct((places, *tile), wire),
        },
        "signals": {"arrived": (2, peers, tiles)},
        "GROUP_M": config.group_m,
        "LAG": config.lag,
        "PART": part,
        "CHUNK": max(threads, next_power_of_2(part)),
    }


def hopper_keywords(m: int, k: int, n: int, out_dtype: Any, config: Any, epilogue: Epilogue) -> dict[str, Any]:
    """As `matmul.hopper_keywords`, where the peers' parts of a tile arrive in the memory of a step's columns."""
    # So many columns, all rows of them.
    arriving = max(1, min(config.block_n, config.block_n * config.block_k // config.block_m))
    keywords = matmul.hopper_keywords(m, k, n, out_dtype, config, stored=arriving)
    keywords |= epilogue.keywords("bias")
    if "residual" in epilogue.operands:
        keywords["descriptors"]["residual_desc"] = (1, config.block_m, arriving)
        return keywords
    return keywords | {"residual_desc": None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(matmul.Tile):
    """How the kernel splits its work.

    Attributes:
      block_m, block_n, block_k: rows and columns of a tile, and the part of K that a step of its loop takes: powers of
        2, at least 16.
      num_warps, num_stages: warps of a program, and steps of the loop in flight.
      group_m: row blocks whose tiles run together, for the L2 cache; not if `small`.
      lag: from a program to the one that carries its tile, at least 1. Of fewer programs than run at a time they wait
        for each other; of more than a rank has tiles of its own, the last tiles are not carried. Not if `small`.
      small: a tile has rows for all ranks, all of them if they are no more than `block_m`, so that `rhs` is read once.
      exact_wire: partial sums travel as f32. Otherwise they are rounded to the operands' dtype on the way, which halves
        the bytes of bf16 and f16, and is what XLA does.
      hopper: programs of warps with different roles, for f16 and bf16 on GPUs of compute capability 9.0. If `small`,
        `block_m` is at least 8, or the sum of two powers of 2, `block_n` 16 times `num_warps`, and partial sums travel
        as words, without a signal. If not, the programs are persistent; of the settings above there are those up to
        `group_m`. What follows is of this kind alone.
      splits: programs that share a tile, if `small`: each multiplies a part of K.
      whole: so many tiles, the first ones, have a program of their own even so.
      programs: how many, if not: as many as the GPU has multiprocessors.
      chunk: elements of a tile that are sent at a time: a power of 2.
      pace: in which share of the time that tiles for others are multiplied they are sent; 0: as soon as they can be.
    """

    group_m: int = setting(16, least=1)
    lag: int = setting(matmul.MULTIPROCESSORS, least=1)
    exact_wire: bool = False
    splits: int = setting(1, least=1, most=32)
    whole: int = setting(0)
    programs: int = setting(matmul.MULTIPROCESSORS, least=1)
    chunk: int = setting(1024, least=16, most=1 << 16, power_of_2=True)
    pace: float = setting(0.95, most=1)


# Of few rows on Hopper, partial sums of more elements are rounded on their way. On 4 H200 those of 16 rows of 8192 took
# the same time either way, those of 128 rows 47 us instead of 42.
EXACT_SIZE = 2**18


def default_config(
    m: int, n: int, world: int, dtype: Any, compute_capability: int, *, exact_wire: bool | None = None
) -> Config:
    """A configuration by shape.

    Args:
      m: rows of a rank's result [m, n].
      n: its columns.
      world: number of ranks.
      dtype: of the operands.
      compute_capability: of the GPU, 90 for 9.0.
      exact_wire: whether partial sums travel as f32; None chooses.
    """
    rows = world * m
    if rows <= 256:
        # Where rhs is all there is to read, f32 on the wire costs little.
        exact_wire = True if exact_wire is None else exact_wire
        return Config(**matmul.small_tile(rows, dtype, compute_capability), small=True, exact_wire=exact_wire)
    config = Config(**matmul.large_tile(dtype, compute_capability), exact_wire=bool(exact_wire))
    # Rather a short wait than tiles that are not carried.
    tiles = matmul.tiles(m, n, config)
    return dataclasses.replace(config, lag=tiles) if 120 <= tiles < config.lag else config


def decode_hopper_config(
    m: int, n: int, world: int, dtype: Any, out_dtype: Any = None, *, exact_wire: bool | None = None
) -> Config:
    """A configuration by shape of the kernel for few rows on Hopper.

    Args:
      m, n, world, dtype, exact_wire: as of `default_config`.
      out_dtype: of the result; None is that of the operands.
    """
    if exact_wire is None:
        wider = np.dtype(out_dtype or dtype).itemsize > np.dtype(dtype).itemsize
        exact_wire = wider or world * m * n <= EXACT_SIZE
    return Config(**matmul.decode_hopper_tile(world * m, n), small=True, hopper=True, exact_wire=exact_wire)


def hopper_config(m: int, n: int, world: int) -> Config:
    """A configuration of the kernel for many rows on Hopper by shape; of sizes and ranks as `default_config`."""
    config = Config(hopper=True)
    if 2 * world * matmul.tiles(m, n, config) >= 3 * config.programs:
        return config
    config = dataclasses.replace(config, block_n=128, num_stages=6, chunk=2048)
    if world * matmul.tiles(m, n, config) <= config.programs:
        # Nothing hides what is sent, so it is sent at once.
        config = dataclasses.replace(config, pace=0.0)
    return config


def unsupported_on_hopper(k: int, n: int, *, residual: Any = None, **form: Any) -> list[str]:
    """All that keeps the kernel for many rows on Hopper from multiplying a rank's lhs by its rhs [k, n].

    Args:
      residual: the dtype of the residual, if there is one.
      **form: what else `matmul.unsupported_on_hopper` asks for.
    """
    reasons = matmul.unsupported_on_hopper(k, n, **form)
    if residual is not None and np.dtype(residual).itemsize != 2:
        reasons.append(f"it takes a residual of float16 and bfloat16, not {residual}")
    return reasons


def _unsupported_with(k: int, n: int, *, config: Config, residual: Any = None, **form: Any) -> list[str]:
    """As `unsupported_on_hopper`, of the kernel of this configuration."""
    if config.small:
        return matmul.unsupported_on_hopper(k, n, **form)
    return unsupported_on_hopper(k, n, residual=residual, **form)


def choose(
    m: int,
    k: int,
    n: int,
    *,
    world: int,
    dtype: Any,
    out_dtype: Any = None,
    compute_capability: int,
    settings: Mapping[str, Any],
    **form: Any,
) -> Config:
    """The configuration by shape, of whichever kernel can take the call and is the fastest, but for these settings.

    Args:
      m, k, n: a rank multiplies its lhs [world * m, k] by its rhs [k, n].
      world, dtype, out_dtype, compute_capability: as of `default_config` and `decode_hopper_config`.
      settings: what somebody asks for: but for `exact_wire` of the portable kernel, unless they say `hopper`.
      **form: what else `unsupported_on_hopper` asks for.

    Raises:
      NotImplementedError: if the settings ask for a kernel that cannot take the call.
    """
    on = {"dtype": dtype, "compute_capability": compute_capability}
    exact_wire = settings.get("exact_wire")
    portable = default_config(m, n, world, **on, exact_wire=exact_wire)
    few = decode_hopper_config(m, n, world, dtype, out_dtype, exact_wire=exact_wire)
    many = hopper_config(m, n, world)
    unsupported = functools.partial(_unsupported_with, k, n, **on, **form)
    if settings.get("hopper"):
        by_shape = few if settings.get("small") else many
        return matmul.with_settings("matmul_reduce_scatter", by_shape, settings, unsupported)
    if not settings.keys() <= {"exact_wire"}:
        return dataclasses.replace(portable, **settings)
    row_blocks = world * math.ceil(m / many.block_m)
    hopper = few if matmul.is_faster_for_few(world * m, n, few, many, row_blocks) else many
    rounds = hopper is many and exact_wire  # as it always does
    return portable if rounds or unsupported(config=hopper) else hopper


def _check_operands(lhs: jax.Array, rhs: jax.Array, dimension: int, axes: tuple[str, ...]) -> tuple[int, list[int]]:
    """The scattered dimension, from 0 on, and the result's shape; raises ValueError if the operands do not fit."""
    matmul.check_operands("matmul_reduce_scatter", lhs, rhs)
    dimension = check_whole("matmul_reduce_scatter", "scatter_dimension", dimension)
    matmul.check_contraction("matmul_reduce_scatter", lhs, rhs)
    result = list(jax.eval_shape(jnp.matmul, lhs, rhs).shape)
    if not -len(result) <= dimension < len(result):
        raise ValueError(f"matmul_reduce_scatter cannot scatter dimension {dimension} of a product {result}.")
    dimension %= len(result)
    size, world = result[dimension], lax.axis_size(axes)
    if size % world or not size:
        raise ValueError(
            f"matmul_reduce_scatter cannot scatter dimension {dimension} of a product {result} over {world} "
            f"ranks: {size} is not a {'' if size else 'positive '}multiple of {world}."
        )
    result[dimension] //= world
    return dimension, result


def _unsupported(
    lhs: Any,
    rhs: Any,
    *operands: Any,
    axes: tuple[str, ...],
    scatter_dimension: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue,
) -> list[str]:
    """All that keeps the kernel from taking these operands."""
    del axes
    reasons = matmul.unsupported(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type)
    if scatter_dimension == lhs.ndim - 1 and rhs.ndim == 2:
        reasons.append("it scatters rows, not the columns of rhs")
    return reasons + epilogues.unsupported(epilogue, operands)


def _slower(
    lhs: Any,
    rhs: Any,
    *_: Any,
    axes: tuple[str, ...],
    precision: Any,
    preferred_element_type: Any,
    rhs_transposed: bool,
    compute_capability: int,
    **__: Any,
) -> str | None:
    """Why XLA is known to be faster, if it is. Measured on 2 and 4 H200."""
    rows, world = math.prod(lhs.shape[:-1]), lax.axis_size(axes)
    if world == 1:
        return "there is one rank, so nothing to scatter"
    if why := matmul.slower(lhs, rhs, rows, precision=precision, preferred_element_type=preferred_element_type):
        return why
    if rhs_transposed:
        # Forward and backward of an MLP (4096, 8192, 28672) took 4.84 ms with this kernel, and 4.78 with XLA, which
        # scatters beside the gradient of the weights.
        return "XLA is faster in the gradients of an MLP"
    on = {"world": world, "dtype": lhs.dtype, "compute_capability": compute_capability}
    return matmul.slower_in_waves(rows, rhs.shape[1], choose(rows // world, *rhs.shape, **on, settings={}), world=world)


def case(lhs: Any, rhs: Any, *, team: Team, **params: Any) -> Case | None:
    """What the tables know a call by."""
    on = {"dtype": lhs.dtype, "compute_capability": team.compute_capability}

    def default(m: int) -> Config:
        return choose(m // team.world, *rhs.shape, world=team.world, **on, settings={})

    unsupported = functools.partial(_unsupported_with, *rhs.shape, **on)
    return matmul.case(
        "matmul_reduce_scatter", lhs, rhs, kind=Config, default=default, unsupported=unsupported, team=team, **params
    )


_batch = functools.partial(epilogues.batch, moved="scatter_dimension")
matmul_reduce_scatter_p = bilinear(
    "matmul_reduce_scatter", reference=reference, fused=fused, slower=_slower, case=case, batch=_batch
)
# With an epilogue.
with_epilogue_p = collective(
    "matmul_reduce_scatter",
    reference=lambda *operands, **params: [reference(*operands, **params)],
    fused=lambda *operands, **params: [fused(*operands, **params)],
    slower=_slower,
    batch=_batch,
)
