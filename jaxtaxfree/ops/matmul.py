"""What the operations that fuse a matrix product share: checks, precisions, tiles by shape, and launches of them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from triton import next_power_of_2

from jaxtaxfree import gluon
from jaxtaxfree.dispatch import Case
from jaxtaxfree.kernels.decode_hopper import PIECE
from jaxtaxfree.kernels.tiles import box_of
from jaxtaxfree.primitive import DTYPES, Unsupported, hashable, symbolic
from jaxtaxfree.settings import Settings, setting
from jaxtaxfree.shmem import SHARED_MEMORY
from jaxtaxfree.teams import Team, vary, varying

# Of the warps that multiply on Hopper. Each has a part of them, and of the rows of a tile.
PARTITIONS = 2
# Up to so many rows of all ranks are few, for which there are kernels for Hopper. A tile of these has at most so many.
FEW_ROWS = 512
ROWS_OF_A_TILE = 256
# Of an H100 or H200. Each runs one program of a product at a time.
MULTIPROCESSORS = 132
# Why XLA is taken where nobody has measured which is faster.
UNMEASURED = "the kernel has not been measured against XLA yet"


def check_operands(operation: str, lhs: jax.Array, rhs: jax.Array) -> None:
    """Raises ValueError if an operand is a scalar, or rhs has more than two dimensions.

    `jnp.matmul` takes three dimensions for a batch of matrices. Weights [N, H, D] of attention heads are meant as one
    matrix, and where the sizes happen to fit, a batch of products would come out without an error.
    """
    if lhs.ndim == 0 or rhs.ndim == 0:
        raise ValueError(f"{operation} takes no scalars: lhs has shape {lhs.shape}, rhs {rhs.shape}.")
    if rhs.ndim > 2:
        first, last = rhs.shape[0], rhs.shape[-1]
        raise ValueError(
            f"{operation} takes rhs as a matrix [K, N], not {list(rhs.shape)}: reshape it to "
            f"[{math.prod(rhs.shape[:-1])}, {last}] where all dimensions but the last are contracted (as in einsum's "
            f"'...nh,nhd->...d'; lhs then ends in one such dimension, too) or to [{first}, {math.prod(rhs.shape[1:])}] "
            "where the first one is ('...d,dnh->...nh'), and use jax.vmap for a batch of matrices."
        )


def check_contraction(operation: str, lhs: jax.Array, rhs: jax.Array, parts: int = 1) -> None:
    """Raises ValueError if `lhs @ rhs` is no product, where the last dimension of lhs is gathered of so many parts."""
    size = parts * lhs.shape[-1]
    if size != rhs.shape[0]:
        gathered = f" ({lhs.shape[-1]} from each of {parts} ranks)" if parts > 1 else ""
        raise ValueError(
            f"{operation} contracts the last dimension of lhs with the first of rhs, but lhs is "
            f"{list(lhs.shape)} and rhs is {list(rhs.shape)}: {size}{gathered} is not {rhs.shape[0]}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile(Settings):
    """The settings that every fused product has, in the words of its own `Config`."""

    block_m: int = setting(128, least=8, most=256)
    block_n: int = setting(256, least=8, most=256, power_of_2=True)
    block_k: int = setting(64, least=8, most=1024, power_of_2=True)
    num_warps: int = setting(8, least=1, most=16, power_of_2=True)
    num_stages: int = setting(4, least=1, most=32)
    small: bool = False
    hopper: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rest = self.block_m & (self.block_m - 1)  # without the least power of 2 that it is a sum of
        if rest & (rest - 1) or self.block_m % 8:
            self.refuse("block_m", "a multiple of 8 and a power of 2, or the sum of two")
        if rest and not (self.hopper and self.small):
            self.refuse("block_m", "a power of 2 where not both hopper and small are set")
        if self.hopper and self.num_stages < 2:
            self.refuse("num_stages", "at least 2 with hopper=True, where a stage is released one step late")


def check_precision(precision: Any, preferred_element_type: Any) -> dict[str, Any]:
    """The two keywords of `jnp.matmul` as parameters of a primitive."""
    return {
        "precision": jax.config.jax_default_matmul_precision if precision is None else precision,
        "preferred_element_type": None if preferred_element_type is None else np.dtype(preferred_element_type),
    }


def bind(primitive: Any, *operands: jax.Array, axes: tuple[str, ...], **params: Any) -> Any:
    """Binds a primitive, whose operands must vary along the same axes."""
    return primitive.bind(*vary_alike(*operands, axes=axes), axes=axes, **params)


def vary_alike(*operands: jax.Array, axes: tuple[str, ...]) -> list[jax.Array]:
    """The operands as values that vary along these axes, and along those of each other."""
    along = set(axes).union(*map(varying, operands))
    return [vary(x, along) for x in operands]


def unsupported(lhs: Any, rhs: Any, *, precision: Any, preferred_element_type: Any) -> list[str]:
    """All that keeps every kernel from taking these operands."""
    reasons = symbolic(lhs, rhs)
    if lhs.dtype != rhs.dtype:
        reasons.append(f"it takes operands of one dtype, not {lhs.dtype} and {rhs.dtype}")
    elif lhs.dtype.name not in DTYPES:
        reasons.append(f"it takes {', '.join(DTYPES)}, not {lhs.dtype}")
    if preferred_element_type is not None and preferred_element_type.name not in DTYPES:
        reasons.append(f"it gives {', '.join(DTYPES)}, not {preferred_element_type}")
    if rhs.ndim != 2 or lhs.ndim < 2:
        reasons.append(f"it takes lhs of two or more dimensions and rhs of two, not {lhs.ndim} and {rhs.ndim}")
    if 0 in lhs.shape or 0 in rhs.shape:
        reasons.append(f"an operand is empty: {list(lhs.shape)}, {list(rhs.shape)}")
    if triton_precision(precision) is None:
        reasons.append(f"it has no precision {precision}")
    return reasons


def slower(lhs: Any, rhs: Any, rows: int, *, precision: Any, preferred_element_type: Any) -> str | None:
    """Why XLA takes a product of so many rows, if it does whatever the configuration: no kernel takes the operands, or
    XLA's product of f32 is known to be faster. Measured on H200.
    """
    if reasons := unsupported(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type):
        return "; ".join(reasons)
    if lhs.dtype == np.float32:
        if triton_precision(precision) != "tf32" and 2 * rows * math.prod(rhs.shape) > 1e8:
            # Triton multiplies such operands without tensor cores: 6 TFLOP/s.
            return "XLA's f32 products of more than TF32 precision are faster than Triton's"
        if rows > 64:
            return "XLA's TF32 products of many rows are faster than Triton's"
    return None


def case(
    operation: str,
    lhs: Any,
    rhs: Any,
    *,
    kind: Any,
    default: Callable[[int], Any],
    unsupported: Callable[..., list[str]],
    team: Team,
    precision: Any,
    preferred_element_type: Any,
    rhs_transposed: bool = False,
    **_: Any,
) -> Case | None:
    """What the tables know a product of a rank's operands [m, k] and [k, n] by; None if none of its kind is in them.

    Args:
      kind: the operation's `Config`.
      default: of the case, by m.
      unsupported: (*, config) -> all that keeps the kernel for Hopper of a configuration from taking the call.
    """
    alike = lhs.dtype == rhs.dtype and preferred_element_type in (None, lhs.dtype)
    if not alike or rhs_transposed or triton_precision(precision) != "tf32":
        return None

    def take(settings: dict[str, Any]) -> tuple[tuple[str, Any], ...] | None:
        config = kind(**settings)
        return None if config.hopper and unsupported(config=config) else hashable(settings)

    return Case(
        operation=operation,
        device_kind=team.device_kind,
        same={"world": team.world, "dtype": lhs.dtype.name, "k": rhs.shape[0], "n": rhs.shape[1]},
        along="m",
        size=math.prod(lhs.shape[:-1]),
        default=default,
        take=take,
    )


def with_settings(
    operation: str, by_shape: Any, settings: Mapping[str, Any], unsupported: Callable[..., list[str]]
) -> Any:
    """A configuration by shape of a kernel for Hopper, but for the settings by which a caller asks for the kernel.

    Args:
      unsupported: as of `case`.

    Raises:
      NotImplementedError: if it cannot take the call.
    """
    config = dataclasses.replace(by_shape, **settings)
    if reasons := unsupported(config=config):
        raise Unsupported(f"{operation} with hopper=True", reasons)
    return config


def large_tile(dtype: Any, compute_capability: int) -> dict[str, Any]:
    """Settings for products of many rows, by dtype and GPU (90 for 9.0)."""
    wide = _wide(dtype)
    if not has_big_shared_memory(compute_capability):
        return {"block_n": 128, "block_k": 32 // wide, "num_stages": 3}
    return {"block_k": 64 // wide}


def small_tile(rows: int, dtype: Any, compute_capability: int) -> dict[str, Any]:
    """Settings for products of at most 256 rows: all of them in few tiles, and much of rhs in flight."""
    block_m = min(128, max(16, next_power_of_2(rows)))
    block_k, stages = (128, 6) if block_m <= 32 else (64, 8)
    if not has_big_shared_memory(compute_capability):
        block_k, stages = 64, 3
    return {
        "block_m": block_m,
        "block_n": 64,
        "block_k": block_k // _wide(dtype),
        "num_warps": 4,
        "num_stages": stages,
    }


def has_big_shared_memory(compute_capability: int) -> bool:
    """Whether a block may have 227 KiB of shared memory; on other GPUs it has 99 to 163."""
    return SHARED_MEMORY.get(compute_capability, 0) >= 227 << 10


def has_little_shared_memory(compute_capability: int) -> bool:
    """Whether a block may have 99 KiB of shared memory, as on GPUs that are not for data centres."""
    return SHARED_MEMORY.get(compute_capability, 1 << 20) < 128 << 10


def _wide(dtype: Any) -> int:
    """1 for bf16 and f16, 2 for f32: shared memory holds half as much of K."""
    return np.dtype(dtype).itemsize // 2


def tiles(m: int, n: int, config: Any) -> int:
    """Number of tiles of a product [m, n]."""
    return math.ceil(m / config.block_m) * math.ceil(n / config.block_n)


def tile_keywords(m: int, k: int, n: int, precision: str, config: Any) -> dict[str, Any]:
    """What `shmem_call` needs to know of the product and its tiles, for every kernel alike."""
    return {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "M": m,
        "N": n,
        "K": k,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PRECISION": precision,
    }


def unsupported_on_hopper(
    k: int, n: int, *, dtype: Any, compute_capability: int, rhs_transposed: bool = False
) -> list[str]:
    """All that keeps a kernel for Hopper from multiplying a rank's lhs [m, k] and rhs [k, n]."""
    reasons = []
    if compute_capability != 90:
        reasons.append(f"it is for GPUs of compute capability 9.0, not {compute_capability / 10}")
    elif why := gluon.unsupported("it", compute_capability):
        reasons.append(why)
    if np.dtype(dtype).itemsize != 2:
        reasons.append(f"it takes float16 and bfloat16, not {dtype}")
    if k % 8 or n % 8:
        reasons.append(f"TMA takes rows of multiples of 16 bytes, and these have {k} and {n} elements")
    if rhs_transposed:
        reasons.append("it takes rhs as [K, N] alone")
    return reasons


def hopper_keywords(
    m: int,
    k: int,
    n: int,
    out_dtype: Any,
    config: Any,
    *,
    rhs_transposed: bool = False,
    stored: int | None = None,
) -> dict[str, Any]:
    """As `tile_keywords`, for the kernels for Hopper.

    Args:
      stored: at most so many columns are stored at a time.
    """
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    # 128 bytes, which is as much as TMA moves at a time.
    columns = min(128 // np.dtype(out_dtype).itemsize, block_n // 2, stored or block_n)
    return {
        "grid": config.programs,
        "num_warps": config.num_warps // PARTITIONS,
        "descriptors": {
            "lhs_desc": (1, box_of(m, block_m), block_k),
            "rhs_desc": (block_n, block_k) if rhs_transposed else (block_k, block_n),
            "half_desc": (block_n // 2, block_k) if rhs_transposed else (block_k, block_n // 2),
            "out_desc": (1, block_m // PARTITIONS, columns),
        },
        "M": m,
        "N": n,
        "K": k,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": config.group_m,
        "STAGES": config.num_stages,
    }


def decode_hopper_tile(rows: int, n: int, *, products: int = 1, others: int = 0) -> dict[str, Any]:
    """Settings for products of few rows in a kernel for Hopper, by shape.

    Args:
      rows: of the product, few.
      n: columns of `rhs`.
      products: by how many matrices like it the rows are multiplied.
      others: programs that do something else.
    """
    # Wider tiles where narrow ones are more than a GPU runs at a time; not measured of two products. Of more rows, that
    # programs read again and again from the L2 cache, tiles are wide in any case.
    block_n = 128 if products == 1 and (n > 64 * MULTIPROCESSORS or rows > 128) else 64
    blocks = math.ceil(rows / ROWS_OF_A_TILE)
    tiles = blocks * math.ceil(n / block_n)
    waves, left = divmod(tiles, MULTIPROCESSORS)
    # Of those left over from whole waves one program alone adds up what the others leave. After several waves programs
    # no longer begin together, and the last one is not felt.
    most = 8 if waves == 0 else 4 if waves < 3 else 1
    if rows > ROWS_OF_A_TILE:
        splits = min(range(1, most + 1), key=lambda splits: _time_of_waves(tiles, splits, others))
    elif left and (rows > 64 or left <= 40):
        splits = max(1, min((MULTIPROCESSORS - (0 if waves else others)) // left, most))
    else:
        # Of up to 64 rows some 40 programs keep the memory busy, and to wait for each other takes longer than it saves.
        splits = 1
    block_m, block_k = _rows_of_a_block(math.ceil(rows / blocks), splits), 64
    stage = 2 * block_k * (block_m + products * block_n)  # bytes
    return {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": block_k,
        "num_warps": products * block_n // 16,
        # Beside them a piece of the tile, in f32, is put in order to be stored.
        "num_stages": min(16, ((226 << 10) - 4 * min(PIECE.value, products * block_m * block_n)) // stage),
        "splits": splits,
        "whole": waves * MULTIPROCESSORS if splits > 1 else 0,
    }


def _rows_of_a_block(rows: int, splits: int) -> int:
    """The least rows of a tile that has so many: a power of 2, or above 64 the sum of it and another one.

    Args:
      splits: programs that share the tile. Each of them, up to a power of 2, can add up 8 of the least power.
    """
    whole = max(8, next_power_of_2(rows))
    if whole <= 64:
        return whole
    rest = max(16, 8 * _power_of_2_up_to(splits), next_power_of_2(rows - whole // 2))
    return min(whole, whole // 2 + rest)


def _time_of_waves(tiles: int, splits: int, others: int) -> float:
    """What tiles take in the time of one of them, and 0.2 of that for each wave of programs.

    Args:
      splits: programs that share a tile of those that are left over from whole waves.
      others: as of `decode_hopper_tile`. They are soon done, but not before all programs of a few tiles begin.
    """
    waves, left = divmod(tiles, MULTIPROCESSORS)
    places = MULTIPROCESSORS if waves or splits == 1 else MULTIPROCESSORS - others
    return waves * 1.2 + math.ceil(left * splits / places) * (1 / splits + 0.2)


def is_faster_for_few(
    rows: int, n: int, few: Any, many: Any, row_blocks: int, *, products: int = 1, others: int = 0
) -> bool:
    """Whether the kernel for few rows is the faster one on Hopper, by the waves of programs that both need.

    Args:
      rows: of the product, by [k, n] matrices; at most ROWS_OF_A_TILE are the former's in any case.
      few, many: configurations of both kernels.
      row_blocks: of tiles of the latter.
      products, others: as of `decode_hopper_tile`.
    """
    if not ROWS_OF_A_TILE < rows <= FEW_ROWS:
        return rows <= FEW_ROWS
    # Its programs go on without a pause.
    waves = math.ceil(row_blocks * math.ceil(products * n / many.block_n) / many.programs) + 0.25
    of_many = waves * many.block_m * many.block_n
    of_tile = _time_of_waves(tiles(rows, n, few), few.splits, others)
    return of_tile * few.block_m * products * few.block_n < of_many


def slower_in_waves(rows: int, n: int, config: Any, *, world: int, others: int = 0) -> str | None:
    """Why XLA is known to be faster than a kernel for few rows on Hopper, if it is. Measured on 2 H200.

    Args:
      rows, n, config: of the product, and of the kernel.
      others: as of `decode_hopper_tile`.
    """
    number = tiles(rows, n, config)
    if world > 2 or not (config.hopper and config.small) or rows <= ROWS_OF_A_TILE or number <= MULTIPROCESSORS:
        return None
    waves = _time_of_waves(number, config.splits, others) / 1.2
    full = rows * n / (waves * MULTIPROCESSORS * config.block_m * config.block_n)
    if full < 0.78 or (others and rows < 384):
        return f"its tiles of {rows} rows need several waves of programs, and these are full to {full:.0%}"
    return None


def decode_hopper_keywords(rows: int, k: int, n: int, config: Any, *descriptors: str) -> dict[str, Any]:
    """What `shmem_call` needs to know of such a product.

    Args:
      rows, k, n: so many rows are multiplied by matrices [k, n].
      config: with the settings of `decode_hopper_tile`.
      *descriptors: the kernel's parameters for them.
    """
    number = tiles(rows, n, config)
    splits = min(config.splits, math.ceil(k / config.block_k)) if config.whole < number else 1
    whole = config.whole if splits > 1 else 0
    shared = {"shares": None, "left": None, "scratch": {}, "signals": {}}
    if splits > 1:
        size = len(descriptors) * config.block_n * config.block_m
        shares = jax.ShapeDtypeStruct((number - whole, splits, size), np.float32)
        shared = {"scratch": {"shares": shares}, "signals": {"left": number - whole}}
    return {
        **shared,
        "grid": whole + (number - whole) * splits,
        "num_warps": config.num_warps,
        "together": splits,
        "descriptors": dict.fromkeys(descriptors, (config.block_k, config.block_n)),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "SPLITS": splits,
        "WHOLE": whole,
        # A power of 2, each with 8 rows at least. Who has a whole tile adds nothing up.
        "ADDERS": 1 if whole else min(_power_of_2_up_to(splits), (config.block_m & -config.block_m) // 8),
    }


def _power_of_2_up_to(most: int) -> int:
    return 1 << (most.bit_length() - 1)


def rows_added_at_once(owned: int, world: int, itemsize: int) -> int:
    """How many of the rows that a rank owns one program of few rows adds up at a time.

    Args:
      itemsize: of what arrives.
    """
    # 4 warps have 64 columns, and a thread 32 words in its registers.
    most = 2**14 // (next_power_of_2(world) * 64 * itemsize)
    return max(1, min(next_power_of_2(owned), most))


def reduce_decode_hopper_keywords(
    m: int,
    k: int,
    n: int,
    *,
    world: int,
    scattered: bool,
    gathered: bool,
    dtype: Any,
    out_dtype: Any,
    add_rows: int | None = None,
    linger: bool | None = None,
    config: Any,
) -> dict[str, Any]:
    """What `shmem_call` needs to know for the kernel that adds up products of few rows on Hopper.

    Args:
      m, k, n: the result is [m, n], and lhs [..., k].
      scattered: each rank adds up rows of its own.
      gathered: and sends the sums to all, or has them from the others.
      add_rows, linger: as of `matmul_all_reduce`; None chooses.
    """
    owned = math.ceil(m / world) if gathered else m
    rows = world * owned if scattered else owned
    keywords = decode_hopper_keywords(rows, k, n, config, "rhs_desc")
    keywords["descriptors"]["lhs_desc"] = (box_of(rows, config.block_m), config.block_k)
    blocks = math.ceil(rows / config.block_m)
    adders = blocks * keywords["ADDERS"]
    columns = math.ceil(n / config.block_n) * config.block_n
    wire = np.dtype(np.float32 if config.exact_wire else dtype)
    add_rows = add_rows or rows_added_at_once(owned, world, wire.itemsize)
    if adders > 1:
        add_rows = max(8, min(add_rows, next_power_of_2(math.ceil(owned / adders))))

    def words(of: np.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((world * owned * columns * of.itemsize // 4,), np.int32)

    messages = {"partials": words(wire)}
    if gathered:
        messages["sums"] = words(np.dtype(out_dtype))
    return {
        **keywords,
        "together": blocks * keywords["SPLITS"],
        **({} if gathered else {"sums": None}),
        "out_type": jax.ShapeDtypeStruct((m, n), out_dtype),
        "messages": messages,
        "M": m,
        "N": n,
        "K": k,
        "OWNED": owned,
        "SCATTERED": scattered,
        "EXACT_WIRE": config.exact_wire,
        "ADD_ROWS": add_rows,
        "LINGER": owned > 16 if linger is None else linger,
    }


_MULTIPLY_ADDS = 2048  # of 16-bit numbers, in a cycle of a multiprocessor of compute capability 9.0
_WIRE = 245  # bytes that NVLink 4 takes in a cycle: 393 GB/s at 1.6 GHz


def pace(share: float, length: int, itemsize: int, chunk: int, programs: int) -> int:
    """Cycles from one chunk that a program for Hopper sends to the next one; 0 for as fast as it can.

    What goes to or comes from other ranks travels in a share of the time in which it is multiplied, so that it is there
    in time, and evenly. But never faster than the wire takes it.

    Args:
      share: of the time at the tensor cores' full speed.
      length: multiplications and additions for each element that travels.
      chunk: bytes.
    """
    product = length / itemsize / _MULTIPLY_ADDS
    return math.ceil(max(share * product, programs / _WIRE) * chunk) if share else 0


def rows_back(x: jax.Array, lengths: tuple[int, ...], axis: int) -> jax.Array:
    """What `rows_first` made of an array, as it was; of another length along the axis."""
    return jnp.moveaxis(x.reshape(-1, *lengths[1:], x.shape[-1]), 0, axis)


def rows_first(x: jax.Array, axis: int) -> tuple[jax.Array, tuple[int, ...]]:
    """[..., M, ..., K] as [M * others, K], the given axis counting slowest; and the lengths of all but the last."""
    moved = jnp.moveaxis(x, axis, 0)
    return moved.reshape(-1, x.shape[-1]), moved.shape[:-1]


_TRITON_PRECISIONS = {
    None: "tf32",
    lax.Precision.DEFAULT: "tf32",
    lax.Precision.HIGH: "tf32x3",
    lax.Precision.HIGHEST: "ieee",
    lax.DotAlgorithmPreset.TF32_TF32_F32: "tf32",
    lax.DotAlgorithmPreset.TF32_TF32_F32_X3: "tf32x3",
    lax.DotAlgorithmPreset.F32_F32_F32: "ieee",
}


def triton_precision(precision: Any) -> str | None:
    """Triton's name for the precision of f32 products; None if it has none."""
    if isinstance(precision, str):
        try:
            precision = lax.Precision(precision)  # knows "highest", "float32", ...
        except ValueError:
            precision = getattr(lax.DotAlgorithmPreset, precision, precision)
    if isinstance(precision, tuple) and precision[0] == precision[1]:
        return triton_precision(precision[0])
    return _TRITON_PRECISIONS.get(precision)
