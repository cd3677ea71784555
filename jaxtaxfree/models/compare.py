"""`python -m jaxtaxfree compare`: a checkpoint's logits and tokens beside those of transformers, on the CPU."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import jaxtaxfree.kernels
from jaxtaxfree.models import commands
from jaxtaxfree.models.errors import ModelError

RANDOM = 16  # tokens of the prompt where none is given


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands.add_model_arguments(parser)
    parser.set_defaults(dtype="float32")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="greedy ones (default: %(default)s)")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        help="largest difference of logits, as a part of the largest logit (default: %(default)s)",
    )


def main(options: argparse.Namespace) -> int:
    """Prints what differs. Returns 0 if nothing differs by more than the tolerance, else 1."""
    return commands.reporting(_compare, options)


def _compare(options: argparse.Namespace, console: Console) -> int:
    theirs = _Transformers(options.folder)
    mesh = commands.mesh_of(options)
    model = commands.load_showing(options, mesh, console)
    prompts = commands.encoded(options, None)
    if not prompts:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, model.config.spec.vocab, RANDOM).tolist()]
    tokens, lengths = commands.padded(prompts)
    logits = np.asarray(model.logits(tokens, lengths))
    greedy = model.generate(tokens, options.tokens, lengths=lengths)
    table = Table("prompt", "token", "largest difference of logits", "of the largest logit", "likeliest token")
    right = True
    for i, prompt in enumerate(prompts):
        expected = theirs.logits(prompt)
        for at, (found, wanted) in enumerate(zip(logits[i], expected)):
            difference, largest = np.abs(found - wanted).max(), np.abs(wanted).max()
            same = found.argmax() == wanted.argmax()
            right &= bool(difference <= options.tolerance * largest)
            likeliest = "the same" if same else f"{found.argmax()}, not {wanted.argmax()}"
            table.add_row(str(i), str(at), f"{difference:.2g}", f"{difference / largest:.2g}", likeliest)
    console.print(table)
    for i, prompt in enumerate(prompts):
        wanted = theirs.greedy(prompt, options.tokens)
        agree = int(np.argmin(np.append(greedy[i] == wanted, False)))
        more = "" if agree == len(wanted) else f"; then {greedy[i][agree]}, not {wanted[agree]}"
        console.print(f"prompt {i}: the first {agree} of {len(wanted)} greedy tokens agree{more}.")
        right &= agree == len(wanted)
    return 0 if right else 1


def _hide_own_kernels() -> None:
    """transformers looks for a library `kernels`, and in this repository's root would find ours, which refuses."""
    found = importlib.util.find_spec("kernels")
    own = Path(jaxtaxfree.kernels.__file__).resolve()
    if found is not None and found.origin and Path(found.origin).resolve() == own:
        sys.modules["kernels"] = None  # pyrefly: ignore[unsupported-operation]


class _Transformers:
    """The same checkpoint by transformers, in f32 on the CPU."""

    def __init__(self, folder: Path):
        _hide_own_kernels()
        try:
            import torch
            import transformers
        except ImportError:
            raise ModelError("compare needs torch and transformers: pip install 'jaxtaxfree[models-test]'.") from None
        self._torch: Any = torch
        made = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self._model: Any = made.float().eval()

    def logits(self, prompt: Sequence[int]) -> np.ndarray:
        """f32 [T, V]."""
        with self._torch.no_grad():
            return self._model(self._torch.tensor([list(prompt)])).logits[0].numpy()

    def greedy(self, prompt: Sequence[int], steps: int) -> np.ndarray:
        """i32[steps]."""
        ids = self._torch.tensor([list(prompt)])
        how = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": None}
        made = self._model.generate(ids, attention_mask=self._torch.ones_like(ids), **how)
        return made[0, len(prompt) :].numpy().astype(np.int32)
