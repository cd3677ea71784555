"""`benchmarks/checkpoint.py` writes a checkpoint that loads, and times it."""

import re

import numpy as np
import pytest

from benchmarks import checkpoint
from jaxtaxfree import models
from tests.helpers.checkpoints import mesh_of

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"vocab_size": 64, "num_hidden_layers": 2}


def test_random_checkpoint(tmp_path):
    checkpoint.write_random(tmp_path, checkpoint.LLAMA_3_8B | SIZES)
    params = models.load(tmp_path, mesh_of(2), dtype=np.float32).params
    np.testing.assert_array_equal(params["attn_norm"], 1)
    assert np.std(params["down_proj"]) == pytest.approx(checkpoint.SCALE, rel=0.1)


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "LLAMA_3_8B", checkpoint.LLAMA_3_8B | SIZES)
    options = ["--world", "1", "--batch", "2", "--prompt", "8", "--steps", "6", "--implementations", "xla"]
    monkeypatch.setattr("sys.argv", ["checkpoint.py", str(tmp_path / "random"), "--layers", "2", *options])
    assert checkpoint.main() == 0
    shown = capsys.readouterr().out
    assert "1 x cpu: loaded 0.00 GB" in shown
    assert re.search(r"^ +2  xla +[\d.]+ +[\d.]+ +\d+ +1\.00$", shown, re.MULTILINE)
