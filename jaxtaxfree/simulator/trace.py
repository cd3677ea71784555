"""What every program did, on an axis of steps."""

import dataclasses
import json
import os
from typing import Any

_COLORS = {"wait": "#d9534f", "push": "#4a90d9", "multiply": "#5cb85c", "work": "#9bbf85", "publish": "#1f3b64"}


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Something that a program did from one step to another.

    Attributes:
      kind: "wait", "publish" (of no length), "push" (stores to peers), "multiply" (products) or "work" (the rest).
      rank, program, call: who.
      begin, end: steps. A step is one memory operation of one program.
      label: what for: the signal, or where data go; empty for work.
      part: of the program: 0, or the number of a partition of a Gluon kernel.
    """

    kind: str
    rank: int
    program: int
    call: int
    begin: int
    end: int
    label: str
    part: int = 0


class Trace:
    """The spans of a simulation.

    Attributes:
      name: of the operation.
      spans: in the order in which they ended.
      steps: how many the simulation took.
    """

    def __init__(self, name: str):
        self.name = name
        self.spans: list[Span] = []
        self.steps = 0

    def lanes(self) -> dict[tuple[int, int, int], int]:
        """For each (rank, call, program) the slot of its rank that it ran in: the first that was free."""
        lives: dict[tuple[int, int, int], list[int]] = {}
        for span in self.spans:
            life = lives.setdefault((span.rank, span.call, span.program), [span.begin, span.end])
            life[0], life[1] = min(life[0], span.begin), max(life[1], span.end)
        free: dict[int, list[int]] = {}
        lanes = {}
        for key, (begin, end) in sorted(lives.items(), key=lambda item: (item[1][0], item[0])):
            ends = free.setdefault(key[0], [])
            lane = next((i for i, last in enumerate(ends) if last <= begin), len(ends))
            ends[lane:] = [end] if lane == len(ends) else [end, *ends[lane + 1 :]]
            lanes[key] = lane
        return lanes

    def _rows(self) -> dict[Span, int]:
        """For each span its row among those of its rank: a program has one for each of its parts."""
        lanes, parts = self.lanes(), 1 + max((span.part for span in self.spans), default=0)
        return {span: lanes[span.rank, span.call, span.program] * parts + span.part for span in self.spans}

    def save_chrome(self, path: str | os.PathLike) -> None:
        """Writes the trace for chrome://tracing and ui.perfetto.dev: a process for each rank, a step as 1 us."""
        rows = self._rows()
        ranks = sorted({span.rank for span in self.spans})
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"{self.name}, rank {rank}"}}
            for rank in ranks
        ]
        for span in self.spans:
            common = {
                "name": f"{span.kind} {span.label}",
                "cat": span.kind,
                "pid": span.rank,
                "tid": rows[span],
                "ts": span.begin,
                "args": {"program": span.program, "call": span.call},
            }
            if span.kind == "publish":
                events.append({"ph": "i", "s": "t", **common})
            else:
                events.append({"ph": "X", "dur": span.end - span.begin, **common})
        with open(path, "w") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    def save_png(self, path: str | os.PathLike) -> None:
        """Draws the trace, a row for each slot of each rank. Needs matplotlib (the extra jaxtaxfree[simulator])."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise ImportError("Trace.save_png needs matplotlib: pip install 'jaxtaxfree[simulator]'") from error
        row_of = self._rows()
        height: dict[int, int] = {}
        for span, row in row_of.items():
            height[span.rank] = max(height.get(span.rank, 0), row + 1)
        top, at = {}, 0
        for rank in sorted(height):
            top[rank] = at
            at += height[rank] + 1
        figure = Figure(figsize=(14, min(40, 1.5 + 0.18 * at)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for kind, color in _COLORS.items():
            spans = [span for span in self.spans if span.kind == kind]
            rows = [top[span.rank] + row_of[span] for span in spans]
            if kind == "publish":
                axes.plot([span.begin for span in spans], rows, "|", color=color, markersize=7, markeredgewidth=1.5)
            else:
                axes.barh(
                    rows,
                    [max(span.end - span.begin, 1) for span in spans],
                    left=[span.begin for span in spans],
                    height=0.8,
                    color=color,
                )
        for rank, row in top.items():
            axes.axhline(row - 1, color="#cccccc", linewidth=0.8)
            axes.text(-0.005, row, f"rank {rank}", transform=axes.get_yaxis_transform(), ha="right", va="top")
        axes.set(title=self.name, xlabel="step (one memory operation of one program)", ylim=(at, -1), yticks=[])
        handles = [Patch(color=color, label=kind) for kind, color in _COLORS.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
        figure.savefig(path, dpi=110)
