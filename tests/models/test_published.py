"""The demo's model as a published one."""

import sys

import jax.numpy as jnp
import numpy as np

from jaxtaxfree import models
from jaxtaxfree.models.tokenizer import Tokenizer
from tests.helpers.checkpoints import mesh_of
from tests.project.test_packaging import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import published
import transformer

TEXT = 'The "with" statement is naïve: \x00\n'


def test_the_demos_model_is_a_llama():
    """Its logits are those of the demo, and its tokens are bytes."""
    tokenizer = Tokenizer(published.WEIGHTS)
    tokens = tokenizer.encode(TEXT)
    assert tokens == list(TEXT.encode()) and tokenizer.decode(tokens) == TEXT
    params, cfg, _ = published.load(published.WEIGHTS)
    expected = np.asarray(transformer.forward(params, jnp.asarray([tokens]), cfg))
    model = models.load(published.WEIGHTS, mesh_of(2), dtype=np.float32)
    found = np.asarray(model.logits([tokens]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
