"""Where the time of devices goes, from the kernels that ran on them. Nothing here needs a GPU or a trace."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["compute", "collective", "transfer", "fused"]
Activity = Literal["compute", "communication", "waiting", "idle"]

# What a device does while several kernels run: the first of these that one of them does.
_ACTIVITIES: tuple[Activity, ...] = ("compute", "communication", "waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel or copy that ran on a device.

    Attributes:
      device: its ordinal.
      stream: it ran on.
      name: of its function.
      start_ns, end_ns: on the clock of its device.
      kind: "collective" (all its ranks must arrive), "transfer" (a copy to another device), "fused" (a kernel that
        communicates by itself), or "compute" (everything else).
    """

    device: int
    stream: str
    name: str
    start_ns: float
    end_ns: float
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class DeviceTime:
    """What one device did, in seconds of a step. They add up to the step, all but `fused_lead`.

    Attributes:
      device: its ordinal.
      compute: a kernel ran that is no collective.
      communication: only collectives and transfers ran, and one of them had all its ranks.
      waiting: only collectives ran, and each of them waited for a rank.
      gaps: nothing ran, between two kernels of a step.
      dispatch: nothing ran, between the last kernel of a step and the first one of the next.
      fused_lead: how much earlier than on the last device fused kernels started. The most that they may have waited
        because of it; what they did in that time is not visible from outside.
    """

    device: int
    compute: float
    communication: float
    waiting: float
    gaps: float
    dispatch: float
    fused_lead: float

    @property
    def busy(self) -> float:
        return self.compute + self.communication + self.waiting

    @property
    def idle(self) -> float:
        return self.gaps + self.dispatch

    @property
    def step(self) -> float:
        return self.busy + self.idle


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What all devices did.

    Attributes:
      devices: one after the other.
      steps: that were looked at.
      clock_error: seconds by which the ends of a collective differ between devices, in the median, after the clocks
        were aligned by them; None without collectives, when clocks are taken as they are.
      notes: what to know about it, in sentences.
    """

    devices: tuple[DeviceTime, ...]
    steps: int
    clock_error: float | None
    notes: tuple[str, ...] = ()


def read(
    kernels: Iterable[Kernel],
    steps: int,
    groups: Sequence[Sequence[int]] | None = None,
    *,
    skip: int = 1,
    calibration: Iterable[Kernel] = (),
) -> Timeline:
    """Says where the time of each device went.

    A collective waits on a device from its own start to its start on the last device of its group. A small one ends
    everywhere at about the same time, which tells how the clocks of the devices differ.

    Args:
      kernels: of so many equal steps, one after the other.
      steps: how many. The last one only marks where the one before it ends.
      groups: ordinals of the devices that communicate with each other; None for all of them.
      skip: how many steps at the beginning not to look at.
      calibration: small collectives of all devices, for their clocks; without them, those of the steps.

    Raises:
      ValueError: if there are no kernels, or too few steps.
    """
    by_device = _by_device(kernels)
    if not by_device:
        raise ValueError("There are no kernels on any device.")
    if steps < skip + 2:
        raise ValueError(f"{steps} steps are too few: {skip} are skipped, and the last one is only an end.")

    everyone = [sorted(by_device)]
    groups = groups or everyone
    collectives, unmatched = _instances(by_device, groups, ("collective",))
    references, _ = _instances(_by_device(calibration), everyone, ("collective",))
    offsets = _clock_offsets(references or collectives)
    fused, _ = _instances(by_device, groups, ("fused",))
    lateness = {id(kernel): late for kernel, late in _lateness(collectives + fused, offsets)}
    whole = all(len(ran) % steps == 0 for ran in by_device.values())
    notes = []
    if not whole:
        counts = ", ".join(str(len(ran)) for ran in by_device.values())
        notes.append(f"The devices ran {counts} kernels in {steps} steps, so steps could not be told apart.")
    if unmatched:
        notes.append(f"{unmatched} collectives ran on one device and not on another; their waits are not known.")
    return Timeline(
        devices=tuple(_device_time(ran, steps, skip, whole, lateness) for _, ran in sorted(by_device.items())),
        steps=steps - 1 - skip if whole else steps,
        clock_error=_clock_error(references or collectives, offsets),
        notes=tuple(notes),
    )


def _by_device(kernels: Iterable[Kernel]) -> dict[int, list[Kernel]]:
    """The kernels of each device in the order of their starts."""
    by_device: dict[int, list[Kernel]] = {}
    for kernel in sorted(kernels, key=lambda kernel: (kernel.start_ns, kernel.end_ns)):
        by_device.setdefault(kernel.device, []).append(kernel)
    return by_device


def _device_time(
    ran: Sequence[Kernel], steps: int, skip: int, whole: bool, lateness: Mapping[int, float]
) -> DeviceTime:
    """The time of one device, which ran these in the order of their starts."""
    if whole:
        first = [kernel.start_ns for kernel in ran[:: len(ran) // steps]]
        begin, end, starts, steps = first[skip], first[-1], set(first), steps - 1 - skip
    else:
        starts, begin, end = set(), ran[0].start_ns, max(kernel.end_ns for kernel in ran)
    times: defaultdict[str, float] = defaultdict(float)
    for activity, since, until in _activities(_spans(ran, lateness), begin, end):
        if activity == "idle":
            activity = "dispatch" if until in starts else "gaps"
        times[activity] += until - since
    for kernel in ran:
        if kernel.kind == "fused" and begin <= kernel.start_ns < end:
            times["fused_lead"] += lateness.get(id(kernel), 0.0)
    fields = ("compute", "communication", "waiting", "gaps", "dispatch", "fused_lead")
    return DeviceTime(device=ran[0].device, **{field: times[field] / steps * 1e-9 for field in fields})


def _spans(ran: Iterable[Kernel], lateness: Mapping[int, float]) -> Iterator[tuple[Activity, float, float]]:
    for kernel in ran:
        if kernel.kind in ("compute", "fused"):
            yield "compute", kernel.start_ns, kernel.end_ns
            continue
        late = lateness.get(id(kernel), 0.0) if kernel.kind == "collective" else 0.0
        complete = min(kernel.start_ns + late, kernel.end_ns)
        yield "waiting", kernel.start_ns, complete
        yield "communication", complete, kernel.end_ns


def _activities(
    spans: Iterable[tuple[Activity, float, float]], begin: float, end: float
) -> Iterator[tuple[Activity, float, float]]:
    """What is done from when to when, without a hole from `begin` to `end`, where these spans may overlap."""
    edges = sorted(edge for activity, since, until in spans for edge in ((since, 1, activity), (until, -1, activity)))
    running: Counter[Activity] = Counter()
    now = begin
    for time, change, activity in edges:
        time = min(max(time, begin), end)
        if time > now:
            yield next((activity for activity in _ACTIVITIES if running[activity]), "idle"), now, time
            now = time
        running[activity] += change
    if end > now:
        yield "idle", now, end


def _instances(
    by_device: Mapping[int, Sequence[Kernel]], groups: Sequence[Sequence[int]], kinds: Collection[Kind]
) -> tuple[list[dict[int, Kernel]], int]:
    """The kernels that are one call on all devices of a group, by device, and how many are missing somewhere.

    The n-th kernel of a name on one device belongs to the n-th of that name on the others.
    """
    found: list[dict[int, Kernel]] = []
    unmatched = 0
    for group in groups:
        calls: dict[tuple[str, int], dict[int, Kernel]] = {}
        for device in group:
            seen: Counter[str] = Counter()
            for kernel in by_device.get(device, ()):
                if kernel.kind in kinds:
                    calls.setdefault((kernel.name, seen[kernel.name]), {})[device] = kernel
                    seen[kernel.name] += 1
        whole = [call for call in calls.values() if len(call) == len(group)]
        unmatched += len(calls) - len(whole)
        found += whole
    return found, unmatched


def _clock_offsets(collectives: Iterable[Mapping[int, Kernel]]) -> dict[int, float]:
    """By how much the clock of each device is ahead of that of the first device it communicates with."""
    differences: dict[int, list[float]] = {}
    for call in collectives:
        reference = call[min(call)].end_ns
        for device, kernel in call.items():
            differences.setdefault(device, []).append(kernel.end_ns - reference)
    return {device: statistics.median(values) for device, values in differences.items()}


def _clock_error(collectives: Sequence[Mapping[int, Kernel]], offsets: Mapping[int, float]) -> float | None:
    spreads = []
    for call in collectives:
        ends = [kernel.end_ns - offsets[device] for device, kernel in call.items()]
        spreads.append(max(ends) - min(ends))
    return statistics.median(spreads) * 1e-9 if spreads else None


def _lateness(calls: Iterable[Mapping[int, Kernel]], offsets: Mapping[int, float]) -> Iterator[tuple[Kernel, float]]:
    """For each kernel, how long after it the last device started the same call, in nanoseconds."""
    for call in calls:
        starts = {device: kernel.start_ns - offsets.get(device, 0.0) for device, kernel in call.items()}
        last = max(starts.values())
        for device, kernel in call.items():
            yield kernel, last - starts[device]
