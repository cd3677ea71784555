"""`ragged_all_to_all`: rows from each rank to each other one, as many as arrays say."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops.ragged_all_to_all.portable import VARIANTS, Call
from jaxtaxfree.ops.untrusted import as_int32, nothing
from jaxtaxfree.ops.variant import choose, settings_of
from jaxtaxfree.primitive import Lasting, Unsupported, check_implementation, collective, symbolic, takes_reference
from jaxtaxfree.settings import Settings
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.teams import Team, check_axes, vary, varying

# Elements of an array, so that indices within a transfer have 32 bits.
MOST_ELEMENTS = 2**31 - 2**17
# What travels as it is; other types of up to 32 bits travel as integers of their size.
FLOATS = ("float32", "bfloat16", "float16")


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: str | Sequence[str],
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> jax.Array:
    """`lax.ragged_all_to_all`, as one kernel on NVIDIA GPUs: sizes are read on the device, and no host is asked.

    Rank r sends `operand[input_offsets[j] : input_offsets[j] + send_sizes[j]]` to rank j, whose result has these rows
    from `output_offsets[j]` on. Call it inside `jax.shard_map`.

    Args:
      operand: [M, ...], of any dtype of up to 32 bits.
      output: [N, ...], of the same dtype. The result where nothing arrives.
      input_offsets, send_sizes: i32[world], of the rows for each rank.
      output_offsets: i32[world], where they begin in the result of each rank.
      recv_sizes: i32[world], how many rows come from each rank.
      axis_name: the mesh axis, or axes.
      implementation: "fused": the kernel. "xla": `lax.ragged_all_to_all`, on CPUs an all-gather. None: the kernel,
        where it can run and is not known to be slower. "simulate": the kernel, run for all ranks on the CPU; see
        `jaxtaxfree.simulator`.
      config: how the kernel splits its work. The sizes decide whatever it leaves out.

    Returns: [N, ...]. Rows of different ranks must not overlap. The kernel, and what CPUs run, check all offsets and
      sizes before they address anything: where a transfer does not fit into the operand or the result, or `recv_sizes`
      says something else, the result of the receiver is NaN (of integers all bits: -1, or the largest number). The
      kernel says so as well: `jtf.block_until_ready` raises `GarbageError` in the process of the rank that was given
      the number, and in that of the receiver. Later calls are right. CPUs, and XLA's operation on GPUs, raise nothing.

    It is linear in `operand` and `output`, and its transpose is the same operation the other way round.

    Raises:
      ValueError: if the arrays do not fit together, or the implementation or setting does not exist.
      TypeError: if an axis or `config` has the wrong type.
      NameError: if `axis_name` is not bound.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here. The error gives all reasons.
      GarbageError: later, by `jtf.block_until_ready`: see above.
    """
    operand, output = jnp.asarray(operand), jnp.asarray(output)
    tables = [jnp.asarray(x) for x in (input_offsets, send_sizes, output_offsets, recv_sizes)]
    axes = check_axes(axis_name, "ragged_all_to_all")
    check_implementation(implementation)
    _check_operands(operand, output, tables, lax.axis_size(axes))
    settings = settings_of("ragged_all_to_all", VARIANTS, config)
    tables = [as_int32(x) for x in tables]
    operands = [operand, output, *tables]
    reasons = _unsupported(operand, output)
    if takes_reference("ragged_all_to_all", operands[:2], implementation, reasons):
        return reference(*operands, axes=axes)[0]
    along = set(axes).union(*map(varying, operands))
    return ragged_all_to_all_p.bind(
        *(vary(x, along) for x in operands), axes=axes, implementation=implementation, config=settings
    )[0]


NAMES = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


def _check_operands(operand: jax.Array, output: jax.Array, tables: Sequence[jax.Array], world: int) -> None:
    if operand.ndim == 0 or operand.shape[1:] != output.shape[1:] or operand.dtype != output.dtype:
        raise ValueError(
            "ragged_all_to_all takes an operand [M, ...] and an output [N, ...] of one dtype, not "
            f"{operand.dtype}{list(operand.shape)} and {output.dtype}{list(output.shape)}."
        )
    for name, x in zip(NAMES, tables, strict=True):
        if x.shape != (world,) or not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(
                f"ragged_all_to_all takes {name} as integers [{world}], one for each rank, not "
                f"{x.dtype}{list(x.shape)}."
            )


def reference(operand: jax.Array, output: jax.Array, *tables: jax.Array, axes: tuple[str, ...], **_: Any) -> list[Any]:
    """What the operation means: XLA's own one, which CPUs have not; there by an all-gather."""
    along = set(axes).union(*map(varying, (operand, output, *tables)))
    operands = [vary(x, along) for x in (operand, output, *tables)]
    return [
        lax.platform_dependent(
            *operands,
            cpu=lambda *operands: by_all_gather(*operands, axes=axes),
            default=lambda *operands: lax.ragged_all_to_all(*operands, axis_name=axes),
        )
    ]


def by_all_gather(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    axes: tuple[str, ...],
) -> jax.Array:
    """The same without a collective of its own: every rank gets all rows, and takes its own."""
    me = lax.axis_index(axes)
    everything = lax.all_gather(operand, axes)
    first, to, sizes = (lax.all_gather(x, axes)[:, me] for x in (input_offsets, output_offsets, send_sizes))
    row = jnp.arange(output.shape[0], dtype=jnp.int32)[:, None]
    inside = (row >= to) & (row < to + sizes)  # [N, world]
    source = jnp.argmax(inside, axis=1)
    at = jnp.clip(first[source] + row[:, 0] - to[source], 0, max(0, operand.shape[0] - 1))
    there = jnp.any(inside, axis=1).reshape(-1, *[1] * (output.ndim - 1))
    out = jnp.where(there, everything[source, at], output) if operand.shape[0] else output
    # As the kernel checks them.
    fits = (sizes >= 0) & (first >= 0) & (first <= operand.shape[0] - sizes)
    fits &= (to >= 0) & (to <= output.shape[0] - sizes) & (sizes == recv_sizes)
    return jnp.where(jnp.all(fits), out, nothing(out.dtype))


def fused(
    operand: jax.Array,
    output: jax.Array,
    *tables: jax.Array,
    axes: tuple[str, ...],
    config: tuple[tuple[str, Any], ...],
    compute_capability: int,
    implementation: str | None = None,
) -> list[jax.Array]:
    """The operation by one kernel."""
    del compute_capability
    if reasons := _unsupported(operand, output):
        raise Unsupported("ragged_all_to_all", reasons)
    dtype = _travels_as(operand.dtype)
    rows, rest = (_as(x, dtype).reshape(x.shape[0], -1) for x in (operand, output))
    call = Call(rows_in=rows.shape[0], rows_out=rest.shape[0], d=rows.shape[1], world=lax.axis_size(axes), dtype=dtype)
    chosen = choose("ragged_all_to_all", VARIANTS, call, dict(config))
    out = shmem_call(
        chosen.variant.kernel, rows, rest, *tables, axis_name=axes, implementation=implementation, **chosen.keywords
    )
    return [_as(out, output.dtype).reshape(output.shape)]


def _travels_as(dtype: Any) -> np.dtype:
    if dtype.name in FLOATS or (jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize in (1, 2, 4)):
        return np.dtype(dtype)
    return np.dtype(f"int{8 * dtype.itemsize}")


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    """The same bits as another type of the same size."""
    if x.dtype == dtype:
        return x
    return x.astype(dtype) if bool in (x.dtype, dtype) else lax.bitcast_convert_type(x, dtype)


def _unsupported(operand: Any, output: Any) -> list[str]:
    """All that keeps the kernel from taking these operands."""
    if reasons := symbolic(operand, output):
        return reasons
    if operand.dtype.itemsize > 4 or jnp.issubdtype(operand.dtype, jnp.complexfloating):
        reasons.append(Lasting(f"it takes types of up to 32 bits, not {operand.dtype}: cast the operand"))
    if operand.size == 0 or output.size == 0:
        reasons.append(f"an operand is empty: {list(operand.shape)}, {list(output.shape)}")
    if (most := max(operand.size, output.size)) > MOST_ELEMENTS:
        reasons.append(f"it takes at most {MOST_ELEMENTS} elements, not {most}")
    return reasons


def _slower(*_: Any, axes: tuple[str, ...], **__: Any) -> str | None:
    """Why XLA is taken."""
    return "there is one rank, so nothing to send" if lax.axis_size(axes) == 1 else None


def case(operand: Any, output: Any, *_: Any, team: Team, **__: Any) -> Case:
    """What the tables know a call by."""
    d = math.prod(operand.shape[1:])

    def chosen(rows: int, settings: Mapping[str, Any]) -> Any:
        call = Call(rows_in=rows, rows_out=rows, d=d, world=team.world, dtype=_travels_as(operand.dtype))
        return choose("ragged_all_to_all", VARIANTS, call, settings)

    return Case(
        operation="ragged_all_to_all",
        device_kind=team.device_kind,
        same={"world": team.world, "dtype": operand.dtype.name, "d": d},
        along="rows",
        size=output.shape[0],
        choose=chosen,
    )


ragged_all_to_all_p = collective(
    "ragged_all_to_all", reference=reference, fused=fused, slower=_slower, dimensions=None, case=case
)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[jax.Array], list[Any]]:
    """Linear in the operand and the output."""
    out = ragged_all_to_all_p.bind(*primals, **params)
    if all(type(x) is ad.Zero for x in tangents[:2]):
        return out, [ad.Zero(jax.typeof(out[0]).to_tangent_aval())]
    dots = [ad.instantiate_zeros(x) for x in tangents[:2]]
    return out, ragged_all_to_all_p.bind(*dots, *primals[2:], **params)


def _transpose(cts: Any, operand: Any, output: Any, *tables: Any, **params: Any) -> list[Any]:
    """What a rank received it sends back; what it received nothing for is the output's."""
    [ct] = cts
    if type(ct) is ad.Zero:
        return [None] * 6
    first, sizes, to, received = tables
    axes = params["axes"]
    back, there = (lax.all_to_all(x, axes, 0, 0, tiled=True) for x in (to, first))
    operand_ct = output_ct = None
    if ad.is_undefined_primal(operand):
        zeros = vary(jnp.zeros(operand.aval.shape, ct.dtype), varying(ct))
        [operand_ct] = ragged_all_to_all_p.bind(ct, zeros, back, received, there, sizes, **params | {"config": ()})
    if ad.is_undefined_primal(output):
        row = jnp.arange(ct.shape[0], dtype=jnp.int32)[:, None]
        inside = jnp.any((row >= back) & (row < back + received), axis=1)
        output_ct = jnp.where(inside.reshape(-1, *[1] * (ct.ndim - 1)), jnp.zeros_like(ct), ct)
    return [operand_ct, output_ct, *[None] * 4]


ad.primitive_jvps[ragged_all_to_all_p] = _jvp
ad.primitive_transposes[ragged_all_to_all_p] = _transpose
