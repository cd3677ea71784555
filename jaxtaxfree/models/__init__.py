"""Models as they are published: checkpoints of Hugging Face on several GPUs.

    model = jaxtaxfree.models.load("folder", jax.make_mesh((8,), ("tp",)))
    model.generate(tokens, 64)

`docs/models.md` says what is covered. `python -m jaxtaxfree generate` is the same from a shell.
"""

from jaxtaxfree.models.config import ModelConfig, read_config
from jaxtaxfree.models.errors import ModelError
from jaxtaxfree.models.model import Model, load
from jaxtaxfree.models.sampling import Sampling

__all__ = ["Model", "ModelConfig", "ModelError", "Sampling", "load", "read_config"]
