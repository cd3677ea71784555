"""The GPU that a kernel is built for: everything that is a number of a GPU is in this file.

Sources: NVIDIA's CUDA C++ Programming Guide, "Compute Capabilities", and the data sheets of A100, H100 and B200; AMD's
white papers of CDNA 3 and CDNA 4. No kernel was ever run on a GPU of AMD.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A kind of GPU.

    Attributes:
      compute_capability: 90 for 9.0; 0x942 for AMD's gfx942.
      shared_memory: bytes that a block may have; None where nobody has looked it up.
      multiprocessors: of the largest GPU of its kind; an H100's where nobody has looked it up.
      multiply_adds: of 16-bit numbers, in a cycle of a multiprocessor; None likewise.
      wire: bytes that its links to other GPUs take in a cycle; None likewise.
    """

    compute_capability: int
    shared_memory: int | None = None
    multiprocessors: int = 132
    multiply_adds: int | None = None
    wire: int | None = None

    @property
    def has_big_shared_memory(self) -> bool:
        """Whether a block may have 227 KiB of shared memory; on other GPUs it has 99 to 163."""
        return (self.shared_memory or 0) >= 227 << 10

    @property
    def has_little_shared_memory(self) -> bool:
        """Whether a block may have 99 KiB of shared memory, as on GPUs that are not for data centres."""
        return self.shared_memory is not None and self.shared_memory < 128 << 10

    @property
    def has_e4m3(self) -> bool:
        """Whether it has float8_e4m3fn, as far as Triton knows. gfx942 has another e4m3."""
        return self.compute_capability == 0x950 or 89 <= self.compute_capability < 0x900

    def __str__(self) -> str:
        return name_of(self.compute_capability)


_TARGETS = {
    80: Target(compute_capability=80, shared_memory=163 << 10, multiprocessors=108),
    86: Target(compute_capability=86, shared_memory=99 << 10),
    87: Target(compute_capability=87, shared_memory=163 << 10),
    89: Target(compute_capability=89, shared_memory=99 << 10),
    # NVLink 4: 393 GB/s, measured with a plain copy, at 1.6 GHz.
    90: Target(compute_capability=90, shared_memory=227 << 10, multiprocessors=132, multiply_adds=2048, wire=245),
    100: Target(compute_capability=100, shared_memory=227 << 10, multiprocessors=148),
    103: Target(compute_capability=103, shared_memory=227 << 10, multiprocessors=148),
    120: Target(compute_capability=120, shared_memory=99 << 10),
    121: Target(compute_capability=121, shared_memory=99 << 10),
    0x942: Target(compute_capability=0x942, shared_memory=64 << 10, multiprocessors=304),
    0x950: Target(compute_capability=0x950, shared_memory=160 << 10, multiprocessors=256),
}


def capability_of(text: str) -> int:
    """The number of a GPU by what JAX calls its compute capability: 90 of "9.0", 0x942 of "gfx942"."""
    if text.startswith("gfx"):
        return int(text.split(":")[0].removeprefix("gfx"), 16)
    return int(text.replace(".", ""))


def is_amd(compute_capability: int) -> bool:
    """Whether a number of a GPU is one of AMD's."""
    return compute_capability >= 0x900


def name_of(compute_capability: int) -> str:
    """What a GPU of this number is called: "9.0", or "gfx942"."""
    return f"gfx{compute_capability:x}" if is_amd(compute_capability) else f"{compute_capability / 10}"


def target_of(compute_capability: int) -> Target:
    """The kind of GPU of a compute capability, 90 for 9.0 and 0x942 for gfx942."""
    return _TARGETS.get(compute_capability, Target(compute_capability=compute_capability))


# Where the heuristics of the products were measured. On other GPUs they count multiprocessors as if these were it.
HOPPER = target_of(90)

# Bytes a second of the memory of a GPU whose name (JAX's `device_kind`) has these words, from NVIDIA's data sheets. The
# first that fits is taken.
_MEMORY_BANDWIDTHS = {
    "B300": 8.0e12,
    "B200": 8.0e12,
    "GH200": 4.8e12,
    "H200": 4.8e12,
    "H100 NVL": 3.9e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "A100-SXM4-40GB": 1.555e12,
    "A100": 1.935e12,
    "L40S": 0.864e12,
}


def memory_bandwidth_of(device_kind: str) -> float | None:
    """Bytes a second between a GPU and its memory, as its data sheet says; None where nobody has looked it up."""
    return next((speed for words, speed in _MEMORY_BANDWIDTHS.items() if words in device_kind), None)
