"""Programs for GPUs of AMD: what can be built without one. Nothing of this was ever run on such a GPU."""

import logging
import os
import re
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree import amd as launches
from jaxtaxfree import environment, gluon, iris, target
from jaxtaxfree.kernels import shmem
from tests.helpers import amd, iris_programs
from tests.helpers.support import TRITON_CALL, fails, mesh_of


def text_of(function: Any, mesh: Mesh, *shapes: Any, platforms: tuple[str, ...] = ("rocm",), specs: Any = None) -> str:
    program = jax.shard_map(function, mesh=mesh, in_specs=specs or P(), out_specs=P(), check_vma=False)
    return jax.jit(program).trace(*shapes).lower(lowering_platforms=platforms).as_text()


def kernels_of(text: str) -> list[bytes]:
    """The code objects that a program's launches name."""
    found = []
    for escaped in re.findall(r'opaque = "((?:[^"\\]|\\.)*)"', text):
        opaque = re.sub(rb"\\([0-9A-F]{2})", lambda code: bytes.fromhex(code[1].decode()), escaped.encode("latin-1"))
        opaque = opaque.replace(rb"\\", b"\\")
        kernel = gluon._field(gluon._field(zlib.decompress(opaque), 1), 1)
        with open(gluon._field(kernel, 4), "rb") as file:
            found.append(file.read())
    return found


def total(implementation: str | None) -> Any:
    return lambda x: jtf.psum(x, "tp", implementation=implementation)


ROW = jax.ShapeDtypeStruct((1024,), np.float32)


@pytest.mark.parametrize("architecture", amd.ARCHITECTURES)
def test_fused_is_lowered(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", architecture)
    text = text_of(total("fused"), mesh_of(4), ROW)
    assert TRITON_CALL in text and "all_reduce" not in text
    (code,) = kernels_of(text)
    assert code.startswith(b"\x7fELF") and architecture.encode() in code


def test_a_product_is_lowered() -> None:
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 256), (256, 128)))
    tile = {"kernel": "portable", "block_m": 64, "block_n": 64, "block_k": 32, "num_stages": 2}
    text = text_of(
        lambda x, w: jtf.all_gather_matmul(x, w, "tp", implementation="fused", config=tile), mesh_of(4), lhs, rhs,
        specs=(P(), P()),
    )  # fmt: skip
    assert text.count(TRITON_CALL) == 1 and "all_gather" not in text.replace("all_gather_matmul", "")
    assert all(code.startswith(b"\x7fELF") for code in kernels_of(text))


def test_none_takes_xla(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "jaxtaxfree"):
        text = text_of(total(None), mesh_of(4), jax.ShapeDtypeStruct((1028,), np.float32))
    assert TRITON_CALL not in text and "all_reduce" in text
    assert "no kernel was ever run on GPUs of AMD, such as gfx942" in caplog.text


def test_one_program_for_both_kinds_of_gpus() -> None:
    text = text_of(total("fused"), mesh_of(4), ROW, platforms=("cuda", "rocm"))
    assert text.count(TRITON_CALL) == 2


@triton.jit
def double_kernel(x_ptr, team, out_ptr, times, SIZE: tl.constexpr, extra=None):
    me = shmem.start(team)
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at) * times)
    shmem.finish(me)


def test_a_kernel_of_ones_own() -> None:
    def double(x: jax.Array) -> jax.Array:
        return jtf.shmem_call(double_kernel, x, axis_name="tp", out_type=x, grid=1, times=2, SIZE=1024, extra=None)

    (code,) = kernels_of(text_of(double, mesh_of(4), ROW))
    assert b"double_kernel" in code


def rotated(x: jax.Array) -> jax.Array:
    numbers = {"heap_bases": iris.BASES, "rank": iris.RANK, "after": (iris.RANK + 1) % iris.WORLD, "SIZE": x.size}
    buffers = {"inbox": iris.symmetric(x.shape, x.dtype), "flag": iris.symmetric((1,), jnp.int32, fill=0)}
    out = iris.Out(x.shape, x.dtype)
    return jtf.iris_call(iris_programs.rotate, axis_name="tp", grid=1, x=x, out=out, **buffers, **numbers)


@pytest.mark.parametrize("architecture", amd.EACH)
def test_a_kernel_in_iris_words(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meeting in front of it, its own release to a peer, its own wait, and 16 bytes of a row at a time."""
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", architecture)
    compile_, found = triton.compile, []

    def compiled(*args: Any, **keywords: Any) -> Any:
        found.append(compile_(*args, **keywords))
        return found[-1]

    monkeypatch.setattr(launches.triton, "compile", compiled)
    text_of(rotated, mesh_of(4), ROW)
    (code,) = (each.asm["amdgcn"] for each in found)
    assert amd.publishes_out_of_order(code) + amd.polls_that_do_not_acquire(code) == []
    assert amd.polling_loops(code) >= 2
    lines = amd.instructions(code)
    swaps = [i for i, line in enumerate(lines) if "_atomic_swap" in line]  # the kernel's, and that of a report
    assert len(swaps) == 2
    for i in swaps:
        assert lines[i - 2 : i] == ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0)"] and lines[i].endswith(" sc1")
    assert amd.store_widths(code)["dwordx4"] > 0


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    lhs, rhs = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 512), (512, 512)))
    tile = {"kernel": "portable", "block_m": 64, "block_n": 64, "block_k": 128, "num_stages": 4}

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jtf.all_gather_matmul(x, w, "tp", implementation="fused", config=tile)

    with fails(jtf.CompileError, "for compute capability gfx942", "of which there are 65536"):
        text_of(product, mesh_of(4), lhs, rhs, specs=(P(), P()))


def test_gluon_kernels_are_refused() -> None:
    assert "lowered for gfx942" in (gluon.unsupported("exchange", 0x942) or "")


def test_names_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert target.capability_of("gfx942:sramecc+:xnack-") == 0x942 and target.capability_of("9.0") == 90
    assert target.name_of(0x90A) == "gfx90a" and target.name_of(103) == "10.3"
    assert target.target_of(0x942).shared_memory == 65536 and str(target.target_of(0x950)) == "gfx950"
    for text, expected in (("gfx950", (90, 0x950)), ("80", (80, 0x942))):
        monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", text)
        assert (environment.compute_capability(), environment.compute_capability(rocm=True)) == expected
    monkeypatch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", "gfx1100")
    with pytest.raises(ValueError, match=r"not 'gfx1100'; for ROCm it is a name such as gfx942"):
        environment.compute_capability()


def test_files_of_kernels_stay() -> None:
    path = launches._file_of(b"code")
    assert launches._file_of(b"code") == path and os.path.getsize(path) == 4
