"""NVLink domains of several hosts, such as those of GB200: what NVML says of the fabric of a GPU.

This was written after NVIDIA's documents, and was never run on such machines.
https://docs.nvidia.com/deploy/nvml-api/group__nvmlFabricDefs.html
"""

import ctypes
import dataclasses

_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED
_STATES = ("not supported", "not started", "in progress", "completed")


class _Info(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health", ctypes.c_uint),
    )


@dataclasses.dataclass(frozen=True)
class Fabric:
    """Where a GPU is in a fabric.

    Attributes:
      cluster: UUID in hexadecimal digits; 0 alone on hosts whose NVLink ends in them.
      clique: number of the GPUs in that cluster which reach each other.
      state: of the GPU's registration with the fabric.
      status: NVML's code of that, 0 if it went well.
    """

    cluster: str
    clique: int
    state: int
    status: int

    @property
    def domain(self) -> str | None:
        """A name for the GPUs that reach each other over NVLink, on whichever host; None if NVLink ends in the host."""
        if self.state != _COMPLETED or self.status != 0 or not int(self.cluster, 16):
            return None
        return f"{self.cluster}/{self.clique}"

    def __str__(self) -> str:
        state = _STATES[self.state] if self.state < len(_STATES) else str(self.state)
        return f"cluster {self.cluster}, clique {self.clique}, state {state}, status {self.status}"


def of(bus_id: str) -> Fabric | None:
    """The fabric of the GPU at a PCI address, such as "0000:0a:00.0"; None if NVML does not tell."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        begin, end, find, ask = (
            getattr(nvml, name)
            for name in (
                "nvmlInit_v2",
                "nvmlShutdown",
                "nvmlDeviceGetHandleByPciBusId_v2",
                "nvmlDeviceGetGpuFabricInfoV",
            )
        )
    except (OSError, AttributeError):  # there is no driver, or an old one
        return None
    if begin() != 0:
        return None
    try:
        device, info = ctypes.c_void_p(), _Info(version=ctypes.sizeof(_Info) | 2 << 24)
        if find(bus_id.encode(), ctypes.byref(device)) != 0 or ask(device, ctypes.byref(info)) != 0:
            return None
        return Fabric(bytes(info.cluster).hex(), info.clique, info.state, info.status)
    finally:
        end()


def report(found: Fabric | None, domain: str | None) -> tuple[str, str]:
    """What is to be said of a GPU's fabric, and what to do.

    Args:
      domain: of the GPU, if memory can be handed over in it.
    """
    if found is None or found.domain is None:
        return f"NVLink ends in this host ({found or 'NVML tells of no fabric'})", ""
    if domain is None:
        mend = (
            "Give the processes of all its hosts one IMEX channel (/dev/nvidia-caps-imex-channels). Until then kernels "
            "take each host for itself."
        )
        return f"several hosts may be in it ({found}), but memory cannot be handed over to them", mend
    return f"several hosts may be in it ({found}); this library was never run on several hosts of one", ""
