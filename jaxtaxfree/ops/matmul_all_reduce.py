"""`matmul_all_reduce`: a row-parallel layer whose result every rank needs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtaxfree.dispatch import Case
from jaxtaxfree.kernels.matmul_all_reduce import matmul_all_reduce_kernel
from jaxtaxfree.kernels.matmul_all_reduce_hopper import PLACES, matmul_all_reduce_hopper_kernel
from jaxtaxfree.kernels.matmul_all_reduce_small import matmul_all_reduce_small_kernel
from jaxtaxfree.kernels.matmul_reduce_decode_hopper import matmul_reduce_decode_hopper_kernel
from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import matmul, matmul_reduce_scatter
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from jaxtaxfree.primitive import Unsupported, bilinear, check_implementation, collective, settings_of, takes_reference
from jaxtaxfree.settings import setting
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.teams import Team, check_axes, varying


def matmul_all_reduce(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | Sequence[str],
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: Any = None,
    bias: jax.Array | None = None,
    activation: str | Callable[..., jax.Array] | None = None,
    residual: jax.Array | None = None,
    implementation: str | None = None,
    config: "Config | Mapping[str, Any] | None" = None,
) -> jax.Array:
    """`lax.psum(lhs @ rhs, axis_name)`, as one kernel on GPUs.

    For the few rows of a decode step, every tile of the product is sent as soon as it is done, in one shot to all ranks
    or in two to its owner and from there to all (as one-shot and two-shot all-reduce of TensorRT-LLM, in words that say
    by themselves whether they have arrived), while the weights of later tiles are still being read. For many rows it is
    the two-shot way with tiles in scratch memory. Call it inside `jax.shard_map`.

    Args:
      lhs: this rank's part of the contracted dimension, [..., M, K] or [K].
      rhs: the same part, [K, N]; by the reference also a vector [K].
      axis_name: the mesh axis, or axes, over which the contracted dimension is sharded.
      precision: as in `jnp.matmul`; of f32 operands on GPUs, None means TF32 unless `jax_default_matmul_precision`
        says more.
      preferred_element_type: dtype of the result. The kernel's sums are f32 in any case, and rounded once. Each rank's
        part is rounded to the operands' dtype on its way, as XLA does, unless the result is to be of more bits, the
        operands of so few rows that it saves nothing, or `config` asks for `exact_wire`. (Of many rows, on other GPUs
        than Hopper, parts travel as f32.)
      bias: [N], the same on every rank, added once to the sum over all ranks, before the activation.
      activation: None, "silu", "gelu_tanh", "gelu_exact", `jax.nn.silu`, or `jax.nn.gelu`, which is "gelu_tanh".
      residual: of the result's shape, the same on every rank, added last.
      implementation: "fused": the kernel; "xla": plain `lax`; None: the kernel where it can run and is not known to be
        slower, decided when the program is lowered, from shapes and tables. The logger "jaxtaxfree" says at DEBUG why
        not. "simulate": the kernel, run for all ranks on the CPU; see `jaxtaxfree.simulator`.
      config: how the kernel splits its work; what it does not say is chosen by shape. Its tiles are those of the
        portable kernel, unless it says `hopper`.

    Returns: [..., M, N] or [N], the sum over all ranks, the same on every rank. The kernel adds up in the same order in
      every call and on every rank, which may be another one than XLA's.

    Bias, activation and residual are applied in f32; by the kernel to its f32 sums, before they are rounded, and by XLA
    to what `lax.psum` gives. In a program that is differentiated they follow the product, rounded to the dtype of the
    result. Where `shard_map` keeps account of what is the same on all ranks (`check_vma=True`), the kernel refuses a
    bias or residual that is not; elsewhere it takes each rank's for a part of the result.

    Raises:
      ValueError: if the operands do not fit together, or there is no such implementation, activation or setting.
      TypeError: if the axis or `config` is of another kind.
      NameError: if `axis_name` is not bound.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here, with all reasons.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    axes = check_axes(axis_name, "matmul_all_reduce")
    check_implementation(implementation)
    matmul.check_operands("matmul_all_reduce", lhs, rhs)
    matmul.check_contraction("matmul_all_reduce", lhs, rhs)
    params: dict[str, Any] = {"axes": axes, **matmul.check_precision(precision, preferred_element_type)}
    shape = jax.eval_shape(jnp.matmul, lhs, rhs).shape
    one_row = lhs.ndim == 1 and rhs.ndim == 2
    lhs = lhs[None] if one_row else lhs
    epilogue, operands = epilogues.check("matmul_all_reduce", lhs, rhs, shape, activation, bias=bias, residual=residual)
    if one_row:
        operands = [x[None] if name == "residual" else x for name, x in zip(epilogue.operands, operands)]
    settings = settings_of("matmul_all_reduce", Config, config)
    differing = [name for name, x in zip(epilogue.operands, operands) if not varying(x).isdisjoint(axes)]
    reasons = _unsupported(lhs, rhs, *operands, epilogue=epilogue, **params)
    reasons += [f"it takes a {name} that is the same on all ranks along {axes}" for name in differing]
    lhs, rhs = matmul.vary_alike(lhs, rhs, axes=axes)
    if takes_reference("matmul_all_reduce", [lhs, rhs], implementation, reasons):
        out = reference(lhs, rhs, *operands, epilogue=epilogue, **params)
    else:
        params |= {"implementation": implementation, "config": settings}
        if epilogue:
            (out,) = with_epilogue_p.bind(lhs, rhs, *operands, epilogue=epilogue, **params)
        else:
            out = matmul_all_reduce_p.bind(lhs, rhs, **params)
    return out[0] if one_row else out


def reference(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue = NONE,
    config: Any = None,
) -> jax.Array:
    """What the operation means, in plain `lax`; `operands` are those of the epilogue."""
    del config
    total = lax.psum(jnp.matmul(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type), axes)
    return epilogue.apply([total], epilogue.split(rhs, operands)[1], total.dtype) if epilogue else total


def fused(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    axes: tuple[str, ...],
    precision: Any,
    preferred_element_type: Any,
    config: tuple[tuple[str, Any], ...],
    compute_capability: int,
    epilogue: Epilogue = NONE,
    implementation: str | None = None,
) -> jax.Array:
    """The operation by one kernel."""
    if reasons := _unsupported(
        lhs,
        rhs,
        *operands,
        axes=axes,
        precision=precision,
        preferred_element_type=preferred_element_type,
        epilogue=epilogue,
    ):
        raise Unsupported("matmul_all_reduce", reasons)
    precision = matmul.triton_precision(precision)
    assert precision is not None  # _unsupported has seen to it
    world = lax.axis_size(axes)
    rows = lhs.reshape(-1, lhs.shape[-1])
    (m, k), n = rows.shape, rhs.shape[1]
    out_dtype = preferred_element_type or lhs.dtype
    residual = epilogue.split(rhs, operands)[1].get("residual")
    on = {"world": world, "dtype": lhs.dtype, "out_dtype": out_dtype}
    chosen = choose(
        m,
        k,
        n,
        **on,
        compute_capability=compute_capability,
        residual=None if residual is None else residual.dtype,
        settings=dict(config),
    )
    kernel, keywords = launch(
        m,
        k,
        n,
        **on,
        precision=precision,
        epilogue=epilogue,
        config=chosen,
    )
    others = epilogue.rows_first(operands, 0)
    arrays = (rows, rhs, *others)
    if chosen.hopper and not chosen.small:
        # rhs in blocks and in halves of them; one more dimension, as the kernel that scatters has it for the ranks.
        arrays = (rows[None], rhs, rhs, *(x if x.ndim == 1 else x[None] for x in others))
    out = shmem_call(kernel, *arrays, axis_name=axes, implementation=implementation, **keywords)
    return out.reshape(*lhs.shape[:-1], n)


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
    epilogue: Epilogue = NONE,
) -> tuple[Any, dict[str, Any]]:
    """The kernel for lhs [m, k] and rhs [k, n], and the keywords with which `shmem_call` launches it."""
    size = np.dtype(dtype).itemsize
    out = jax.ShapeDtypeStruct((m, n), out_dtype)
    common = {
        "name": "matmul_all_reduce",
        "out_type": out,
        "cost_estimate": {"flops": 2 * m * n * k, "bytes_accessed": size * (m * k + k * n + m * n)},
    }
    if config.hopper and config.small:
        two_shots = config.shots == 2
        on = {"world": world, "dtype": dtype, "out_dtype": out_dtype, "scattered": two_shots, "gathered": two_shots}
        keywords = matmul.reduce_decode_hopper_keywords(
            m, k, n, **on, add_rows=config.add_rows, linger=config.linger, config=config
        )
        return matmul_reduce_decode_hopper_kernel, common | keywords | epilogue.keywords("bias", "residual")
    if config.hopper:
        keywords = matmul_reduce_scatter.hopper_keywords(m, k, n, out_dtype, config, epilogue)
        return matmul_all_reduce_hopper_kernel, common | keywords | _hopper_exchange(m, k, n, world, dtype, config)
    keywords = {
        **common,
        **matmul.tile_keywords(m, k, n, precision, config),
        **epilogue.keywords("bias", "residual"),
        "EXACT_WIRE": config.exact_wire,
    }
    wire = np.float32 if config.exact_wire else dtype
    if config.small:
        return matmul_all_reduce_small_kernel, keywords | _small_exchange(m, n, world, wire, out_dtype, config)
    tiles, peers, block = _exchanged(m, n, world, config)
    return matmul_all_reduce_kernel, keywords | {
        "grid": (2 * world - 1) * tiles,
        "scratch": {
            "partials": jax.ShapeDtypeStruct((peers, tiles, *block), wire),
            "sums": jax.ShapeDtypeStruct((world, tiles, *block), out_dtype),
        },
        "signals": {"arrived": (peers, tiles), "added": (world, tiles)},
        "GROUP_M": config.group_m,
    }


def _hopper_exchange(m: int, k: int, n: int, world: int, dtype: Any, config: "Config") -> dict[str, Any]:
    """What the ranks exchange in the kernel for many rows on Hopper, and when."""
    tiles, peers, block = _exchanged(m, n, world, config)
    groups = min(config.groups, tiles)
    a_group = math.ceil(tiles / groups)
    size = np.dtype(dtype).itemsize

    def cycles(length: int, chunks: int, programs: int) -> int:
        return matmul.pace(config.pace, length, size, chunks * config.chunk * size, min(programs, config.programs))

    return {
        "out_type": jax.ShapeDtypeStruct((1, m, n), dtype),
        "scratch": {
            "partials": jax.ShapeDtypeStruct((peers, tiles, *block), dtype),
            "sums": jax.ShapeDtypeStruct((world, tiles, *block), dtype),
            "outbox": jax.ShapeDtypeStruct((config.programs, PLACES.value, *block), dtype),
        },
        "signals": {"arrived": (peers, tiles), "added": (world, tiles), "tickets": 1},
        "TILES": tiles,
        "GROUPS": groups,
        "LAG": min(config.lag, groups - 1),
        "CHUNK": config.chunk,
        "PACE": cycles(k, 1, config.programs),
        # Of so many programs together the wire takes no more.
        "LAST_PACE": cycles(0, 1, peers * a_group),
        "SUM_PACE": cycles(0, peers, a_group),
    }


def _small_exchange(m: int, n: int, world: int, wire: Any, out_dtype: Any, config: "Config") -> dict[str, Any]:
    """The programs of the portable kernel for few rows, and what they exchange."""
    column_blocks = math.ceil(n / config.block_n)
    two_shots = config.shots == 2
    owned = math.ceil(m / world) if two_shots else m
    tiles = math.ceil((world * owned if two_shots else m) / config.block_m) * column_blocks
    parts = math.ceil(owned / config.add_rows) * column_blocks

    def words(boxes: int, of: Any) -> jax.ShapeDtypeStruct:
        elements = boxes * owned * column_blocks * config.block_n
        return jax.ShapeDtypeStruct((elements * np.dtype(of).itemsize // 4,), np.int32)

    return {
        "grid": tiles + parts * config.apart,
        "messages": {"partials": words(world, wire), "sums": words(world * two_shots, out_dtype)},
        "OWNED": owned,
        "SHOTS": config.shots,
        "APART": config.apart,
        "LINGER": config.linger,
        "ADD_ROWS": config.add_rows,
    }


def _exchanged(m: int, n: int, world: int, config: "Config") -> tuple[int, int, tuple[int, int]]:
    """How many tiles a rank owns, how many peers send it parts of them, and the shape of a tile."""
    # No scratch is empty.
    return math.ceil(matmul.tiles(m, n, config) / world), max(1, world - 1), (config.block_m, config.block_n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(matmul.Tile):
    """How the kernel splits its work.

    Attributes:
      block_m, block_n, block_k: rows and columns of a tile, and the part of K that a step of its loop takes: powers of
        2, at least 16.
      num_warps, num_stages: warps of a program, and steps of the loop in flight.
      group_m: row blocks whose tiles run together, for the L2 cache; not if `small`.
      exact_wire: partial sums travel as f32. Otherwise they are rounded to the operands' dtype on the way, which halves
        the bytes of bf16 and f16, and is what XLA does.
      small: partial sums and sums travel as words, without a signal. What follows is of this kind alone.
      shots: 1 if every rank adds up all rows, 2 if each adds up some and sends the sums.
      apart: programs of their own add up, so that those who multiply do not wait.
      linger: who adds up waits for a word of each rank before it looks at all of them, which pays where there are many.
      add_rows: rows of a tile that are added up at once, a power of 2.
      hopper: programs of warps with different roles, for f16 and bf16 on GPUs of compute capability 9.0. If `small`,
        `block_m` is at least 8, or the sum of two powers of 2, `block_n` 16 times `num_warps`, and who multiplies adds
        up. If not, the programs are persistent, and partial sums are rounded, as is the result, to the operands' dtype;
        of the settings above there are those up to `group_m`. What follows is of this kind alone.
      splits: programs that share a tile, if `small`: each multiplies a part of K.
      whole: so many tiles, the first ones, have a program of their own even so.
      programs: how many, if not: as many as the GPU has multiprocessors.
      chunk: elements of a tile that are sent at a time, a power of 2.
      pace: in which share of the time that tiles for others are multiplied they are sent, where products follow that
        hide it; all else at the speed of the wire. 0: as soon as it can be.
      groups: of a rank's tiles. The sums of a group travel while later ones are multiplied.
      lag: of so many more groups others' tiles are multiplied before the own ones of a group, while its parts arrive.
    """

    group_m: int = setting(8, least=1)
    exact_wire: bool = True
    shots: int = setting(2, least=1, most=2)
    apart: bool = True
    linger: bool = True
    add_rows: int = setting(8, least=1, most=256, power_of_2=True)
    splits: int = setting(1, least=1, most=32)
    whole: int = setting(0)
    programs: int = setting(matmul.MULTIPROCESSORS, least=1)
    chunk: int = setting(1024, least=16, most=1 << 16, power_of_2=True)
    pace: float = setting(0.95, most=1)
    groups: int = setting(1, least=1)
    lag: int = setting(1)


# Partial sums of so many elements are sent to every rank, because a second way over the wire takes longer than their
# bytes. At 16 rows of 8192, on 4 H200, both took the same time.
ONE_SHOT_SIZE = 2**17
# Between two ranks it is no more bytes, and saves time as long as there are few to be added up: on 2 H200 64 rows of
# 8192 took 65.4 us instead of 66.3, 128 rows 76.0 instead of 74.4.
ONE_SHOT_SIZE_OF_TWO = 2**19
# Partial sums of more elements are rounded on their way.
EXACT_SIZE = 2**14


def default_config(
    m: int,
    n: int,
    world: int,
    dtype: Any,
    compute_capability: int,
    shots: int | None = None,
    *,
    out_dtype: Any = None,
    exact_wire: bool | None = None,
) -> Config:
    """A configuration by shape.

    Args:
      m: rows of the result [m, n].
      n: its columns.
      world: number of ranks.
      dtype: of the operands.
      compute_capability: of the GPU, 90 for 9.0.
      shots: 1 or 2; None chooses.
      out_dtype: of the result; None is that of the operands.
      exact_wire: whether partial sums travel as f32; None chooses.
    """
    if m > 256:
        return Config(**matmul.large_tile(dtype, compute_capability))
    config = Config(
        **matmul.small_tile(m, dtype, compute_capability),
        **_exchange(m, n, world, dtype, out_dtype=out_dtype, shots=shots, exact_wire=exact_wire),
        small=True,
    )
    tiles = matmul.tiles(_rows_sent(m, world, config), n, config)
    return dataclasses.replace(config, apart=tiles > matmul.MULTIPROCESSORS)


def _exchange(
    m: int, n: int, world: int, dtype: Any, *, out_dtype: Any, shots: int | None, exact_wire: bool | None
) -> dict[str, Any]:
    """Settings of how few rows are added up; the arguments are those of `default_config`."""
    if shots is None:
        shots = 1 if m * n <= (ONE_SHOT_SIZE_OF_TWO if world == 2 else ONE_SHOT_SIZE) else 2
    if exact_wire is None:
        wider = np.dtype(out_dtype or dtype).itemsize > np.dtype(dtype).itemsize
        exact_wire = wider or m * n <= EXACT_SIZE
    owned = m if shots == 1 else math.ceil(m / world)
    itemsize = 4 if exact_wire else np.dtype(dtype).itemsize
    return {
        "shots": shots,
        "exact_wire": exact_wire,
        "linger": owned > 16,
        "add_rows": matmul.rows_added_at_once(owned, world, itemsize),
    }


def hopper_config(m: int, n: int, world: int) -> Config:
    """A configuration of the kernel for many rows on Hopper by shape; of sizes and ranks as `default_config`."""
    config = Config(hopper=True, exact_wire=False, group_m=16)
    if matmul.tiles(m, n, config) < config.programs:
        # Nothing hides what is sent, so it is sent at once, and by more programs.
        config = dataclasses.replace(config, block_n=128, num_stages=6, chunk=2048)
    # The sums of 32 tiles of a rank take three ranks some 16 us: so much, at the most, is left at the end.
    tiles = math.ceil(matmul.tiles(m, n, config) / world)
    groups = max(1, min(tiles // 32, 16))
    # Parts travel while as many tiles are multiplied as there are programs, about.
    between = 0.9 * config.programs / math.ceil(tiles / groups)
    lag = max(0, math.ceil((between - 1) / max(1, world - 1)))
    return dataclasses.replace(config, groups=groups, lag=lag)


def decode_hopper_config(
    m: int,
    n: int,
    world: int,
    dtype: Any,
    *,
    out_dtype: Any = None,
    shots: int | None = None,
    exact_wire: bool | None = None,
) -> Config:
    """A configuration by shape of the kernel for few rows on Hopper; the arguments are those of `default_config`."""
    exchange = _exchange(m, n, world, dtype, out_dtype=out_dtype, shots=shots, exact_wire=exact_wire)
    config = Config(**exchange, small=True, apart=False, hopper=True)
    return dataclasses.replace(config, **matmul.decode_hopper_tile(_rows_sent(m, world, config), n))


def _rows_sent(m: int, world: int, config: Config) -> int:
    """How many rows a kernel for few rows sends: with two shots as many to each rank, past the end of the result."""
    return m if config.shots == 1 else math.ceil(m / world) * world


def unsupported_on_hopper(
    k: int, n: int, *, out_dtype: Any = None, residual: Any = None, config: Config, **on: Any
) -> list[str]:
    """All that keeps the kernel for Hopper of this configuration from multiplying lhs [m, k] by rhs [k, n].

    Args:
      out_dtype: as of `default_config`.
      residual: the dtype of the residual, if there is one.
      **on: the operands' `dtype`, and `compute_capability`.
    """
    if config.small:
        return matmul.unsupported_on_hopper(k, n, **on)
    reasons = matmul_reduce_scatter.unsupported_on_hopper(k, n, residual=residual, **on)
    dtype, result = np.dtype(on["dtype"]), np.dtype(out_dtype or on["dtype"])
    if result != dtype:
        reasons.append(f"with small=False it gives results of the operands' dtype, {dtype}, not {result}")
    if config.exact_wire:
        reasons.append("with small=False it rounds partial sums")
    return reasons


def choose(
    m: int,
    k: int,
    n: int,
    *,
    world: int,
    dtype: Any,
    out_dtype: Any = None,
    compute_capability: int,
    residual: Any = None,
    settings: Mapping[str, Any],
) -> Config:
    """The configuration by shape, of whichever kernel can take the call and is the fastest, but for these settings.

    Args:
      m, k, n: a rank multiplies its lhs [m, k] by its rhs [k, n].
      world, dtype, out_dtype, compute_capability: as of `default_config`.
      residual: the dtype of the residual, if there is one.
      settings: what somebody asks for: but for `shots` and `exact_wire` of the portable kernel, unless they say
        `hopper`.

    Raises:
      NotImplementedError: if the settings ask for a kernel that cannot take the call.
    """
    on = {"dtype": dtype, "compute_capability": compute_capability}
    asked = {name: settings.get(name) for name in ("shots", "exact_wire")}
    portable = default_config(m, n, world, **on, **asked, out_dtype=out_dtype)
    few, many = decode_hopper_config(m, n, world, dtype, out_dtype=out_dtype, **asked), hopper_config(m, n, world)
    unsupported = functools.partial(unsupported_on_hopper, k, n, out_dtype=out_dtype, residual=residual, **on)
    if settings.get("hopper"):
        by_shape = few if settings.get("small") else many
        return matmul.with_settings("matmul_all_reduce", by_shape, settings, unsupported)
    faster = matmul.is_faster_for_few(_rows_sent(m, world, few), n, few, many, math.ceil(m / many.block_m))
    hopper = few if faster else many
    if settings.keys() <= asked.keys() and (hopper is few or "shots" not in settings):
        hopper = dataclasses.replace(hopper, **settings)
        if not unsupported(config=hopper):
            return hopper
    return dataclasses.replace(portable, **settings)


def _unsupported(
    lhs: Any,
    rhs: Any,
    *operands: Any,
    axes: tuple[str, ...],
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue,
) -> list[str]:
    """All that keeps the kernel from taking these operands."""
    del axes
    reasons = matmul.unsupported(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type)
    return reasons + epilogues.unsupported(epilogue, operands)


def _slower(
    lhs: Any,
    rhs: Any,
    *_: Any,
    axes: tuple[str, ...],
    precision: Any,
    preferred_element_type: Any,
    compute_capability: int,
    **__: Any,
) -> str | None:
    """Why XLA is known to be faster, if it is. Measured on 2 and 4 H200."""
    rows, world = math.prod(lhs.shape[:-1]), lax.axis_size(axes)
    if world == 1:
        return "there is one rank, so nothing to add up"
    if why := matmul.slower(lhs, rhs, rows, precision=precision, preferred_element_type=preferred_element_type):
        return why
    on = {"world": world, "dtype": lhs.dtype, "compute_capability": compute_capability}
    return matmul.slower_in_waves(rows, rhs.shape[1], choose(rows, *rhs.shape, **on, settings={}), world=world)


def case(lhs: Any, rhs: Any, *, team: Team, **params: Any) -> Case | None:
    """What the tables know a call by."""
    on = {"dtype": lhs.dtype, "compute_capability": team.compute_capability}

    def default(m: int) -> Config:
        return choose(m, *rhs.shape, world=team.world, **on, settings={})

    unsupported = functools.partial(unsupported_on_hopper, *rhs.shape, **on)
    return matmul.case(
        "matmul_all_reduce", lhs, rhs, kind=Config, default=default, unsupported=unsupported, team=team, **params
    )


matmul_all_reduce_p = bilinear(
    "matmul_all_reduce", reference=reference, fused=fused, slower=_slower, case=case, batch=epilogues.batch
)
# With an epilogue.
with_epilogue_p = collective(
    "matmul_all_reduce",
    reference=lambda *operands, **params: [reference(*operands, **params)],
    fused=lambda *operands, **params: [fused(*operands, **params)],
    slower=_slower,
    batch=epilogues.batch,
)
