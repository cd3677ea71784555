"""Starts a peer of PyTorch (`Operation.torch_script`), beside JAX on the same GPUs, and says what it finds.

JAX keeps the memory that it has taken, three quarters of each GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise,
and is idle meanwhile. PyTorch needs a few gigabytes of what is left.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.operation import Config, Operation
from benchmarks.sampling import Mode

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the processes found of one implementation at one shape.

    error: the largest relative error of a row; None if it failed, and `failure` says why.
    samples: by mode, microseconds of a call.
    """

    shape: Any
    name: str
    config: Config
    error: float | None
    failure: str
    samples: dict[str, list[float]]


def unavailable(python: str) -> str:
    """Why PyTorch's peers cannot run here; empty if they can."""
    if jax.default_backend() != "gpu":
        return "it needs GPUs"
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return "there is no PyTorch" if subprocess.run([python, "-c", probe], check=False).returncode else ""


def measure(
    operation: Operation,
    shapes: Sequence[Any],
    *,
    world: int,
    modes: Sequence[Mode],
    seconds: float,
    python: str,
    timeout: float,
    l2: str = "usual",
) -> tuple[list[Found], str]:
    """What was found at each shape, and why the processes ended early, if they did.

    They are killed when they are silent for `timeout` seconds.
    """
    jobs = [operation.torch_job(shape, world, l2) for shape in shapes]
    request = {"world": world, "modes": [mode.name for mode in modes], "seconds": seconds, "jobs": jobs}
    answers, failure = converse([python, str(FOLDER / operation.torch_script)], request, timeout)
    found = []
    for shape in shapes:
        of_shape = [answer for answer in answers if answer["name"] == shape.name]
        for answer in of_shape or [{"implementation": "torch", "failed": failure or "nothing was printed"}]:
            found.append(
                Found(
                    shape=shape,
                    name=answer["implementation"],
                    config={key: answer[key] for key in ("torch", "launch") if key in answer},
                    error=answer.get("error"),
                    failure=answer.get("failed", ""),
                    samples=answer.get("samples", {}),
                )
            )
    return found, failure


def converse(
    command: list[str],
    request: dict[str, Any],
    timeout: float,
    hear: Callable[[dict[str, Any]], None] = lambda answer: None,
) -> tuple[list[dict[str, Any]], str]:
    """The lines of JSON that a program answers, and why it ended early, if it did.

    It is killed when it is silent for `timeout` seconds. `hear` takes each line as soon as it is there.
    """
    with tempfile.TemporaryFile("w+") as question, tempfile.TemporaryFile("w+") as complaints:
        json.dump(request, question)
        question.seek(0)
        # In a session of its own, so that the processes it starts can be ended with it.
        process = subprocess.Popen(
            command, stdin=question, stdout=subprocess.PIPE, stderr=complaints, text=True, start_new_session=True
        )
        silent = threading.Event()

        def end() -> None:
            silent.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def patience() -> threading.Timer:
            timer = threading.Timer(timeout, end)
            timer.daemon = True
            timer.start()
            return timer

        answers = []
        timer = patience()
        try:
            for line in process.stdout or ():
                if line.startswith("{") and line.endswith("\n"):
                    answers.append(json.loads(line))
                    hear(answers[-1])
                    timer.cancel()
                    timer = patience()
            process.wait()
        except BaseException:
            end()
            raise
        finally:
            timer.cancel()
        complaints.seek(0)
        last_words = [line for line in complaints.read().splitlines() if line.strip()][-1:]
    if silent.is_set():
        return answers, f"silent for {timeout:g} s"
    return answers, " ".join(last_words) or f"exit status {process.returncode}" if process.returncode else ""
