"""How samples are taken and summed up. Without JAX, so that peers in processes of their own do it alike."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a sample is taken.

    seconds: how long one sample lasts, about: as many launches as that takes.
    least: launches of a sample at least. The first dispatch and the last wait take a millisecond of it: a decode step
        on two H200, of programs of 32 steps, took 207.3 us by 6 launches, and 203.6 by 20.
    idle: pause before the sample, which lets the clocks recover.
    warm: launches of the same program before the clock starts, as a share of the sample, so that a sample does not
        profit from a cooler predecessor.
    waits: of a program that is one step of many, the host waits for each step before it launches the next.
    """

    name: str
    seconds: float
    least: int = 1
    idle: float = 0.0
    warm: float = 0.0
    waits: bool = False

    def launches(self, program_seconds: float) -> int:
        return min(64, max(self.least, round(self.seconds / program_seconds)))

    def warm_launches(self, program_seconds: float) -> int:
        return max(1, round(self.launches(program_seconds) * self.warm)) if self.warm else 0

    def sample_seconds(self, program_seconds: float) -> float:
        """How long a sample takes, with what comes before it."""
        launches = self.launches(program_seconds) + self.warm_launches(program_seconds)
        return self.idle + launches * program_seconds


SUSTAINED = Mode(name="sustained", seconds=0.040, least=20, warm=0.25)
BURST = Mode(name="burst", seconds=0.008, idle=0.1)
MODES = (SUSTAINED, BURST)
# A step a call, as servers run them, where an operation has steps (`Operation.stepwise`).
CALLS = Mode(name="calls", seconds=0.040, least=20, warm=0.25)
WAITED = Mode(name="waited", seconds=0.040, warm=0.25, waits=True)
STEPWISE = (CALLS, WAITED)
MIN_ROUNDS = 5
# A difference within this spread is no difference.
NOISY = 0.03


def quantiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return statistics.median(samples), fifths[0], fifths[-1]


def spread(median: float, p20: float, p80: float) -> float:
    """How far the samples lie apart: from the 20th to the 80th percentile, as a share of the median."""
    return (p80 - p20) / median
