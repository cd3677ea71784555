"""Where the time of a multi-GPU program goes: useful work, and the taxes of running it as many kernels.

`account` runs a program and divides its step by the three taxes of arXiv 2511.02168:

launch tax: the device is idle, because a kernel or the next program is still to be started.
bulk-synchronous tax: collectives have started on a device and wait for another one to arrive.
data-locality tax: one kernel writes to device memory what another one reads back.

They are read from a trace of JAX's profiler and from the compiled program, so from outside of kernels. A fused kernel
is one kernel: what it waits for, and what it passes on through memory by itself, counts as work.

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
    training or a decode loop, first without the profiler, which gives the length of a step, then with it.

        account = taxes.account(step, params, batch)
        rich.print(account.table())

    Args:
      fn: made by `jax.jit`; its operands must not be donated. Of another function, which may call several such, the
        data-locality tax is not known.
      *args: its operands, on the GPUs.
      name: of the account; by default that of the function.
      calls: equal operations that a step consists of; times are given for one.
      steps: how many to measure; by default as many as take 40 ms, at least 10. As many run before them, so that the
        clocks of the devices settle.
      bandwidth: of device memory, in bytes a second; by default that of a copy, measured here.
      compiler_options: XLA's flags for this program.
      fused: beginnings of the names of kernels that communicate by themselves, beside those of this package.
      keep: a folder that gets the trace (trace.xplane.pb), and what was read from it (recording.json), which
        `Recording.load` and `account_of` turn into an account on any machine.

    Returns:
      The account, whose parts add up to the measured step.

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
