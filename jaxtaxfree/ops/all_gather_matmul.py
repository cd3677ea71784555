"""`all_gather_matmul`: the column-parallel half of a tensor-parallel layer."""

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
from jaxtaxfree.kernels.all_gather_matmul import all_gather_matmul_kernel
from jaxtaxfree.kernels.all_gather_matmul_decode_hopper import all_gather_matmul_decode_hopper_kernel
from jaxtaxfree.kernels.all_gather_matmul_hopper import CHUNK, all_gather_matmul_hopper_kernel
from jaxtaxfree.kernels.all_gather_matmul_small import all_gather_matmul_small_kernel
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


def all_gather_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    precision: lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    gate: jax.Array | None = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    return_gathered: bool = False,
    implementation: str | None = None,
    config: "Config | Mapping[str, Any] | None" = None,
) -> Any:
    """`lax.all_gather(lhs, axis_name, axis=axis, tiled=True) @ rhs`, as one kernel on NVIDIA GPUs.

    The ranks send their rows to each other while they multiply those that they have, so the gathered matrix makes no
    trip through memory of its own and nobody waits for all. Call it inside `jax.shard_map`. The method is that of the
    all-gather + GEMM of "Eliminating Multi-GPU Performance Taxes" (arXiv 2511.02168), with rows pushed by the
    programs that a GPU starts first.

    Args:
      lhs: this rank's rows, [..., M, ..., K].
      rhs: this rank's columns, [K, N]; by the reference also a vector [K].
      axis_name: the mesh axis, or axes, over which `lhs` is sharded.
      axis: the dimension of `lhs` that is sharded.
      precision: as in `jnp.matmul`; of f32 operands on GPUs, None means TF32 unless `jax_default_matmul_precision`
        says more.
      preferred_element_type: dtype of the result. Sums are f32 in any case.
      gate: [K, N], a second `rhs`, as of SwiGLU: the result is `activation(G @ gate) * (G @ rhs)`, for G the gathered
        lhs. So the activation is that of the gate's product alone.
      bias: [N], added to `G @ rhs` before the activation, or before the gate multiplies it.
      activation: None, "silu", "gelu_tanh", "gelu_exact", `jax.nn.silu`, or `jax.nn.gelu`, which is "gelu_tanh".
      residual: of the result's shape, added last.
      return_gathered: return the gathered lhs as well. Its bytes are written once more, and the gradient of rhs then
        needs no second gather.
      implementation: "fused": the kernel; "xla": plain `lax`; None: the kernel where it can run and is not known to
        be slower, decided when the program is lowered, from shapes and tables alone. The logger "jaxtaxfree" says at
        DEBUG level why not. The gradient of `lhs` is fused with "fused" alone, because XLA's is faster. "simulate": the
        kernel, run for all ranks on the CPU; see `jaxtaxfree.simulator`.
      config: how the kernel splits its work; what it does not say is chosen by shape. Its tiles are those of the
        portable kernel, unless it says `hopper`.

    Returns: [..., world * M, ..., N]. The gathered half is exact; sums may be added in another order than XLA's. With
      `return_gathered` a pair of it and [..., world * M, ..., K].

    Gate, bias, activation and residual are applied to the product's f32 sums, in f32, and the result is rounded once.
    In a program that is differentiated the product is an operation by itself, so that its gradients stay fused: it is
    rounded to the dtype of the result before they are applied.

    Raises:
      ValueError: if the operands do not fit together, the dimension that is sharded is 0, or there is no such
        implementation, activation or setting.
      TypeError: if an axis or `config` is of another kind.
      NameError: if `axis_name` is not bound.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here, with all reasons.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    axes = check_axes(axis_name, "all_gather_matmul")
    check_implementation(implementation)
    params: dict[str, Any] = {
        "axes": axes,
        "axis": _check_operands(lhs, rhs, axis, axes),
        **matmul.check_precision(precision, preferred_element_type),
    }
    shape = [*lhs.shape[:-1], *rhs.shape[-1:]]
    if params["axis"] < lhs.ndim - 1:
        shape[params["axis"]] *= lax.axis_size(axes)
    epilogue, operands = epilogues.check(
        "all_gather_matmul", lhs, rhs, shape, activation, gate=gate, bias=bias, residual=residual
    )
    settings = settings_of("all_gather_matmul", Config, config)
    reasons = _unsupported(lhs, rhs, *operands, epilogue=epilogue, **params)
    if takes_reference("all_gather_matmul", [lhs, rhs], implementation, reasons):
        return reference(lhs, rhs, *operands, epilogue=epilogue, return_gathered=return_gathered, **params)
    params |= {"rhs_transposed": False, "implementation": implementation, "config": settings}
    if epilogue:
        result = matmul.bind(
            with_epilogue_p, lhs, rhs, *operands, epilogue=epilogue, return_gathered=return_gathered, **params
        )
        return tuple(result) if return_gathered else result[0]
    primitive = gathered_too_p if return_gathered else all_gather_matmul_p
    result = matmul.bind(primitive, lhs, rhs, **params)
    return tuple(result) if return_gathered else result


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
    config: Any = None,
) -> Any:
    """What the operation means, in plain `lax`; `operands` are those of the epilogue."""
    del config
    rhs = rhs.T if rhs_transposed else rhs
    gathered = lax.all_gather(lhs, axes, axis=axis, tiled=True)
    multiply = functools.partial(jnp.matmul, gathered, precision=precision)
    if epilogue:
        dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        weights, others = epilogue.split(rhs, operands)
        wide = epilogues.wide_type(dtype)
        out = epilogue.apply([multiply(w, preferred_element_type=wide) for w in weights], others, dtype)
    else:
        out = multiply(rhs, preferred_element_type=preferred_element_type)
    return (out, gathered) if return_gathered else out


def fused(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    config: tuple[tuple[str, Any], ...] | None,
    compute_capability: int,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
    implementation: str | None = None,
) -> Any:
    """The operation by one kernel."""
    if reasons := _unsupported(
        lhs,
        rhs,
        *operands,
        axes=axes,
        axis=axis,
        precision=precision,
        preferred_element_type=preferred_element_type,
        epilogue=epilogue,
    ):
        raise Unsupported("all_gather_matmul", reasons)
    precision = matmul.triton_precision(precision)
    assert precision is not None  # _unsupported has seen to it
    world = lax.axis_size(axes)
    rows, lengths = matmul.rows_first(lhs, axis)
    (m, k), n = rows.shape, rhs.shape[0] if rhs_transposed else rhs.shape[1]
    on = {"dtype": lhs.dtype, "compute_capability": compute_capability}
    form = {"epilogue": epilogue, "rhs_transposed": rhs_transposed, "return_gathered": return_gathered}
    chosen = choose(m, k, n, world=world, settings=dict(config or ()), **on, **form)
    kernel, keywords = launch(
        m,
        k,
        n,
        world=world,
        dtype=lhs.dtype,
        out_dtype=preferred_element_type or lhs.dtype,
        precision=precision,
        rhs_transposed=rhs_transposed,
        return_gathered=return_gathered,
        epilogue=epilogue,
        config=chosen,
    )
    arrays = (rows, rhs, *epilogue.rows_first(operands, axis))
    if chosen.hopper and not chosen.small:
        # Each in two ways: the rows by pointers and in blocks, the columns in blocks and in halves of them.
        weights, others = epilogue.split(rhs, operands)
        arrays = (rows[None], rows[None], *(w for w in weights for _ in range(2)), *others.values())
    outs = shmem_call(
        kernel,
        *arrays,
        axis_name=axes,
        implementation=implementation,
        **keywords,
    )
    return jax.tree.map(lambda out: matmul.rows_back(out, lengths, axis), outs)


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
    return_gathered: bool = False,
    epilogue: Epilogue = NONE,
) -> tuple[Any, dict[str, Any]]:
    """The kernel for a rank's lhs [m, k] and rhs [k, n], and the keywords with which `shmem_call` launches it."""
    size = np.dtype(dtype).itemsize
    columns = n
    if epilogue.gated:
        columns = 2 * n
        if not (config.hopper and config.small):
            config = dataclasses.replace(config, block_n=config.block_n // 2)
    out_type = jax.ShapeDtypeStruct((world * m, n), out_dtype)
    common = {
        "scratch": {"gathered": jax.ShapeDtypeStruct((world, m, k), dtype)},
        "name": "all_gather_matmul",
        "cost_estimate": {
            "flops": 2 * world * m * columns * k,
            "bytes_accessed": size * (world * m * (k + n) + k * columns),
        },
    }
    if config.hopper and config.small:
        assert not (rhs_transposed or return_gathered)
        own = _launch_decode_hopper(m, k, n, config=config, world=world, epilogue=epilogue)
        scratch = common["scratch"] | own["scratch"]
        return all_gather_matmul_decode_hopper_kernel, common | own | {"out_type": out_type, "scratch": scratch}
    if config.hopper:
        own = _launch_hopper(
            m,
            k,
            n,
            world=world,
            dtype=dtype,
            out_dtype=out_dtype,
            rhs_transposed=rhs_transposed,
            return_gathered=return_gathered,
            epilogue=epilogue,
            config=config,
        )
        return all_gather_matmul_hopper_kernel, common | own
    copied = {"out_type": out_type, "gathered_ptr": None}
    if return_gathered:
        copied = {"out_type": (out_type, jax.ShapeDtypeStruct((world * m, k), dtype))}
    keywords = {
        **common,
        **copied,
        **matmul.tile_keywords(m, k, n, precision, config),
        "PUSHERS": config.pushers,
        "CHUNK": config.chunk,
        "RHS_TRANSPOSED": rhs_transposed,
        **epilogue.keywords("gate", "bias", "residual"),
    }
    column_blocks = math.ceil(n / config.block_n)
    if config.small:
        grid = config.pushers + math.ceil(world * m / config.block_m) * column_blocks
        return all_gather_matmul_small_kernel, keywords | {"grid": grid, "signals": {"arrived": world}}
    row_blocks = math.ceil(m / config.block_m)
    return all_gather_matmul_kernel, keywords | {
        "grid": config.pushers + world * row_blocks * column_blocks,
        "signals": {"arrived": (world, row_blocks), "turn": config.pushers},
        "UNITS": config.units,
        "GROUP_M": config.group_m,
    }


def _launch_hopper(
    m: int,
    k: int,
    n: int,
    *,
    world: int,
    dtype: Any,
    out_dtype: Any,
    rhs_transposed: bool,
    return_gathered: bool,
    epilogue: Epilogue,
    config: "Config",
) -> dict[str, Any]:
    """What is different for the kernel for Hopper, whose arrays have a dimension for the ranks."""
    size = np.dtype(dtype).itemsize
    out_type = jax.ShapeDtypeStruct((world, m, n), out_dtype)
    copied = {"out_type": out_type, "gathered_ptr": None}
    if return_gathered:
        copied = {"out_type": (out_type, jax.ShapeDtypeStruct((world, m, k), dtype))}
    keywords = matmul.hopper_keywords(m, k, n, out_dtype, config, rhs_transposed=rhs_transposed)
    blocks = keywords["descriptors"]
    gate = {"gate_desc": blocks["rhs_desc"], "half_gate_desc": blocks["half_desc"]}
    if epilogue.gated:
        keywords["descriptors"] = blocks | gate
    else:
        keywords |= dict.fromkeys(gate)
    columns = 2 * n if epilogue.gated else n
    return {
        **keywords,
        **epilogue.keywords("bias"),
        **copied,
        "signals": {"arrived": (world, math.ceil(m / config.block_m), math.ceil(k / config.part)), "tickets": 1},
        "PART": config.part,
        "UNIT": config.unit,
        "PACE": matmul.pace(config.pace, columns, size, CHUNK.value * config.part * size, config.programs),
    }


def _launch_decode_hopper(
    m: int, k: int, n: int, *, world: int, epilogue: Epilogue, config: "Config"
) -> dict[str, Any]:
    """What is different for the kernel for few rows on Hopper."""
    weights = ("rhs_desc", "gate_desc") if epilogue.gated else ("rhs_desc",)
    keywords = matmul.decode_hopper_keywords(world * m, k, n, config, *weights)
    # Whole steps, and at least as many parts as there are programs that begin with another one.
    splits = 1 if keywords["WHOLE"] else keywords["SPLITS"]
    part = math.ceil(min(config.part, k / splits) / config.block_k) * config.block_k
    parts = math.ceil(k / part)
    groups = math.gcd(config.pushers, splits) if parts >= splits else 1
    # A program that has nothing to send would not find out whether the region is there, and signal.
    pushers = groups * min(config.pushers // groups, math.ceil(m * part / config.chunk))
    return {
        **keywords,
        "grid": pushers + keywords["grid"],
        "signals": keywords["signals"] | {"arrived": (parts, world)},
        **({} if epilogue.gated else {"gate_desc": None}),
        **epilogue.keywords("bias", "residual"),
        "M": m,
        "N": n,
        "K": k,
        "PUSHERS": pushers,
        "GROUPS": groups,
        "PART": part,
        "CHUNK": config.chunk,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(matmul.Tile):
    """How the kernel splits its work.

    Attributes:
      block_m, block_n, block_k: rows and columns of a tile, and the part of K that a step of its loop takes: powers of
        2, at least 16. With a gate a tile has half of its columns of each of the two products.
      num_warps, num_stages: warps of a program, and steps of the loop in flight.
      pushers: programs that send.
      chunk: elements that a pusher moves at a time, a power of 2.
      units: parts in which a block of rows is sent, each with a signal; not if `small`.
      group_m: row blocks whose tiles run together, for the L2 cache; not if `small`.
      small: a tile has rows of all ranks, all of them if they are no more than `block_m`, so that `rhs` is read once.
      hopper: programs of warps with different roles, for f16 and bf16 on GPUs of compute capability 9.0. If `small`, a
        tile has `block_n` columns of each product, 16 of all of them for each warp, `block_m` is at least 8, or the
        sum of two powers of 2, and `chunk` and `pushers` mean the same. If not, the programs are persistent and the
        pushers are warps of all of them; of the settings above there are the first five and `group_m`.
      splits: programs that share a tile, if `hopper` and `small`: each multiplies a part of K.
      whole: so many tiles, the first ones, have a program of their own even so.
      programs: how many, if `hopper` and not `small`: as many as the GPU has multiprocessors.
      part: columns that are sent together, if `hopper`: a multiple of `block_k`.
      unit: rows that are sent together, if `hopper` and not `small`: a divisor of `block_m`.
      pace: in which share of the time that others' rows are multiplied rows are sent, if `hopper` and not `small`; 0:
        as soon as they can be.
    """

    pushers: int = setting(16, least=1)
    chunk: int = setting(8192, least=16, most=1 << 16, power_of_2=True)
    units: int = setting(2, least=1)
    group_m: int = setting(8, least=1)
    splits: int = setting(1, least=1, most=32)
    whole: int = setting(0)
    programs: int = setting(matmul.MULTIPROCESSORS, least=1)
    part: int = setting(512, least=8)
    unit: int = setting(16, least=1)
    pace: float = setting(0.95, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hopper and not self.small:
            if self.part % self.block_k:
                self.refuse("part", f"a multiple of block_k, {self.block_k}")
            if self.block_m % self.unit:
                self.refuse("unit", f"a divisor of block_m, {self.block_m}")


HOPPER = Config(hopper=True, group_m=16)


def default_config(m: int, n: int, world: int, dtype: Any, compute_capability: int) -> Config:
    """A configuration by shape, from what was measured on H200.

    Args:
      m: rows of a rank's `lhs` [m, k].
      n: columns of a rank's `rhs` [k, n]; with a gate those of both.
      world: number of ranks.
      dtype: of the operands.
      compute_capability: of the GPU, 90 for 9.0.
    """
    rows = world * m
    if rows <= 256:
        tile = matmul.small_tile(rows, dtype, compute_capability)
        return Config(**tile, pushers=20, chunk=2048, small=True)
    tile = matmul.large_tile(dtype, compute_capability)
    if not matmul.has_big_shared_memory(compute_capability):
        return Config(**tile)
    if m <= 512:
        # Smaller tiles fill the GPU more evenly when there are few.
        return Config(**tile, block_n=128, num_warps=4)
    # With few columns the wire takes almost as long as the product, and wants more programs to feed it.
    pushers, units = (32, 1) if n <= 2560 else (16, 2)
    return Config(**tile, pushers=pushers, units=units)


def hopper_configs(m: int, n: int, world: int, *, gated: bool = False) -> list[Config]:
    """Configurations by shape of the kernels for Hopper, the fastest first; of the arguments of `hopper_config`."""
    rows, products = world * m, 2 if gated else 1
    many = hopper_config(m, n, world, gated=gated)
    if rows > matmul.FEW_ROWS:
        return [many]
    few = decode_hopper_config(m, n, world, gated=gated)
    if rows <= matmul.ROWS_OF_A_TILE:
        return [few]
    row_blocks = world * math.ceil(m / many.block_m)
    faster = matmul.is_faster_for_few(rows, n, few, many, row_blocks, products=products, others=few.pushers)
    return [few, many] if faster else [many, few]


def hopper_config(m: int, n: int, world: int, *, gated: bool = False) -> Config:
    """A configuration of the kernel for many rows on Hopper by shape.

    Args:
      m, world: as of `default_config`.
      n: columns of a rank's `rhs`, and of the gate if there is one.
      gated: whether there is.
    """
    waves = world * matmul.tiles(m, 2 * n if gated else n, HOPPER) / HOPPER.programs
    # Narrow tiles are dealt out more evenly. With a gate they have not been measured.
    return HOPPER if waves >= 3 or gated else dataclasses.replace(HOPPER, block_n=128, num_stages=6)


def decode_hopper_config(m: int, n: int, world: int, *, gated: bool = False) -> Config:
    """A configuration by shape of the kernel for few rows on Hopper; the arguments are those of `hopper_config`."""
    rows, pushers = world * m, 16
    tile = matmul.decode_hopper_tile(rows, n, products=2 if gated else 1, others=pushers)
    splits = 1 if tile["whole"] else tile["splits"]  # programs that begin with another part of K
    if math.ceil(rows / tile["block_m"]) * math.ceil(n / tile["block_n"]) * splits <= matmul.MULTIPROCESSORS - 32:
        pushers = 32
    pushers -= pushers % splits
    # Few rows are there before anyone needs them, many in the order in which they are needed, and in the smaller parts
    # the more programs there are that begin with another one.
    part = 8192 if rows <= 32 else 2048 if rows <= 64 else max(512, 2048 // splits)
    part = min(part, 8192 // splits) // 512 * 512
    chunk = next_power_of_2(math.ceil(m * part * splits / pushers))
    return Config(
        **tile,
        pushers=pushers,
        chunk=min(4096 if rows <= 128 else 16384, max(16 * tile["block_n"], chunk)),
        part=part,
        small=True,
        hopper=True,
    )


def unsupported_on_hopper(
    k: int,
    n: int,
    *,
    dtype: Any,
    compute_capability: int,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
    config: Config,
) -> list[str]:
    """All that keeps the kernel for Hopper of this configuration from multiplying the gathered rows by rhs [k, n]."""
    on = {"dtype": dtype, "compute_capability": compute_capability}
    if not config.small:
        reasons = matmul.unsupported_on_hopper(k, n, **on)
        if "residual" in epilogue.operands:
            reasons.append("with small=False it adds no residual")
        return reasons
    reasons = matmul.unsupported_on_hopper(k, n, rhs_transposed=rhs_transposed, **on)
    if return_gathered:
        reasons.append("with small=True it does not return the gathered rows")
    return reasons


def _faster_hopper_config(
    m: int, k: int, n: int, *, world: int, epilogue: Epilogue = NONE, **form: Any
) -> Config | None:
    """The first one of `hopper_configs` that can take the call; the arguments are those of `choose`."""
    for config in hopper_configs(m, n, world, gated=epilogue.gated):
        if not unsupported_on_hopper(k, n, config=config, epilogue=epilogue, **form):
            return config
    return None


def choose(
    m: int,
    k: int,
    n: int,
    *,
    world: int,
    dtype: Any,
    compute_capability: int,
    settings: Mapping[str, Any],
    **form: Any,
) -> Config:
    """The configuration by shape, of whichever kernel can take the call and is the fastest, but for these settings.

    Args:
      m, k, n: a rank multiplies its lhs [m, k] by its rhs [k, n].
      world, dtype, compute_capability: as of `default_config`.
      settings: what somebody asks for: of the portable kernel, unless they say `hopper`.
      **form: what else `unsupported_on_hopper` asks for.

    Raises:
      NotImplementedError: if the settings ask for a kernel that cannot take the call.
    """
    on = {"dtype": dtype, "compute_capability": compute_capability}
    gated = form.get("epilogue", NONE).gated
    if settings.get("hopper"):
        by_shape = (decode_hopper_config if settings.get("small") else hopper_config)(m, n, world, gated=gated)
        unsupported = functools.partial(unsupported_on_hopper, k, n, **on, **form)
        return matmul.with_settings("all_gather_matmul", by_shape, settings, unsupported)
    portable = default_config(m, 2 * n if gated else n, world, **on)
    if settings:
        return dataclasses.replace(portable, **settings)
    return _faster_hopper_config(m, k, n, world=world, **on, **form) or portable


def _check_operands(lhs: jax.Array, rhs: jax.Array, axis: int, axes: tuple[str, ...]) -> int:
    """The sharded dimension of `lhs`, from 0 on; raises ValueError if the operands do not fit."""
    matmul.check_operands("all_gather_matmul", lhs, rhs)
    axis = check_whole("all_gather_matmul", "axis", axis)
    if not -lhs.ndim <= axis < lhs.ndim:
        raise ValueError(f"all_gather_matmul cannot gather axis {axis} of lhs, which has shape {lhs.shape}.")
    axis %= lhs.ndim
    if not lhs.shape[axis]:
        raise ValueError(f"all_gather_matmul cannot gather axis {axis} of lhs {list(lhs.shape)}, which is 0.")
    parts = lax.axis_size(axes) if axis == lhs.ndim - 1 else 1
    matmul.check_contraction("all_gather_matmul", lhs, rhs, parts)
    return axis


def _unsupported(
    lhs: Any,
    rhs: Any,
    *operands: Any,
    axes: tuple[str, ...],
    axis: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue,
) -> list[str]:
    """All that keeps the kernel from taking these operands."""
    del axes
    reasons = matmul.unsupported(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type)
    if axis == lhs.ndim - 1 and lhs.ndim > 1 and rhs.ndim == 2:
        reasons.append("it gathers rows, not the contracted dimension of lhs")
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
    epilogue: Epilogue = NONE,
    return_gathered: bool = False,
    **__: Any,
) -> str | None:
    """Why XLA is known to be faster, if it is. Measured on 2 and 4 H200."""
    world = lax.axis_size(axes)
    rows = world * math.prod(lhs.shape[:-1])
    if world == 1:
        return "there is one rank, so nothing to gather"
    if why := matmul.slower(lhs, rhs, rows, precision=precision, preferred_element_type=preferred_element_type):
        return why
    on = {"world": world, "dtype": lhs.dtype, "compute_capability": compute_capability, "epilogue": epilogue}
    form = {"rhs_transposed": rhs_transposed, "return_gathered": return_gathered}
    k, n = reversed(rhs.shape) if rhs_transposed else rhs.shape
    config = _faster_hopper_config(rows // world, k, n, **on, **form)
    if config and (why := matmul.slower_in_waves(rows, n, config, world=world, others=config.pushers)):
        return why
    portable = not config
    if portable and 256 <= rows <= 768:
        # Too many rows to hold up every tile for all of them, too few to read rhs again for each rank's.
        return f"with {rows} rows the portable kernel reads rhs too often or waits too long"
    if portable and epilogue.gated and 128 < rows < 8192:
        return "with a gate XLA was faster than the portable kernel at 2048 rows, and slower at 16, 128 and 8192"
    # Of gradients, that of an MLP of 4096 rows was measured.
    return matmul.UNMEASURED if rhs_transposed and rows < 2048 else None


def case(lhs: Any, rhs: Any, *, team: Team, **params: Any) -> Case | None:
    """What the tables know a call by."""
    on = {"dtype": lhs.dtype, "compute_capability": team.compute_capability}

    def default(m: int) -> Config:
        return choose(m, *rhs.shape, world=team.world, **on, settings={})

    unsupported = functools.partial(unsupported_on_hopper, *rhs.shape, **on)
    return matmul.case(
        "all_gather_matmul", lhs, rhs, kind=Config, default=default, unsupported=unsupported, team=team, **params
    )


_batch = functools.partial(epilogues.batch, moved="axis")
all_gather_matmul_p = bilinear(
    "all_gather_matmul", reference=reference, fused=fused, slower=_slower, case=case, batch=_batch
)
# With the gathered lhs as a second result.
gathered_too_p = collective(
    "all_gather_matmul",
    reference=functools.partial(reference, return_gathered=True),
    fused=functools.partial(fused, return_gathered=True),
    slower=_slower,
    batch=_batch,
)
# With an epilogue; a list of the result and, with `return_gathered`, the gathered lhs.
with_epilogue_p = collective(
    "all_gather_matmul",
    reference=lambda *operands, **params: jax.tree.leaves(reference(*operands, **params)),
    fused=lambda *operands, **params: jax.tree.leaves(fused(*operands, **params)),
    slower=_slower,
    batch=_batch,
)
