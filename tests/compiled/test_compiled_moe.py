"""What the compiler makes of the kernels of `moe`, read from the PTX: no GPU needed."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree.kernels.moe import exchange as kernels
from jaxtaxfree.kernels.moe import rows
from jaxtaxfree.ops.moe import exchange
from tests.compiled.test_compiled import (
    bytes_of,
    local_memory,
    parse,
    places_of,
    ptxas_report,
    publishes_out_of_order,
    spilled_bytes,
    waits_that_do_not_wait,
)
from tests.helpers.support import Compiled, compile_call, mesh_of

TOKENS, MOST, K = 4096, 40960, 8


@functools.cache
def compiled(name: str, d: int, weighted: bool, dtype: str = "bfloat16", world: int = 2) -> Compiled:
    """At the size of Qwen3-30B-A3B, or with other rows."""
    everybody = world * world * TOKENS
    places = jax.ShapeDtypeStruct((everybody, K), jnp.int32)
    weights = (jax.ShapeDtypeStruct((everybody, K), jnp.float32),) * weighted

    def call(x: jax.Array, places: jax.Array, *weights: jax.Array) -> jax.Array:
        how = {"weights": weights[0] if weights else None, "implementation": "fused"}
        if name == "dispatch":
            return exchange.dispatch(x, places, MOST, ("tp",), **how)
        return exchange.combine(x, places, ("tp",), **how)

    x = jax.ShapeDtypeStruct((world * (TOKENS if name == "dispatch" else MOST), d), jnp.dtype(dtype))
    specs = (P("tp"),) * (2 + len(weights))
    program = jax.shard_map(call, mesh=mesh_of(world), in_specs=specs, out_specs=P("tp"), check_vma=False)
    kernel = getattr(kernels, f"{name}_kernel")
    return compile_call(kernel, program, x, places, *weights, compute_capability=90)


def wrong(call: Compiled) -> list[str]:
    program = parse(call.ptx)
    lines = waits_that_do_not_wait(program, 1) + publishes_out_of_order(program) + local_memory(call.ptx)
    report = ptxas_report(call)
    if spilled := spilled_bytes(report):
        lines.append(f"{spilled} bytes spilled")
    # 512 threads share a multiprocessor: half of them send, and half of them collect.
    if (registers := max(map(int, re.findall(r"(\d+) registers", report)))) > 128:
        lines.append(f"{registers} registers")
    return lines


def widths(call: Compiled) -> dict[str, set[int]]:
    """By how many bytes rows are loaded and stored."""
    found: dict[str, set[int]] = {}
    for name, function, text in (("ld.", rows.load_tile, "return tl.load("), ("st.", rows.store_tile, "tl.store(")):
        [place] = places_of(function, text)
        moves = [s for s in parse(call.ptx) if s.starts(name) and s.has("global") and s.place == place]
        found[name] = {bytes_of(s) for s in moves}
    return found


@pytest.mark.parametrize(
    ("name", "d", "weighted"),
    (
        ("dispatch", 2048, False),
        ("combine", 2048, True),
        pytest.param("dispatch", 7168, True, marks=pytest.mark.soak),
        pytest.param("combine", 7168, False, marks=pytest.mark.soak),
    ),
)
def test_rows_move_by_16_bytes(name: str, d: int, weighted: bool) -> None:
    call = compiled(name, d, weighted)
    assert wrong(call) == []
    assert widths(call) == {"ld.": {16}, "st.": {16}}


def test_rows_of_8_bits_move_by_16_bytes() -> None:
    call = compiled("dispatch", 2048, False, "int8")
    assert wrong(call) == []
    moves = set(re.findall(r"(?:ld|st)\.global\S*", call.ptx))
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= moves
    assert not [move for move in moves if move.endswith((".b8", ".b16"))]
