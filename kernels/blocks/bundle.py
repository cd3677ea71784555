"""Bundles: several arrays as one parameter of a kernel, told apart by their names.

A bundle is a mapping from names to arrays where `shmem_call` takes it, and a tuple of pointers (or TMA descriptors) in
the kernel. Only arrays that there are belong to it, because a tuple cannot hold None as a kernel's parameter. Their
names are a constant of the kernel, such as `SCALES` for a bundle `scales`.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _place(NAMES, NAME):
    names = list(NAMES)
    return names.index(NAME) if NAME in names else -1


@triton.jit
def member(bundle, NAMES: tl.constexpr, NAME: tl.constexpr):
    """The array of this name, or None if it is not among NAMES, those of the bundle."""
    PLACE: tl.constexpr = _place(NAMES, NAME)
    found = None
    if PLACE >= 0:
        found = bundle[PLACE]
    return found
