"""Every operation with everything in it, where JAX promotes neither dtypes nor ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.support import mesh_of

LENGTHS = np.array([20, 40], np.int32)
TABLES = np.arange(8, dtype=np.int32).reshape(2, 4)


def gather(lhs: Any, rhs: Any, bias: Any, residual: Any, **how: Any) -> Any:
    keywords = {"gate": rhs, "bias": bias, "activation": "silu", "residual": residual, **how}
    return jtf.all_gather_matmul(lhs, rhs, "tp", **keywords)


def scatter(lhs: Any, rhs: Any, bias: Any, residual: Any, **how: Any) -> Any:
    return jtf.matmul_reduce_scatter(lhs, rhs, "tp", bias=bias, activation="gelu_tanh", residual=residual, **how)


def reduce(lhs: Any, rhs: Any, bias: Any, residual: Any, **how: Any) -> Any:
    return jtf.matmul_all_reduce(lhs, rhs, "tp", bias=bias, activation="gelu_exact", residual=residual, **how)


def collectives(x: Any, **how: Any) -> Any:
    x = jtf.all_gather(x, "tp", tiled=True, **how)
    return jtf.psum_scatter(x, "tp", tiled=True, **how) + jtf.psum(x, "tp", **how)[:4]


def attention(query: Any, cache: Any, new: Any, lengths: Any, sinks: Any, **how: Any) -> Any:
    key, value = jtf.append_kv(cache, new, new, lengths, "tp")
    out = jtf.decode_attention(
        query,
        key,
        value,
        "tp",
        key_value_seq_lengths=lengths + 1,
        local_window_size=8,
        logits_soft_cap=3.0,
        sinks=sinks,
        return_residual=True,
        **how,
    )
    return jtf.merge_attention(*out, *out)


def paged_attention(query: Any, cache: Any, scales: Any, new: Any, lengths: Any, tables: Any, **how: Any) -> Any:
    paged = {"block_tables": tables, "placement": "round_robin"}
    key, value, key_scale, value_scale = jtf.append_kv((*cache, *scales), new, new, lengths, "tp", **paged)
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    return jtf.decode_attention(
        query, key, value, "tp", key_value_seq_lengths=lengths + 1, output="heads", **scales, **paged, **how
    )


def ones(dtype: Any, *shape: int) -> np.ndarray:
    return np.ones(shape, jnp.dtype(dtype))


def calls(dtype: Any) -> Iterator[tuple[str, Callable, Any, Any, list[Any]]]:
    """Name, function of a rank, specs, and operands."""
    columns = [ones(dtype, 8, 16), ones(dtype, 16, 32), ones(dtype, 32), ones(dtype, 8, 32)]
    yield "gather", gather, (P("tp"), P(None, "tp"), P("tp"), P(None, "tp")), P(None, "tp"), columns
    rows = [ones(dtype, 8, 64), ones(dtype, 64, 32), ones(dtype, 32), ones(dtype, 8, 32)]
    yield "scatter", scatter, (P(None, "tp"), P("tp"), P(), P("tp")), P("tp"), rows
    yield "reduce", reduce, (P(None, "tp"), P("tp"), P(), P()), P(), rows
    one_row = [rows[0][0], *rows[1:3], rows[3][0]]
    yield "reduce-a-row", reduce, (P("tp"), P("tp"), P(), P()), P(), one_row
    yield "collectives", collectives, (P("tp"),), P("tp"), [ones(dtype, 16, 16)]
    query, new = ones(dtype, 2, 8, 16), ones(dtype, 2, 2, 16)
    operands = [query, (ones(dtype, 2, 64, 2, 16),) * 2, new, LENGTHS, ones(dtype, 8)]
    yield "attention", attention, (P(), P(None, "tp"), P(), P(), P()), P(), operands
    for shape in ((), (2,), (64, 4, 2)):
        scales = (ones("float32", *shape),) * 2
        operands = [query, (ones("int8", 64, 4, 2, 16),) * 2, scales, new, LENGTHS, TABLES]
        specs = P(), P("tp"), P("tp") if len(shape) == 3 else P(), P(), P(), P()
        yield f"paged-attention-{len(shape)}", paged_attention, specs, P(None, "tp"), operands


CALLS = {f"{name}-{dtype}": call for dtype in ("float32", "bfloat16") for name, *call in calls(dtype)}


@pytest.mark.covers(1)
@pytest.mark.parametrize("implementation", (None, "xla", "simulate"))
@pytest.mark.parametrize("name", CALLS)
def test_without_promotion(name: str, implementation: str | None) -> None:
    call, in_specs, out_specs, operands = CALLS[name]
    program = jax.shard_map(
        lambda *operands: call(*operands, implementation=implementation),
        mesh=mesh_of(4),
        in_specs=in_specs,
        out_specs=out_specs,
    )

    def loss(*operands: Any) -> jax.Array:
        return sum(out.astype(jnp.float32).sum() for out in jax.tree.leaves(program(*operands)))

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.jit(program).lower(*operands)
        if implementation != "simulate":
            jax.jit(jax.grad(loss, allow_int=True)).lower(*operands)
