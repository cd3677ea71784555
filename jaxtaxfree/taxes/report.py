"""How the time of a step is divided, as numbers, a table and a picture."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from jaxtaxfree.taxes import hlo, timeline
from jaxtaxfree.taxes.profile import Recording
from jaxtaxfree.taxes.timeline import DeviceTime, Kind

# The parts of a step in the order of tables and pictures: field, words, color.
PARTS = (
    ("work", "useful work", "#5cb85c"),
    ("communication", "exposed communication", "#4a90d9"),
    ("launch", "launch tax", "#777777"),
    ("bulk_synchronous", "bulk-synchronous tax", "#d9534f"),
    ("locality", "data-locality tax (at most)", "#f0ad4e"),
    ("rest", "unexplained", "#dddddd"),
)


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """All kernels of one name.

    Attributes:
      name, kind: of the function.
      count: per call and device.
      seconds: per call and device, waits included.
    """

    name: str
    kind: Kind
    count: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Account:
    """Where the time of a call goes: seconds, means over the devices. The parts add up to `step`.

    Attributes:
      name: of the program.
      step: a call's time in a queue of steps, measured without the profiler.
      work: a kernel computes or copies, or is a fused one, whose waits and transfers are not visible from outside.
      communication: nothing but collectives run, and their ranks are all there. Fused kernels compute meanwhile.
      launch: nothing runs.
      dispatch: the part of `launch` between one step and the next, in which the host starts programs.
      bulk_synchronous: nothing but collectives run, and they wait for a rank to arrive.
      locality: what kernels write for others to read back, over the bandwidth of a copy; taken out of `work` and
        `communication`. At most so much, because caches may hold it; None if the program is not known.
      rest: what the trace does not explain of `step`. Negative where kernels took longer under the profiler.
      traced_step: a call's time under the profiler.
      fused_lead: how much earlier than on the last device fused kernels started; the most they waited because of it.
      locality_bytes: of which `locality` is the time.
      bandwidth: bytes a second that a copy in device memory reads and writes.
      clock_error: of starts that are compared between devices; None if nothing told how their clocks differ.
      calls: that a step consists of.
      steps: that were looked at.
      devices: the parts of each device, as the trace shows them, per step.
      kernels: by the time they took.
      notes: what to know about these numbers, in sentences.
    """

    name: str
    step: float
    work: float
    communication: float
    launch: float
    dispatch: float
    bulk_synchronous: float
    locality: float | None
    rest: float
    traced_step: float
    fused_lead: float
    locality_bytes: int | None
    bandwidth: float
    clock_error: float | None
    calls: int
    steps: int
    devices: tuple[DeviceTime, ...]
    kernels: tuple[KernelTime, ...]
    notes: tuple[str, ...]

    @property
    def tax(self) -> float:
        """All three taxes."""
        return self.launch + self.bulk_synchronous + self.part("locality")

    def part(self, field: str) -> float:
        """One of the parts, 0 if it is not known."""
        return getattr(self, field) or 0.0

    def table(self) -> Table:
        return table([self])

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        save_png([self], path)


def account_of(recording: Recording, name: str = "") -> Account:
    """Divides the time of a recorded program."""
    calls = recording.calls
    seen = timeline.read(
        recording.kernels,
        recording.steps,
        recording.groups,
        skip=recording.skip,
        calibration=recording.calibration,
    )
    notes = list(seen.notes)

    def mean(field: str) -> float:
        return sum(getattr(device, field) for device in seen.devices) / len(seen.devices)

    # Kernels are timed by the devices; but the profiler makes starting them slower, so it is what is left of a step
    # measured without it that counts as their launch.
    launch = min(mean("idle"), max(0.0, recording.step_seconds - mean("busy")))
    work, communication, locality, traffic = mean("compute"), mean("communication"), None, None
    if recording.hlo is None:
        notes.append("The program is not known, so the data-locality tax is part of the work.")
    else:
        traffic = hlo.traffic(recording.hlo)
        notes += traffic.notes
        of_work = min(traffic.compute / recording.bandwidth, work)
        of_communication = min(traffic.collective / recording.bandwidth, communication)
        work, communication, locality = work - of_work, communication - of_communication, of_work + of_communication
    if any(kernel.kind == "fused" for kernel in recording.kernels):
        notes.append(
            "What fused kernels wait for, send, and pass on through memory happens inside of them and counts as work."
        )
    if seen.clock_error is not None and seen.clock_error > 0.05 * recording.step_seconds / calls:
        notes.append(f"The clocks of the devices are known to {seen.clock_error * 1e6:.1f} µs only.")

    parts = {
        "work": work,
        "communication": communication,
        "launch": launch,
        "bulk_synchronous": mean("waiting"),
        "rest": recording.step_seconds - launch - mean("busy"),
        "step": recording.step_seconds,
        "dispatch": launch * mean("dispatch") / mean("idle") if launch else 0.0,
        "traced_step": mean("step"),
        "fused_lead": mean("fused_lead"),
    }
    return Account(
        name=name,
        **{part: seconds / calls for part, seconds in parts.items()},
        locality=None if locality is None else locality / calls,
        locality_bytes=None if traffic is None else round(traffic.total / calls),
        bandwidth=recording.bandwidth,
        clock_error=seen.clock_error,
        calls=calls,
        steps=seen.steps,
        devices=seen.devices,
        kernels=_kernel_times(recording, len(seen.devices) * recording.steps * calls),
        notes=tuple(notes),
    )


def _kernel_times(recording: Recording, calls: int) -> tuple[KernelTime, ...]:
    times: dict[tuple[str, Kind], list[float]] = {}
    for kernel in recording.kernels:
        times.setdefault((kernel.name, kernel.kind), []).append(kernel.end_ns - kernel.start_ns)
    found = (
        KernelTime(name=name, kind=kind, count=len(spans) / calls, seconds=sum(spans) / calls * 1e-9)
        for (name, kind), spans in times.items()
    )
    return tuple(sorted(found, key=lambda kernel: -kernel.seconds))


def table(accounts: Sequence[Account]) -> Table:
    """The accounts side by side."""
    made = Table("µs a call", *(account.name for account in accounts))
    for column in made.columns[1:]:
        column.justify = "right"

    def row(words: str, field: str, **style: Any) -> None:
        values = [getattr(account, field) for account in accounts]
        cells = (
            "not known" if value is None else f"{value * 1e6:.1f}  {value / account.step:4.0%}"
            for value, account in zip(values, accounts)
        )
        made.add_row(words, *cells, **style)

    for field, words, _ in PARTS:
        row(words, field)
        if field == "launch":
            row("  of it between steps", "dispatch", style="dim")
    made.add_section()
    row("step", "step", style="bold")
    row("step under the profiler", "traced_step", style="dim")
    if any(account.fused_lead for account in accounts):
        row("fused kernels started ahead of the last by", "fused_lead", style="dim")
    return made


def compare(before: Account, after: Account) -> str:
    """In one sentence, how the difference of two steps is made up."""
    changes = (
        f"{words.removesuffix(' (at most)')} {(after.part(field) - before.part(field)) * 1e6:+.1f}"
        for field, words, _ in PARTS
    )
    return (
        f"A call takes {_difference(before.step, after.step)} in {after.name} than in {before.name}, with "
        f"{_difference(before.tax, after.tax)} of taxes: {', '.join(changes)}."
    )


def _difference(before: float, after: float) -> str:
    return f"{abs(after - before) * 1e6:.1f} µs {'more' if after > before else 'less'}"


def save_png(accounts: Sequence[Account], path: str | os.PathLike[str]) -> None:
    """Draws a bar for each account. Needs matplotlib (the extra jaxtaxfree[simulator])."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A picture of taxes needs matplotlib: pip install 'jaxtaxfree[simulator]'") from error
    figure = Figure(figsize=(10, 1.6 + 0.5 * len(accounts)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [account.name for account in accounts]
    left = [0.0] * len(accounts)
    for field, words, color in PARTS:
        values = [account.part(field) * 1e6 for account in accounts]
        # What is negative goes to the left of zero: the bars to its right are too long by it.
        starts = [at if value >= 0 else 0.0 for value, at in zip(values, left)]
        axes.barh(names, values, left=starts, color=color, label=words, height=0.6)
        left = [at + max(value, 0.0) for at, value in zip(left, values)]
    axes.invert_yaxis()
    axes.set(xlabel="µs a call")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
