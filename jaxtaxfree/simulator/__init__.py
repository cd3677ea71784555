"""Runs the kernels of all ranks on the CPU, in any interleaving, and raises what a GPU would hide."""

from jaxtaxfree.simulator.callback import Recording, reset, simulating
from jaxtaxfree.simulator.errors import (
    DataRaceError,
    DeadlockError,
    EpochMismatchError,
    MbarrierError,
    MessageError,
    MissingFenceError,
    OutOfBoundsError,
    SignalCountError,
    SimulationError,
    UnfinishedOperationError,
    UninitializedReadError,
    WaitOrderError,
    WaitTimeoutError,
)
from jaxtaxfree.simulator.session import Settings, run
from jaxtaxfree.simulator.trace import Span, Trace

__all__ = [
    "DataRaceError",
    "DeadlockError",
    "EpochMismatchError",
    "MbarrierError",
    "MessageError",
    "MissingFenceError",
    "OutOfBoundsError",
    "Recording",
    "Settings",
    "SignalCountError",
    "SimulationError",
    "Span",
    "Trace",
    "UnfinishedOperationError",
    "UninitializedReadError",
    "WaitOrderError",
    "WaitTimeoutError",
    "reset",
    "run",
    "simulating",
]
