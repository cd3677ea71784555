"""`benchmarks/checkpoint.py` writes a checkpoint that loads, and times it."""

import json
import re

import numpy as np
import pytest

from benchmarks import checkpoint
from jaxtaxfree import models
from tests.helpers.checkpoints import mesh_of

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"vocab_size": 64, "num_hidden_layers": 2, "head_dim": 16}
EXPERTS = SIZES | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "experts"), [(checkpoint.LLAMA_3_8B | SIZES, 0), (checkpoint.QWEN3_30B_A3B | EXPERTS, 4)]
)
def test_random_checkpoint(tmp_path, config, experts):
    checkpoint.write_random(tmp_path, config)
    model = models.load(tmp_path, mesh_of(2), dtype=np.float32)
    np.testing.assert_array_equal(model.params["attn_norm"], 1)
    assert np.std(model.params["down_proj"]) == pytest.approx(checkpoint.SCALE, rel=0.1)
    assert model.spec.experts == experts


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(checkpoint.SIZES, "qwen3-30b-a3b", checkpoint.QWEN3_30B_A3B | EXPERTS)
    options = ["--world", "1", "--batch", "2", "--prompt", "8", "--steps", "6", "--implementations", "xla"]
    options += ["--sizes", "qwen3-30b-a3b", "--layers", "2", "--json", str(tmp_path / "rows.json"), "--commit", "abc"]
    monkeypatch.setattr("sys.argv", ["checkpoint.py", str(tmp_path / "random"), *options])
    assert checkpoint.main() == 0
    shown = capsys.readouterr().out
    assert "1 x cpu: loaded 0.00 GB" in shown
    assert re.search(r"^ +2  xla +[\d.]+ +[\d.]+ +\d+ +1\.00$", shown, re.MULTILINE)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["said"] in shown and row["said"].startswith("2 x 6 tokens on 1 x virtual CPU, the first after ")
    assert row["worst_margin"] == 0  # of XLA's own
    assert row["layers"] == 2 and row["median_us"] > 0 and row["loaded_bytes"] > 0 and row["commit"] == "abc"
