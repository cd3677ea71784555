"""What works between processes of one GPU each: `python -m jaxtaxfree doctor --processes 2`.

Each process makes the doctor's checks for itself, those aside that start JAX, and then checks with the others what
programs of `jax.distributed` need. On a machine without GPUs they meet on its CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxtaxfree import doctor
from jaxtaxfree.doctor import Finding

TIMEOUT = 240.0  # seconds for all processes
_GRACE = 15.0  # seconds that the others have once a process has ended in failure
_MEETING = 60.0  # seconds that a process waits for another one
_STOP = "end after a failure"
_OTHERS = "was stopped after another one had failed"
_ROWS = 512

_NO_MEETING = "Let processes of this machine reach each other at 127.0.0.1 (firewall, proxies)."
_NO_HAND = "Run the processes where they see the same temporary folder (TMPDIR) and the same /proc."
_NO_SUM = "See what NCCL says with NCCL_DEBUG=INFO."
_NO_KERNEL = 'Mend the other failures first; if none is left, use implementation="xla" and report this line.'

# These start JAX in processes of their own, on devices that here belong to others; what is below takes their place.
_OF_ONE_PROCESS = (doctor.check_devices, doctor.check_heap_memory, doctor.check_reference, doctor.check_fused)


def main(count: int, timeout: float = TIMEOUT) -> int:
    """Prints the table of so many processes. Returns the exit code: 1 where a check failed."""
    return doctor.report(lambda: examine(count, timeout), f"jaxtaxfree doctor, {count} processes")


def examine(count: int, timeout: float = TIMEOUT) -> list[Finding]:
    """What so many processes find; a line that is not the same in all is there for each."""
    gpus = doctor.gpu_count()
    if count < 2:
        return [Finding("processes", "FAIL", f"{count} of them meet nobody", "Ask for two or more: --processes 2.")]
    if 0 < gpus < count:
        mend = f"Ask for at most {gpus}, or let this machine see more GPUs (CUDA_VISIBLE_DEVICES)."
        return [Finding("processes", "FAIL", f"{count} processes of one GPU each need {count}, found {gpus}", mend)]
    platform = "cuda" if gpus else "cpu"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jaxtaxfree.doctor_processes"]
    return merged(run([[*command, str(rank), str(count), str(port), platform] for rank in range(count)], timeout))


@dataclasses.dataclass
class _Process:
    """One of the processes, and what it wrote: a line for what it is to do next, and one for each finding."""

    rank: int
    running: subprocess.Popen
    out: pathlib.Path
    err: pathlib.Path
    stopped: str = ""  # why, if it was

    def said(self) -> list[dict[str, Any]]:
        lines = self.out.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]

    def has_failed(self) -> bool:
        """Whether the others wait for it in vain."""
        return bool(self.running.poll()) or {"doing": _STOP} in self.said()

    def close(self) -> None:
        """Ends its standard input."""
        assert self.running.stdin is not None
        self.running.stdin.close()

    def findings(self) -> list[Finding]:
        said = self.said()
        found = [Finding(**each["finding"]) for each in said if "finding" in each]
        doing = next((each["doing"] for each in reversed(said) if "doing" in each), "start")
        status, last = self.running.returncode, doctor._last_line(self.err.read_text())
        what = f"process {self.rank} {{}}; it was to {doing}" + (f". {last}" if last else "")
        if doing == _STOP or (not self.stopped and status == 0):
            return found
        if self.stopped == _OTHERS:
            return [*found, Finding(f"process {self.rank}", "note", what.format(self.stopped))]
        ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        mend = "Mend the other failures first; if none is left, report this line."
        return [*found, Finding(f"process {self.rank}", "FAIL", what.format(self.stopped or ended), mend)]


def run(commands: Sequence[Sequence[str]], timeout: float, grace: float = _GRACE) -> list[list[Finding]]:
    """What each process finds that such a command starts.

    All end within `timeout` seconds, and `grace` seconds after one has failed. The first one ends last, as JAX's
    coordination service is in it: when its standard input ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes: list[_Process] = []
        try:
            for rank, command in enumerate(commands):
                out, err = (pathlib.Path(folder, f"{name}{rank}") for name in ("out", "err"))
                with out.open("w") as stdout, err.open("w") as stderr:
                    running = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)
                processes.append(_Process(rank, running, out, err))
            _watch(processes, timeout, grace)
        finally:
            for each in processes:
                each.running.kill()
                each.running.wait()
                each.close()
        return [each.findings() for each in processes]


def _watch(processes: Sequence[_Process], timeout: float, grace: float) -> None:
    start, why, closed = time.monotonic(), f"did not end within {timeout:g} s", False
    end = start + timeout
    while alive := [each for each in processes if each.running.poll() is None]:
        if time.monotonic() > end:
            for each in alive:
                each.stopped = why
                each.running.kill()
            break
        if why != _OTHERS and any(each.has_failed() for each in processes):
            why, end = _OTHERS, min(end, time.monotonic() + grace)
        if not closed and all(each.running.poll() is not None for each in processes[1:]):
            closed = True
            processes[0].close()
        time.sleep(0.1)


def merged(found: Sequence[Sequence[Finding]]) -> list[Finding]:
    """The findings of all processes, in the order of the first that has them. Those that all have alike are one."""
    names = list(dict.fromkeys(finding.name for each in found for finding in each))
    lines = []
    for name in names:
        of_name = [(rank, finding) for rank, each in enumerate(found) for finding in each if finding.name == name]
        if len({finding for _, finding in of_name}) == 1 and (len(of_name) == len(found) or name.startswith("process")):
            lines.append(of_name[0][1])
        else:
            lines += [dataclasses.replace(each, name=f"{name}, process {rank}") for rank, each in of_name]
    return lines


# In the processes


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _examine(rank: int, world: int, port: int, platform: str) -> None:
    _say(doing="make the doctor's checks")
    for check in doctor.CHECKS:
        if check not in _OF_ONE_PROCESS:
            for finding in check():
                _say(finding=dataclasses.asdict(finding))
    checks: Sequence[tuple[str, str, Callable[[], Finding], str]] = (
        ("processes", "meet the others", functools.partial(_meet, rank, world, port, platform), _NO_MEETING),
        ("memory for the heap", "see its memory", functools.partial(_memory, platform), doctor.INSTALL_CUDA),
        ("memory of other processes", "take a file descriptor of another process", _hand_over, _NO_HAND),
        ("XLA's collective between processes", "run XLA's collective", functools.partial(_sum, platform), _NO_SUM),
        ("fused kernel between processes", "run a fused kernel", functools.partial(_product, platform), _NO_KERNEL),
    )
    for name, doing, check, mend in checks:
        _say(doing=doing)
        try:
            finding = check()
        except Exception as error:
            text = f"{type(error).__name__}: {doctor._last_line(str(error))}"
            finding = Finding(name, "FAIL", text, mend)
        _say(finding=dataclasses.asdict(finding))
        if finding.status == "FAIL":
            _say(doing=_STOP)
            break
    else:
        _say(doing="end")
    # Not by jax.distributed.shutdown, which waits for those that failed.
    if rank == 0:
        sys.stdin.read()
    os._exit(0)


def _meet(rank: int, world: int, port: int, platform: str) -> Finding:
    import jax

    os.environ.setdefault("JAXTAXFREE_MEETING_TIMEOUT", f"{_MEETING:g}")
    jax.config.update("jax_platforms", "cpu" if platform == "cpu" else "cuda,cpu")
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        world,
        rank,
        local_device_ids=None if platform == "cpu" else [rank],
        initialization_timeout=int(_MEETING),
    )
    devices = jax.devices(platform)
    if len(devices) != world:
        mend = "Unset what hides devices: JAX_PLATFORMS, CUDA_VISIBLE_DEVICES, JAX_CUDA_VISIBLE_DEVICES."
        return Finding("processes", "FAIL", f"{world} processes see {len(devices)} devices, not one each", mend)
    what = "GPU" if platform == "cuda" else "CPU device"
    return Finding("processes", "OK", f"{world}, which see {len(devices)} {what}s, one each")


def _memory(platform: str) -> Finding:
    import jax

    name = "memory for the heap"
    if platform == "cpu":
        return Finding(name, "note", doctor.NO_CUDA_DEVICE)
    (device,) = jax.local_devices(backend="cuda")
    pool = (device.memory_stats() or {}).get("bytes_limit", 0)
    left = doctor.device_memory(device.local_hardware_id) - pool
    found = f"{left / doctor.GIB:.1f} GiB outside XLA's pool"
    if left < doctor.GIB:
        mend = "Leave the heap more than 1 GiB: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.75 or lower."
        return Finding(name, "FAIL", found, mend)
    return Finding(name, "OK", found)


def _hand_over() -> Finding:
    """As the heap does with memory: each process offers a descriptor, and takes that of the next one."""
    import jax

    from jaxtaxfree.heap import door, exchange

    me, world = jax.process_index(), jax.process_count()
    others = exchange.Processes(me, -1, _MEETING, door.announce())
    meeting = others.meeting("doctor", "the doctor's check", range(world))
    pipe, end = os.pipe()
    os.write(end, f"process {me}".encode())
    os.close(end)
    try:
        meeting.offer(me, pipe)
        meeting.settle("offered")
        owner = (me + 1) % world
        taken = meeting.fetch(owner, owner)
        read = os.read(taken, 100).decode()
        os.close(taken)
        meeting.settle("taken")
    finally:
        meeting.end()
    name = "memory of other processes"
    if read != f"process {owner}":
        return Finding(
            name, "FAIL", f"got {read!r} of process {owner}", "Set TMPDIR to a folder that all processes see."
        )
    return Finding(name, "OK", "file descriptors pass between the processes")


def _sum(platform: str) -> Finding:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    mesh, world = _mesh(platform), jax.process_count()
    total = jax.shard_map(
        lambda: jax.lax.psum(jnp.float32(1) + jax.lax.axis_index("x"), "x"), mesh=mesh, in_specs=(), out_specs=P()
    )
    found, wanted = float(jax.jit(total)()), world * (world + 1) / 2
    name = "XLA's collective between processes"
    if found != wanted:
        return Finding(name, "FAIL", f"{found}, not {wanted}", _NO_SUM)
    return Finding(name, "OK", "right")


def _product(platform: str) -> Finding:
    """`all_gather_matmul` between the processes; on a CPU its reference."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxtaxfree

    mesh = _mesh(platform)
    rows = _ROWS - _ROWS % mesh.size
    specs = P("x", None), P(None, "x")

    def made(key: int, spec: P) -> jax.Array:
        make = lambda: jax.random.normal(jax.random.key(key), (rows, rows), jnp.bfloat16)  # noqa: E731
        return jax.jit(make, out_shardings=NamedSharding(mesh, spec))()

    def product(lhs: jax.Array, rhs: jax.Array, implementation: Any) -> jax.Array:
        call = functools.partial(
            jaxtaxfree.all_gather_matmul,
            axis_name="x",
            implementation=implementation,
            preferred_element_type=jnp.float32,
        )
        return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(None, "x"), check_vma=False)(lhs, rhs)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def error(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        exact = jnp.matmul(lhs, rhs, preferred_element_type=jnp.float32)
        found = product(lhs, rhs, "fused" if platform == "cuda" else "xla")
        return jnp.max(jnp.abs(found - exact))

    name = "fused kernel between processes"
    worst = float(jaxtaxfree.block_until_ready(error(made(0, specs[0]), made(1, specs[1]))))
    # Products of bfloat16 numbers are exact in float32: only the order of the additions differs.
    if not worst < 1e-2:
        return Finding(name, "FAIL", f"wrong result: largest error {worst:.3g}", _NO_KERNEL)
    if platform == "cpu":
        return Finding(name, "note", f"{doctor.NO_CUDA_DEVICE}; its reference has a largest error of {worst:.2g}")
    return Finding(name, "OK", f"agrees with XLA, largest difference {worst:.2g}")


def _mesh(platform: str) -> Any:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    return Mesh(np.array(jax.devices(platform)), ("x",))


if __name__ == "__main__":
    _examine(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
