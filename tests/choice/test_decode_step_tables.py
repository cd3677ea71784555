"""What a table of measured times says of `decode_step`: which calls it knows, and what follows from it."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks.operations import OPERATIONS
from jaxtaxfree import dispatch
from jaxtaxfree.ops.decode_step import case
from jaxtaxfree.teams import Team
from tests.helpers.decode_loops import CACHES
from tests.helpers.decoders import FAMILIES, tiny
from tests.helpers.support import TRITON_CALL, lower_for_cuda, mesh_of, sharded

STEP = OPERATIONS["decode_step"]
WORLD = 2
TEAM = Team(axes=("tp",), others=(), world=WORLD, devices=tuple(jax.devices("cpu")[:WORLD]))


def case_of(model: jtf.DecoderSpec, b: int = 1, slots: int = 4096, tokens: int = 1, dtype: Any = jnp.bfloat16) -> Any:
    of = lambda *size: jax.ShapeDtypeStruct(size, dtype)  # noqa: E731
    cache = of(model.layers, b, model.kv_heads // WORLD, slots, model.head_dim)
    table = jax.ShapeDtypeStruct((1, slots, model.rotated // 2), jnp.float32)
    return case(of(b, tokens, model.d_model), cache, cache, None, None, table, table, team=TEAM, model=model,
                placement=None)  # fmt: skip


def test_what_tables_know():
    """Layers and vocabulary are no part of it; a call that no kernel takes is none of theirs."""
    model = FAMILIES["llama-3-8b"]
    found = case_of(model)
    assert found.row() == {
        "world": 2, "dtype": "bfloat16", "b": 1, "d_model": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
        "d_mlp": 14336, "slots": 4096,
    }  # fmt: skip
    assert json.loads(json.dumps(found.row())) == found.row()
    shape = next(shape for shape in STEP.shapes if shape.name == "llama3-8b/4/decode-1/8k-context")
    assert STEP.case_at(shape, TEAM).row() == {**found.row(), "slots": 8192}
    assert case_of(model, tokens=2) is case_of(model, b=17) is case_of(model, dtype=jnp.float32) is None


@pytest.mark.parametrize("fused_us", [300.0, 700.0])
def test_a_row_decides(monkeypatch, fused_us):
    """Of two sequences, of which rules know nothing, and with the configuration that was the fastest."""
    model = tiny("llama-3-8b", d_model=64, heads=4, kv_heads=2, head_dim=64, d_mlp=128)
    found = case_of(model, b=2, slots=64)
    settings = found.choose(64, {"num_warps": 4}).settings
    row = {**found.row(), "config": settings, "fused_us": fused_us, "xla_us": 500.0}
    monkeypatch.setattr(dispatch, "table", lambda kind, name: [row] if name == "decode_step" else [])
    assert dispatch.config(found) == settings
    assert dispatch.is_slower(found) == (fused_us > 500)
    assert dispatch.config(case_of(model, b=1, slots=64)) is None

    mesh, shapes = mesh_of(WORLD), model.param_shapes()
    params = {name: sharded(mesh, spec, shapes[name], "bfloat16") for name, spec in model.partition_specs("tp").items()}
    cache = sharded(mesh, CACHES[0], (model.layers, 2, model.kv_heads, 64, model.head_dim), "bfloat16")
    tables = np.zeros((64, 32), np.float32)

    def step(params: Any, x: Any, cache: Any) -> Any:
        return jtf.decode_step(
            params, x, cache, jnp.zeros(2, jnp.int32), "tp", model=model, cos=tables, sin=tables
        )  # fmt: skip

    program = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(model.partition_specs("tp"), P(), CACHES),
        out_specs=(P(None, "tp"), CACHES),
        check_vma=False,
    )
    text = lower_for_cuda(program, params, sharded(mesh, P(), (2, 64), "bfloat16"), (cache, cache))
    assert text.count(TRITON_CALL) == (fused_us < 500)
