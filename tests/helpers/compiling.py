"""How tests compile kernels: no further than they look, and nothing twice."""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Container, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
import triton
from jax_triton import triton_lib
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITCallable

KERNELS = Path(__file__).parents[2] / "kernels"
FOR_SO_LONG = 24 * 3600  # seconds
_directory: Path | None = None  # where this process keeps what it has compiled
_TO_TTGIR = {name: vars(CUDABackend)[name] for name in ("make_ttgir", "gluon_to_ttgir")}
_compiled: dict[Any, dict] = {}  # by kernel and how far it is compiled, what jax-triton keeps of each


@functools.cache
def _digest() -> str:
    """Of all that decides what becomes of a kernel's call. Places in the source do, too: they stand in the code."""
    digest = hashlib.sha256()
    for file in sorted((*KERNELS.rglob("*.py"), Path(__file__))):
        digest.update(f"{file} {file.stat().st_size}".encode() + file.read_bytes())
    for package in ("triton", "jax-triton", "jaxlib"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()[:16]


def keep_in(directory: Path) -> None:
    """What is compiled is kept here from one run to the next, until a kernel changes."""
    global _directory
    _directory = directory / _digest()
    _directory.mkdir(parents=True, exist_ok=True)
    os.utime(_directory)
    for other in directory.iterdir():  # of other sources
        with contextlib.suppress(FileNotFoundError):
            if other.stat().st_mtime < time.time() - FOR_SO_LONG:
                shutil.rmtree(other, ignore_errors=True)


def once[T](make: Callable[[], T], *keys: Any) -> T:
    """The result of a function that depends on the keys and on `_digest` alone; it is called where no run has yet."""
    if _directory is None:
        return make()
    file = _directory / f"{hashlib.sha256(repr(keys).encode()).hexdigest()}.pickle"
    with contextlib.suppress(FileNotFoundError):
        return pickle.loads(file.read_bytes())
    result = make()
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(result))
    part.replace(file)  # at once, because several processes write
    return result


@contextlib.contextmanager
def parsed_once() -> Generator[None]:
    """Triton parses the source of a function at each call of it in a kernel, and leaves the tree as it is."""
    known: dict[str, Any] = {}
    parse = JITCallable.parse

    def parsed(self: JITCallable) -> Any:
        if self._src not in known:
            known[self._src] = parse(self)
        return known[self._src]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITCallable, "parse", parsed)
        yield


@contextlib.contextmanager
def no_cubin() -> Generator[None]:
    """Kernels are compiled to PTX, and not assembled: programs have PTX, and tests assemble it by `ptxas_report`."""
    with pytest.MonkeyPatch.context() as patch:
        _keep_apart(patch, "ptx")
        patch.setattr(CUDABackend, "make_cubin", lambda *_: b"")
        yield


def _keep_apart(patch: pytest.MonkeyPatch, name: str) -> None:
    """What is not compiled in full must not be mixed up with what is.

    Processes that a test starts do not inherit the folder, as they would from `triton.knobs.cache.dir = ...`.
    """
    folder = _directory or Path(_while_this_process_runs().name)
    patch.setitem(vars(triton.knobs.cache), "dir", str(folder / name))


@functools.cache
def _while_this_process_runs() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@contextlib.contextmanager
def no_code(*, memory: bool = True) -> Generator[None]:
    """Kernels are compiled as far as it takes to know that they are valid, and how much shared memory they need.

    The rest, LLVM and PTX, takes most of the time. So it is left out where a test asks which kernels a program
    launches, or how often. The tests in tests/compiled read the code.

    Args:
      memory: False to end where the source has been read. Kernels seem to need no shared memory then.
    """
    with no_cubin(), pytest.MonkeyPatch.context() as patch:
        _keep_apart(patch, "memory" if memory else "source")
        for name, in_full in _TO_TTGIR.items():  # also within another `no_code`, which may ask for less
            patch.setattr(CUDABackend, name, in_full if memory else _describe)
        patch.setattr(CUDABackend, "make_llir", _allocate if memory else _assume_none)
        patch.setattr(CUDABackend, "make_ptx", _name)
        kept = property(lambda function: _compiled.setdefault((function.fn, memory), {}))
        patch.setattr(triton_lib.TritonFunction, "_kernel_cache", kept)
        yield


def names(cases: Iterable[str], like_others: Container[str]) -> pytest.MarkDecorator:
    """The parameter `name` of a test of compiled code: cases whose code is like that of two others are soak."""
    marked = [pytest.param(case, marks=[pytest.mark.soak] if case in like_others else []) for case in cases]
    return pytest.mark.parametrize("name", marked)


each_depth = pytest.mark.parametrize("memory", (False, pytest.param(True, marks=pytest.mark.soak)))
"""For `no_code`: tests of many forms of a call ask for its memory in `make soak`. tests/compiled always does."""


def _describe(self: CUDABackend, module: Any, metadata: dict[str, Any], *_: Any) -> Any:
    metadata["tensordesc_meta"] = module.get_tensordesc_metadata()
    return module


def _assume_none(self: CUDABackend, module: Any, metadata: dict[str, Any], options: Any, capability: int) -> str:
    metadata.update(num_warps=options.num_warps, shared=0, tmem_size=0, name=module.get_entry_func_name())
    for kind in ("global", "profile"):
        metadata[f"{kind}_scratch_size"], metadata[f"{kind}_scratch_align"] = 0, 1
    return ""


def _allocate(self: CUDABackend, module: Any, metadata: dict[str, Any], options: Any, capability: int) -> str:
    """The part of `CUDABackend.make_llir` that divides memory, with what it says of it."""
    version = options.ptx_version
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
    passes.ttgpuir.add_allocate_global_scratch_memory(manager)
    manager.run(module, "make_llir")
    _assume_none(self, module, metadata, options, capability)
    metadata["num_warps"] = module.get_int_attr("ttg.total-num-warps") or options.num_warps
    metadata["shared"] = module.get_int_attr("ttg.shared")
    metadata["global_scratch_size"] = module.get_int_attr("ttg.global_scratch_memory_size") or 0
    metadata["global_scratch_align"] = module.get_int_attr("ttg.global_scratch_memory_alignment") or 1
    return ""


def _name(self: CUDABackend, code: str, metadata: dict[str, Any], *_: Any) -> str:
    return f".visible .entry {metadata['name']}"
