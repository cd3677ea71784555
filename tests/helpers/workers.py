"""Processes that run the checks of operations together: each has its own devices, and all make up one mesh.

`Workers` starts them and hands them one check after the other by name, so that each check is a test of its own and the
processes start once. They run on GPUs; on a CPU they meet by gloo, and the operations are their references.
"""

import contextlib
import functools
import json
import os
import pathlib
import select
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, Self

_GRACE = 30.0  # seconds that the others have after a process has failed: what they wait for may never come
_LAST = 2000  # characters of what a process wrote


class Workers:
    """Processes that wait for the names of checks. Those that are broken by a check are started anew for the next.

    Args:
      world: how many.
      each: devices of each.
      platform: "cuda" or "cpu".
      variables: more environment variables of theirs.
    """

    def __init__(self, world: int, each: int, platform: str, **variables: str):
        self.world, self.each, self.platform, self._variables = world, each, platform, variables
        self._processes: list[subprocess.Popen[str]] = []
        self._answers: list[int] = []
        self._logs: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, check: str, timeout: float = 300.0) -> list[float]:
        """Runs one of `checks()` in all processes; returns the seconds that it took in each.

        Raises:
          AssertionError: it failed in a process, which is named with what it raised, ended in one, or did not end
            within so many seconds.
        """
        if not self._processes:
            self._start()
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which is seen below
                process.stdin.write(check + "\n")
                process.stdin.flush()
        answers, waiting = {}, dict(enumerate(self._answers))
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select(list(waiting.values()), [], [], left)
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                answers[rank] = self._read(rank)
                del waiting[rank]
                if answers[rank]["error"]:
                    end = min(end, time.monotonic() + _GRACE)
        wrong = [f"process {rank}: {answer['error']}" for rank, answer in sorted(answers.items()) if answer["error"]]
        wrong += [f"process {rank}: no answer in {timeout:.0f} s\n{self._wrote(rank)}" for rank in waiting]
        if wrong:
            self.stop()
        assert not wrong, f"{check}\n" + "\n".join(wrong)
        return [answers[rank]["seconds"] for rank in range(self.world)]

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdin.close()
        for pipe in self._answers:
            os.close(pipe)
        for log in self._logs:
            log.close()
        self._processes, self._answers, self._logs = [], [], []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # Beside the tests' own process, which has its share, and with pytest-xdist there are several of both.
        memory = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")) / 2
        environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{memory:.3f}", "JAX_PLATFORMS": self.platform}
        environment.pop("JAX_NUM_CPU_DEVICES", None)
        if self.platform == "cuda":  # the reference of `ragged_all_to_all`, which XLA refuses without peer access
            flag = "--xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback=true"
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
        for rank in range(self.world):
            answers, say = os.pipe()
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115  `stop` closes it
            given = (rank, self.world, port, self.each, self.platform, say)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.helpers.workers", *map(str, given)],
                    env=environment | self._variables,
                    cwd=pathlib.Path(__file__).parents[2],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    pass_fds=(say,),
                )
            )
            os.close(say)
            self._answers.append(answers)
            self._logs.append(log)

    def _read(self, rank: int) -> dict[str, Any]:
        text = b""
        while not text.endswith(b"\n"):
            if not (more := os.read(self._answers[rank], 1 << 16)):
                status = self._processes[rank].wait()
                return {"error": f"ended with status {status}\n{self._wrote(rank)}"}
            text += more
        return json.loads(text)

    def _wrote(self, rank: int) -> str:
        self._logs[rank].seek(0)
        return self._logs[rank].read()[-_LAST:]


def checks(capability: str = "9.0") -> dict[str, Callable[[Any], None]]:
    """What `Workers` can run, by name: functions of a mesh along "tp", for GPUs of a compute capability."""
    from tests.gpu import test_gpu_hopper as hopper
    from tests.helpers import attention_parity, collectives_parity, moe_parity, parity, ragged_parity, step_parity
    from tests.operations import test_explicit

    found: dict[str, Callable[[Any], None]] = {parity.name_of(check): check for check in parity.CHECKS}
    for operation in parity.OPERATIONS:
        found[f"check_repetition-{operation.name}"] = functools.partial(parity.check_repetition, operation=operation)
        found[f"check_meshes-{operation.name}"] = lambda mesh, operation=operation: parity.check_meshes(
            list(mesh.devices.flat), operation
        )
    found |= {f"{check.__name__}-decode_attention": check for check in attention_parity.CHECKS}
    found |= {f"{check.__name__}-collectives": check for check in collectives_parity.CHECKS}
    found |= {f"{check.__name__}-ragged_all_to_all": check for check in ragged_parity.CHECKS}
    found |= {f"{check.__name__}-moe": check for check in moe_parity.CHECKS}
    for name, case in test_explicit.CASES.items():
        found[f"explicit-{name}"] = functools.partial(_check_explicit, case=case)
    if capability != "9.0":
        return found
    found |= {f"hopper-{check.__name__}-decode_step": check for check in step_parity.CHECKS}
    for operation in hopper.OPERATIONS:
        for check in (hopper.test_values, hopper.test_a_thousand_repetitions, hopper.test_beside_nccl):
            found[f"hopper-{check.__name__}-{operation.name}"] = functools.partial(check, operation=operation)
        found[f"hopper-test_random_shapes-{operation.name}"] = functools.partial(
            hopper.test_random_shapes, operation=operation, seed=0
        )
    for check in (hopper.test_the_gathered_rows_are_exact, hopper.test_every_rank_has_the_same_sums):
        found[f"hopper-{check.__name__}"] = check
    for kind in ("gather", "scatter", "1", "2"):
        found[f"hopper-test_few_rows-{kind}"] = functools.partial(hopper.test_few_rows, kind=kind)
        found[f"hopper-test_few_rows_a_thousand_times-{kind}"] = functools.partial(
            hopper.test_few_rows_a_thousand_times, kind=kind, m=144, columns=2048
        )
    return found


def _check_explicit(mesh: Any, case: Any) -> None:
    """Along "tp" of a mesh of Explicit axes; with two ranks of it where there are four devices."""
    from jax.sharding import AxisType

    from tests.helpers import parity
    from tests.operations import test_explicit

    shape = (mesh.devices.size // 2, 2)  # the cases are made for two
    test_explicit.check_on_devices(
        parity.mesh_of(list(mesh.devices.flat), shape, ("dp", "tp"), AxisType.Explicit), case
    )


def _fails_in_one(mesh: Any) -> None:
    import jax

    del mesh
    assert jax.process_index() == 0, "planted in all but the first"


def _ends_in_one(mesh: Any) -> None:
    import jax

    del mesh
    if jax.process_index() == 1:
        print("planted end", flush=True)
        os.abort()


def _hangs_in_one(mesh: Any) -> None:
    import jax

    del mesh
    if jax.process_index() == 1:
        print("planted hang", flush=True)
        time.sleep(1000)


def _is_one_mesh(mesh: Any) -> None:
    import jax

    own = [device.id for device in mesh.devices.flat if device.process_index == jax.process_index()]
    assert mesh.devices.size == jax.process_count() * len(own) == jax.device_count() > len(own)


# For the tests of `Workers` itself.
PLANTED = {
    "fails in one": _fails_in_one,
    "ends in one": _ends_in_one,
    "hangs in one": _hangs_in_one,
    "is one mesh": _is_one_mesh,
}


def _take_references() -> None:
    """On a CPU: the operations by None, where a check asks for "fused". The reference has no settings."""
    import jaxtaxfree as jtf
    from jaxtaxfree.ops import register

    def reference(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, implementation: str | None = None, config: Any = None, **keywords: Any) -> Any:
            del config
            implementation = None if implementation == "fused" else implementation
            return function(*args, implementation=implementation, **keywords)

        return call

    for name in register.OPERATIONS:
        setattr(jtf, name, reference(getattr(jtf, name)))


def _work(rank: int, world: int, port: int, each: int, platform: str, say: int) -> None:
    import jax

    if platform == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        _take_references()
    known = {**PLANTED, **checks()}
    jax.config.update("jax_platforms", platform)  # tests/conftest.py adds CPU devices
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", each)
    local = list(range(rank * each, (rank + 1) * each)) if platform == "cuda" else None
    jax.distributed.initialize(f"127.0.0.1:{port}", world, rank, local_device_ids=local)
    from tests.helpers import parity

    mesh = parity.mesh_of(jax.devices(platform), (world * each,), ("tp",))
    for line in sys.stdin:
        start, error = time.monotonic(), ""
        try:
            known[line.strip()](mesh)
        except BaseException as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {raised}"
        answer = {"error": error, "seconds": time.monotonic() - start}
        os.write(say, json.dumps(answer).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    _work(*map(int, sys.argv[1:5]), sys.argv[5], int(sys.argv[6]))
