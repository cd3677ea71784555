"""Published checkpoints on GPUs: prompts and steps by the kernels, against what transformers said of them."""

import numpy as np
import pytest

from jaxtaxfree import models
from tests.helpers.checkpoints import FOLDER, STEPS, expected_of


@pytest.mark.gpu(2)
@pytest.mark.parametrize("implementation", [None, "fused"])
@pytest.mark.parametrize("name", ["llama3", "gemma2", "mixtral"])
def test_tokens(gpu_mesh, name, implementation):
    """In f32. The checkpoints are too small for the kernel of a whole step, so "fused" is operations."""
    model = models.load(FOLDER / name, gpu_mesh(2, "tp"), dtype=np.float32, implementation=implementation)
    expected = expected_of(name)
    logits = np.asarray(model.logits(expected["tokens"][:1]))
    np.testing.assert_allclose(logits, expected["logits"][:1], rtol=0, atol=1e-4 * np.abs(expected["logits"]).max())
    found = model.generate(expected["tokens"], STEPS, lengths=expected["lengths"])
    np.testing.assert_array_equal(found, expected["greedy"])
    if implementation == "fused":
        assert model.kernels(model.room(expected["lengths"], STEPS), models.Sampling()) >= 2


@pytest.mark.gpu(2)
def test_a_cache_in_pages(gpu_mesh):
    model = models.load(FOLDER / "gemma2", gpu_mesh(2, "tp"), dtype=np.float32, cache="pages")
    expected = expected_of("gemma2")
    found = model.generate(expected["tokens"], STEPS, lengths=expected["lengths"])
    np.testing.assert_array_equal(found, expected["greedy"])


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("weights", "activations"), [("int8", False), ("int8", True), ("float8_e4m3fn", False)])
def test_eight_bits(gpu_mesh, weights, activations):
    """By XLA; the kernels of 8 bits take larger matrices than these."""
    how = {"weights": weights, "quantize_activations": activations}
    model, expected = models.load(FOLDER / "llama3", gpu_mesh(2, "tp"), dtype=np.float32, **how), expected_of("llama3")
    logits, wanted = np.asarray(model.logits(expected["tokens"][:1])), expected["logits"][:1]
    assert 1e-3 < np.linalg.norm(logits - wanted) / np.linalg.norm(wanted) < 0.15
    assert model.generate(expected["tokens"][:1], 3).shape == (1, 3)
