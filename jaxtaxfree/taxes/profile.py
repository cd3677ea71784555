"""Runs a program under JAX's profiler and reads its kernels from the trace."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtaxfree import kernels as own_kernels
from jaxtaxfree.taxes import hlo
from jaxtaxfree.taxes.timeline import Kernel, Kind

# NCCL's kernels, and XLA's own, some of which are named by their instruction.
_COLLECTIVE = re.compile(
    r"nccl|AllReduceKernel|RaggedAllToAllKernel|MultiGpuBarrier"
    r"|^(all_gather|all_reduce|all_to_all|collective_permute|reduce_scatter)(_start)?[_.\d]*$",
    re.IGNORECASE,
)
_NO_WORK = re.compile(r"^(MemoryAlloc|MemoryFree|MemoryResidency|.*overhead.*)$", re.IGNORECASE)
_WARM_UP = 4
_SECONDS = 0.04
_PAUSE = 0.05
_CALIBRATIONS = 20
_REPETITIONS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """What was measured of a program.

    Attributes:
      kernels: of so many steps, as the trace shows them.
      steps: in the trace.
      skip: how many of them passed until the clocks of the devices had settled.
      step_seconds: of a step, measured without the profiler.
      bandwidth: bytes a second that a copy in device memory reads and writes.
      hlo: the program; None if it is not known.
      groups: ordinals of the devices that communicate with each other; None for all of them.
      calibration: small collectives after the steps, which tell how the clocks of the devices differ.
      calls: equal operations that a step consists of.
    """

    kernels: tuple[Kernel, ...]
    steps: int
    skip: int
    step_seconds: float
    bandwidth: float
    hlo: str | None
    groups: tuple[tuple[int, ...], ...] | None = None
    calibration: tuple[Kernel, ...] = ()
    calls: int = 1

    def save(self, path: str | os.PathLike[str]) -> None:
        pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        fields = json.loads(pathlib.Path(path).read_text())
        for field in ("kernels", "calibration"):
            fields[field] = tuple(Kernel(**kernel) for kernel in fields[field])
        fields["groups"] = fields["groups"] and tuple(map(tuple, fields["groups"]))
        return cls(**fields)


def record(
    fn: Callable[..., Any],
    *args: Any,
    calls: int = 1,
    steps: int | None = None,
    bandwidth: float | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    fused: Sequence[str] = (),
    keep: str | os.PathLike[str] | None = None,
) -> Recording:
    """Measures a program without the profiler, then with it. For the arguments see `taxes.account`."""
    text = None
    if hasattr(fn, "lower"):
        fn = fn.lower(*args).compile(compiler_options=dict(compiler_options or {}) or None)
    elif compiler_options:
        raise ValueError("compiler_options are for functions that jax.jit made, which this one is not.")
    if isinstance(fn, jax.stages.Compiled):
        text = fn.as_text()

    devices = _gpus_of(fn(*args))
    run = functools.partial(_seconds, fn, args)
    run(_WARM_UP)
    if steps is None:
        steps = min(200, max(10, math.ceil(_SECONDS * _WARM_UP / run(_WARM_UP))))
    # Of a queue of steps the first half takes up the start, and the time until the power limit has slowed the clocks
    # down: it is neither in the difference of the two lengths, nor looked at in the trace.
    rounds = [(run(2 * steps), run(steps)) for _ in range(_REPETITIONS)]
    long, short = (statistics.median(seconds) for seconds in zip(*rounds))

    space = _trace(functools.partial(run, 2 * steps), devices)
    kernels, calibration = separate(kernels_of(jax.profiler.ProfileData.from_serialized_xspace(space), fused))
    recording = Recording(
        kernels=kernels,
        steps=2 * steps,
        skip=steps,
        step_seconds=(long - short if long > short else long / 2) / steps,
        bandwidth=bandwidth or copy_bandwidth(devices),
        hlo=text,
        groups=_ordinals(hlo.groups(text) if text else None, devices),
        calibration=calibration,
        calls=calls,
    )
    if keep is not None:
        folder = pathlib.Path(keep)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "trace.xplane.pb").write_bytes(space)
        recording.save(folder / "recording.json")
    if not recording.kernels:
        raise RuntimeError("The profiler recorded no kernel. Another profiler may be using CUPTI.")
    return recording


def _seconds(fn: Callable[..., Any], args: Sequence[Any], count: int) -> float:
    """Of so many calls that are dispatched one after the other, until the last one has ended."""
    start = time.perf_counter()
    out = None
    for _ in range(count):
        out = fn(*args)
    jax.block_until_ready(out)
    return time.perf_counter() - start


def _trace(run: Callable[[], Any], devices: Sequence[jax.Device]) -> bytes:
    """The trace of a run, and, after a pause, of small collectives: an XSpace."""
    mesh = Mesh(np.array(devices), ("device",))
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "device"), mesh=mesh, in_specs=P("device"), out_specs=P()))
    ones = jax.device_put(np.ones(len(devices), np.float32), NamedSharding(mesh, P("device")))
    jax.block_until_ready(total(ones))
    with tempfile.TemporaryDirectory() as folder:
        with _profiler(folder):
            run()
            time.sleep(_PAUSE)
            for _ in range(_CALIBRATIONS):
                jax.block_until_ready(total(ones))
        (trace,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return trace.read_bytes()


def kernels_of(data: jax.profiler.ProfileData, fused: Sequence[str] = ()) -> Iterator[Kernel]:
    """The kernels and copies on the GPUs of a trace.

    A trace of XLA's has a plane for each GPU and a line for each of its streams. Events of kernels are named by the
    function that ran, also in CUDA graphs.

    Args:
      data: the trace.
      fused: names of kernels that communicate by themselves, beside those of this package.
    """
    for plane in data.planes:
        if not (found := re.fullmatch(r"/device:GPU:(\d+)", plane.name)):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                if event.duration_ns and not _NO_WORK.match(event.name):
                    yield Kernel(
                        device=int(found[1]),
                        stream=line.name,
                        name=event.name,
                        start_ns=event.start_ns,
                        end_ns=event.start_ns + event.duration_ns,
                        kind=_kind(event.name, fused),
                    )


def separate(kernels: Iterable[Kernel]) -> tuple[tuple[Kernel, ...], tuple[Kernel, ...]]:
    """What ran before the last long pause of each device, and the collectives that ran after it."""
    by_device: dict[int, list[Kernel]] = {}
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ns):
        by_device.setdefault(kernel.device, []).append(kernel)
    before: list[Kernel] = []
    after: list[Kernel] = []
    for ran in by_device.values():
        pauses = (i for i in range(len(ran) - 1, 0, -1) if ran[i].start_ns - ran[i - 1].end_ns > 0.9 * _PAUSE * 1e9)
        end = next(pauses, len(ran))
        before += ran[:end]
        after += (kernel for kernel in ran[end:] if kernel.kind == "collective")
    return tuple(before), tuple(after)


def _kind(name: str, fused: Sequence[str]) -> Kind:
    if name.startswith((*_own_kernel_names(), *fused)):
        return "fused"
    if _COLLECTIVE.search(name):
        return "collective"
    return "transfer" if name.startswith("MemcpyP2P") else "compute"


@functools.cache
def _own_kernel_names() -> tuple[str, ...]:
    modules = pathlib.Path(own_kernels.__path__[0]).rglob("*.py")
    return tuple(name for module in modules for name in re.findall(r"^def (\w+_kernel)\(", module.read_text(), re.M))


@functools.cache
def copy_bandwidth(devices: tuple[jax.Device, ...], nbytes: int = 1 << 29) -> float:
    """Bytes a second that each device reads and writes while all of them copy arrays of so many bytes."""
    mesh = Mesh(np.array(devices), ("device",))
    sharding = NamedSharding(mesh, P("device"))
    x = jax.jit(lambda: jnp.ones((len(devices), nbytes // 4), jnp.float32), out_shardings=sharding)()
    copy = jax.jit(jnp.negative, out_shardings=sharding)

    _seconds(copy, (x,), 2)
    return 2 * nbytes / min(_seconds(copy, (x,), 8) / 8 for _ in range(_REPETITIONS))


@contextlib.contextmanager
def _profiler(folder: str) -> Generator[None]:
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    # Some versions of XLA let no two kernels of a device run at the same time otherwise.
    name = "TF_GPU_CUPTI_FORCE_CONCURRENT_KERNEL"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        with jax.profiler.trace(folder, profiler_options=options):
            yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _gpus_of(out: Any) -> tuple[jax.Device, ...]:
    """The devices of a program's results, in the order of their mesh if there is one."""
    arrays = [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]
    if not arrays:
        raise TypeError("The function returns no array, so there is nothing to wait for.")
    sharding = max((array.sharding for array in arrays), key=lambda sharding: len(sharding.device_set))
    if isinstance(sharding, NamedSharding):
        devices = tuple(sharding.mesh.devices.flat)
    else:
        devices = tuple(sorted(sharding.device_set, key=lambda device: device.id))
    if any(device.platform not in ("gpu", "cuda") for device in devices):
        raise RuntimeError(
            f"taxes.account needs GPUs: the program runs on {devices[0].platform} devices, of which the profiler shows "
            "no kernels."
        )
    if any(device.process_index != jax.process_index() for device in devices):
        raise NotImplementedError("taxes.account needs all devices in one process, whose profiler sees all of them.")
    return devices


def _ordinals(
    groups: Sequence[Sequence[int]] | None, devices: Sequence[jax.Device]
) -> tuple[tuple[int, ...], ...] | None:
    if not groups or max(map(max, groups)) >= len(devices):
        return None
    return tuple(tuple(devices[position].local_hardware_id for position in group) for group in groups)
