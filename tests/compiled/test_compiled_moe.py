"""What the compiler makes of the kernels of `moe`, read from the PTX: no GPU needed."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree.kernels.moe import dispatch_product as one_launch
from jaxtaxfree.kernels.moe import exchange as kernels
from jaxtaxfree.kernels.moe import rows
from jaxtaxfree.ops.moe import exchange
from jaxtaxfree.ops.moe.dispatch_product import dispatch_product
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
from tests.compiled.test_gluon import NAME, PTX, SHARED_MEMORY, WARPS, launch_of
from tests.helpers.support import Compiled, compile_call, lower_for_cuda, mesh_of, sharded

TOKENS, MOST, K = 4096, 40960, 8


@functools.cache
def compiled(name: str, d: int, weighted: bool, world: int = 2) -> Compiled:
    """At the size of Qwen3-30B-A3B, or with other rows."""
    everybody = world * world * TOKENS
    places = jax.ShapeDtypeStruct((everybody, K), jnp.int32)
    weights = (jax.ShapeDtypeStruct((everybody, K), jnp.float32),) * weighted

    def call(x: jax.Array, places: jax.Array, *weights: jax.Array) -> jax.Array:
        how = {"weights": weights[0] if weights else None, "implementation": "fused"}
        if name == "dispatch":
            return exchange.dispatch(x, places, MOST, ("tp",), **how)
        return exchange.combine(x, places, ("tp",), **how)

    x = jax.ShapeDtypeStruct((world * (TOKENS if name == "dispatch" else MOST), d), jnp.bfloat16)
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


def test_dispatch_and_product_in_one_launch() -> None:
    """Whole vectors travel, products overlap, and nothing spills beside them, at the size of Qwen3-30B-A3B."""
    world, experts, d, f = 2, 128, 2048, 768

    def call(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, places, ends, w_up, w_gate = operands
        return dispatch_product(y, places, ends, w_up, w_gate, MOST, ("tp",), implementation="fused")

    mesh = mesh_of(world)
    arrays = (
        ((world * TOKENS, d), jnp.bfloat16), ((world * world * TOKENS, K), jnp.int32),
        ((world * world, experts // world), jnp.int32), *[((experts, d, f), jnp.bfloat16)] * 2,
    )  # fmt: skip
    operands = [sharded(mesh, P("tp"), *array) for array in arrays]
    layer = jax.shard_map(call, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    kernel = launch_of(lower_for_cuda(layer, *operands))
    assert (kernel[NAME], kernel[WARPS]) == (b"dispatch_product_kernel", 12)
    compiled = Compiled(kernel[PTX].decode(), kernel[SHARED_MEMORY], (), {})
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", compiled.ptx)) == {"256"}
    report = ptxas_report(compiled)
    assert spilled_bytes(report) == 0
    assert "C75" not in report
    functions, lines = (one_launch.send, one_launch.spread), ("value = gl.load(", "gl.store(")
    places = [place for function in functions for line in lines for place in places_of(function, line)]
    assert len(places) == 4
    moves = [s for s in parse(compiled.ptx) if s.has("global") and s.starts("ld.", "st.") and s.place in places]
    assert {bytes_of(s) for s in moves} == {16}
    # Rows go to peers from a single warp, whose barrier is a warp's.
    program = parse(compiled.ptx)
    releases = [i for i, s in enumerate(program) if s.starts("red.")]
    assert all(program[i].has("release") for i in releases)
    [published] = [i for i in releases if program[i].has("sys")]
    assert len(releases) == 3
    assert any(s.starts("bar.warp.sync") for s in program[published - 4 : published])
