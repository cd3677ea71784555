"""What goes wrong with checkpoints."""


class ModelError(ValueError):
    """A checkpoint, or a request to one, that cannot be taken, as one sentence that says what to do."""
