"""Runs the kernels of all ranks on the CPU, in any interleaving, and raises what a GPU would hide."""

from jaxtaxfree.simulator.callback import Recording, reset, simulating
from jaxtaxfree.simulator.errors import (
    AssumptionError,
    DataRaceError,
    DeadlockError,
    DeviceAssertError,
    DroppedWaitError,
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
    WastedTrafficWarning,
    WrongPeerError,
)
from jaxtaxfree.simulator.iris import run_iris
from jaxtaxfree.simulator.scheduler import Settings
from jaxtaxfree.simulator.session import run, run_calls
from jaxtaxfree.simulator.trace import Span, Trace

__all__ = [
    "AssumptionError",
    "DataRaceError",
    "DeadlockError",
    "DeviceAssertError",
    "DroppedWaitError",
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
    "WastedTrafficWarning",
    "WrongPeerError",
    "reset",
    "run",
    "run_calls",
    "run_iris",
    "simulating",
]
