"""GPU tests on a machine without GPUs: what a test does in Python, and the kernels that it compiles.

`pytest --rehearse=run` has virtual CPU devices where a test asks for GPUs. Each program is lowered for CUDA first, as
it would be there, which compiles its Gluon kernels to PTX. Then it runs on the CPU, with references in place of
kernels. So a fault in a test, a call that no kernel takes and a kernel that does not compile show before a GPU is
there. `--rehearse=compile` leaves a test where it would first run a kernel. What Triton compiled stays in its cache
(TRITON_CACHE_DIR), for a machine that has the GPU.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import jax
import pytest
from jax._src.interpreters import mlir

from jaxtaxfree import teams

PLATFORM = "cuda"
_rehearsed: "Rehearsal | None" = None


class Rehearsal:
    """What happened so far.

    Attributes:
      programs: how many have kernels.
      launches: of kernels in these.
    """

    def __init__(self) -> None:
        self.programs = self.launches = 0

    def count(self, program: str) -> int:
        """The launches of a program for CUDA."""
        launches = program.count("triton_kernel_call")
        self.programs += launches > 0
        self.launches += launches
        return launches


def needs_real_gpus() -> None:
    """The rest of a test is not for a rehearsal."""
    if _rehearsed:
        pytest.skip("rehearsed as far as it goes without a GPU")


@contextlib.contextmanager
def rehearsing(device_kind: str, run: bool = True) -> Generator[Rehearsal]:
    """Programs for the CPU are lowered for CUDA as well, and have references where they would have kernels.

    Args:
      device_kind: as JAX names the GPU, such as "NVIDIA H200": its tables say which kernels are taken.
      run: False for no more of a program with kernels than its lowering for CUDA. The test is skipped then.
    """
    seen = Rehearsal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "_rehearsed", seen)
        patch.setattr(teams.Team, "device_kind", device_kind)
        _give_devices(patch)
        _take_references(patch)
        _lower_twice(patch, seen, run)
        yield seen


def _give_devices(patch: pytest.MonkeyPatch) -> None:
    devices = jax.devices

    def found(backend: str | None = None) -> Sequence[jax.Device]:
        return devices("cpu" if backend == PLATFORM else backend)

    patch.setattr(jax, "devices", found)


def _take_references(patch: pytest.MonkeyPatch) -> None:
    """For "fused", which is refused on a CPU otherwise."""
    of_cuda, of_all = mlir._platform_specific_lowerings[PLATFORM], mlir._lowerings
    for primitive, entry in of_cuda.items():
        if primitive in of_all and getattr(entry.rule, "__module__", "").startswith("jaxtaxfree."):
            patch.setitem(of_all, primitive, _with_reference(of_all[primitive]))


def _with_reference(entry: mlir.LoweringRuleEntry) -> mlir.LoweringRuleEntry:
    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        if params.get("implementation") == "fused":
            params["implementation"] = "xla"
        return entry.rule(ctx, *operands, **params)

    return mlir.LoweringRuleEntry(rule, entry.inline)


def _lower_twice(patch: pytest.MonkeyPatch, seen: Rehearsal, run: bool) -> None:
    lower = mlir.lower_jaxpr_to_module

    def both(*args: Any, platforms: Sequence[str], **keywords: Any) -> Any:
        if tuple(platforms) != ("cpu",):
            return lower(*args, platforms=platforms, **keywords)
        launches = seen.count(str(lower(*args, platforms=(PLATFORM,), **keywords).module))
        if launches and not run:
            needs_real_gpus()
        try:
            return lower(*args, platforms=platforms, **keywords)
        except NotImplementedError:
            if launches:  # of what has no reference
                needs_real_gpus()
            raise

    patch.setattr(mlir, "lower_jaxpr_to_module", both)
