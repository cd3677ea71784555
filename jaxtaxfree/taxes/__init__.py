"""Where the time of a multi-GPU program goes: useful work, and the taxes of running it as many kernels.

`account` runs a program and divides its step by the three taxes of arXiv 2511.02168:

launch tax: the device is idle, because a kernel or the next program has still to be started.
bulk-synchronous tax: collectives have started on a device and wait for another device to arrive.
data-locality tax: one kernel writes to device memory what another one reads back.

They are read from a trace of JAX's profiler and from the compiled program, so from outside of kernels. A fused kernel
is one kernel. Its waits, and the data that it passes to itself through memory, count as work.

`python -m jaxtaxfree taxes` accounts for XLA's programs and the fused ones side by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtaxfree.taxes.profile import Recording, record
from jaxtaxfree.taxes.report import Account, account_of, compare, save_png, table
from jaxtaxfree.taxes.timeline import DeviceTime, Kernel

__all__ = ["Account", "DeviceTime", "Kernel", "Recording", "account", "account_of", "compare", "save_png", "table"]


def account(
    fn: Callable[..., Any],
    *args: Any,
    name: str | None = None,
    calls: int = 1,
    steps: int | None = None,
    bandwidth: float | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    fused: Sequence[str] = (),
    keep: str | os.PathLike[str] | None = None,
) -> Account:
    """Runs a program on GPUs and says where the time of a step goes.

    A step is one call `fn(*args)`. Steps are dispatched one after the other without waiting for their results, as in a
    training or a decode loop. The first runs have no profiler, and give the length of a step. The next runs have it.

        account = taxes.account(step, params, batch)
        rich.print(account.table())

    Args:
      fn: a function made by `jax.jit`, which must not donate its operands. Another function, such as one that calls
        several jitted ones, works too, but its data-locality tax is not known.
      *args: its operands, on the GPUs.
      name: name of the account; by default that of the function.
      calls: number of equal operations in a step. Times are given for one operation.
      steps: number of steps to measure; by default as many as take 40 ms, at least 10. The same number runs before
        them, so that the clocks of the devices settle.
      bandwidth: bandwidth of device memory in bytes per second; by default that of a copy, measured here.
      compiler_options: XLA's flags for this program.
      fused: prefixes of the names of kernels that communicate by themselves, besides those of this package.
      keep: a folder for the trace (trace.xplane.pb) and for what was read from it (recording.json). `Recording.load`
        and `account_of` turn recording.json into an account on any machine.

    Returns:
      The account. Its parts add up to the measured step.

    Raises:
      RuntimeError: if the program does not run on GPUs, or the profiler sees none of its kernels.
      NotImplementedError: if its devices belong to several processes.
    """
    recording = record(
        fn,
        *args,
        calls=calls,
        steps=steps,
        bandwidth=bandwidth,
        compiler_options=compiler_options,
        fused=fused,
        keep=keep,
    )
    return account_of(recording, getattr(fn, "__name__", "program") if name is None else name)
