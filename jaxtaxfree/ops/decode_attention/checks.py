"""Which arguments `decode_attention` takes, and which its kernel does."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxtaxfree.ops.decode_attention.spec import Spec
from jaxtaxfree.ops.kv_cache import KVCache, cache_faults
from jaxtaxfree.primitive import DTYPES, Lasting, symbolic

OUTPUTS = ("replicated", "heads")


def static[T](name: str, x: Any, kind: str, convert: Callable[[Any], T]) -> T:
    """A parameter that is compiled into the program; raises TypeError if it is none of its kind."""
    try:
        return convert(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"decode_attention takes {kind} for {name}, known when it is traced, not {x!r}.") from error


def usual_scale(head_size: int) -> float:
    """The usual scale of the logits."""
    if jax.export.is_symbolic_dim(head_size):
        raise TypeError(
            f"decode_attention takes scale as a number here, because its default, 1 / sqrt(H), is compiled into the "
            f"program, and the head size of query is symbolic, {head_size}."
        )
    return head_size**-0.5


def window_of(size: int | tuple[int, int] | None) -> int | None:
    """Positions before a token that it attends to; None for all."""
    if size is None:
        return None
    one = size[0] if isinstance(size, tuple) and len(size) == 2 else size
    before = static("local_window_size", one, "an integer or a pair of integers", operator.index)
    if before < 0:
        raise ValueError(f"decode_attention takes a local_window_size of 0 or more positions, not {size}.")
    return before if before < np.iinfo(np.int32).max else None


_QUANTISED = ("int8", "float8_e4m3fn", "float8_e5m2")


def check_operands(operands: Mapping[str, jax.Array], spec: Spec, world: int, output: str) -> None:
    """Raises ValueError if the operands do not fit together."""
    query, key, value = operands["query"], operands["key"], operands["value"]
    k = spec.kv_heads
    wrong = []
    b, _, n, h = query.shape
    for name, dtype in (("query", query.dtype), ("preferred_element_type", spec.dtype)):
        if not jnp.issubdtype(dtype, jnp.floating):
            wrong.append(f"{name} must be floating-point, not {dtype}")
    if not k or n % k:
        wrong.append(f"query has {n} heads, which is no multiple of the {k} heads of key")
    if key.shape[3] != h:
        wrong.append(f"query has heads of size {h} and key of {key.shape[3]}")
    wrong += cache_faults(KVCache(key, value, operands.get("key_scale"), operands.get("value_scale")), k)
    if output not in OUTPUTS:
        wrong.append(f"there is no output {output!r} (choose one of {', '.join(map(repr, OUTPUTS))})")
    if spec.by_heads and n % world:
        wrong.append(f'output="heads" deals out {n} heads to {world} ranks, which does not come out even')
    sequences = operands["tables"].shape[0] if "tables" in operands else key.shape[spec.layout.index("B")]
    if sequences != b:
        what = "block_tables" if "tables" in operands else "key"
        wrong.append(f"query is of {b} sequences and {what} of {sequences}")
    for name, called in (("lengths", "key_value_seq_lengths"), ("starts", "starts")):
        x = operands.get(name)
        if x is not None and (x.shape != (b,) or not jnp.issubdtype(x.dtype, jnp.integer)):
            wrong.append(f"{called} must be i32[{b}], not {x.dtype}{list(x.shape)}")
    if "sinks" in operands and operands["sinks"].shape != (n,):
        wrong.append(f"sinks must be [{n}], not {list(operands['sinks'].shape)}")
    if spec.soft_cap is not None and not spec.soft_cap > 0:
        wrong.append(f"logits_soft_cap must be positive, not {spec.soft_cap}")
    if wrong:
        raise ValueError(f"decode_attention cannot take these arguments: {'; '.join(wrong)}.")


def unsupported(operands: Mapping[str, Any], spec: Spec) -> list[str]:
    """All that keeps the kernel from taking these operands."""
    query, key, value = operands["query"], operands["key"], operands["value"]
    if reasons := symbolic(*operands.values()):
        return reasons
    if query.dtype.name not in DTYPES:
        reasons.append(Lasting(f"it takes a query of {', '.join(DTYPES)}, not {query.dtype}: cast it"))
    elif key.dtype != query.dtype and key.dtype.name not in _QUANTISED:
        reasons.append(
            Lasting(
                f"it takes a cache of the query's dtype, {', '.join(_QUANTISED)}, not {key.dtype} with {query.dtype}: "
                "cast the query"
            )
        )
    if spec.dtype.name not in DTYPES:
        reasons.append(Lasting(f"it gives {', '.join(DTYPES)}, not {spec.dtype}: cast the result"))
    if max(query.shape[-1], value.shape[-1]) > 256:
        reasons.append(f"it takes heads of at most 256, not {query.shape[-1]} and {value.shape[-1]}")
    if 0 in query.shape or 0 in key.shape or 0 in value.shape:
        reasons.append(f"an operand is empty: {list(query.shape)}, {list(key.shape)}, {list(value.shape)}")
    return reasons
