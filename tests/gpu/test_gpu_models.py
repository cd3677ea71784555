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
