"""The checkpoints of tests/models, on virtual CPU devices, each loaded and compiled once; and how to write others."""

import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes  # noqa: F401 (numpy's names of bfloat16 and float8)
import numpy as np
import safetensors.numpy

from jaxtaxfree import models
from tests.helpers.support import mesh_of

FOLDER = pathlib.Path(__file__).parents[1] / "models" / "checkpoints"
NAMES = ("llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe")
STEPS = 32


@functools.cache
def model_of(name: str, world: int = 2, cache: str | None = None) -> models.Model:
    """In f32, whose programs stay compiled."""
    return models.load(FOLDER / name, mesh_of(world), dtype=np.float32, cache=cache)


@functools.cache
def expected_of(name: str) -> dict[str, np.ndarray]:
    """What transformers says: tokens, lengths, logits, greedy."""
    return safetensors.numpy.load_file(FOLDER / name / "expected.safetensors")


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, in f32."""
    found = {}
    for path in (FOLDER / name).glob("model*.safetensors"):
        found |= {key: np.asarray(x, np.float32) for key, x in safetensors.numpy.load_file(path).items()}
    return found


def write(
    folder: pathlib.Path, name: str, config: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray]], None] | None = None,
) -> pathlib.Path:  # fmt: skip
    """A copy of a checkpoint in f32, with other fields and other tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (FOLDER / name).iterdir():
        if path.suffix == ".json" and "index" not in path.name:
            shutil.copy(path, folder)
    fields = json.loads((folder / "config.json").read_text()) | dict(config or {})
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = tensors_of(name)
    if change:
        change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder
