"""Numbers that a kernel is given at run time: the compiler knows of multiples of 16, so it moves rows of them whole."""

import re
from typing import Any

import jax
import numpy as np
import pytest
import triton
import triton.language as tl
from jax.sharding import PartitionSpec as P
from triton.experimental import gluon as triton_gluon
from triton.experimental.gluon import language as gl

import jaxtaxfree as jtf
from jaxtaxfree import amd
from jaxtaxfree.kernels import shmem
from jaxtaxfree.written import multiples_of_16, telling
from tests.compiled.test_gluon import PTX, launch_of
from tests.helpers.support import lower_for_cuda, mesh_of

SIZE = 1024


@triton.jit
def rows_kernel(x, none, scales, team, inbox, out, stride, SIZE: tl.constexpr, offset=0):
    """A row of x, by way of a peer."""
    me = shmem.start(team)
    at = tl.program_id(0) * stride + offset + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) * tl.load(scales[1] + at))
    shmem.finish(me)


@triton_gluon.jit
def gluon_rows_kernel(x, out, stride, SIZE: gl.constexpr):
    at = gl.program_id(0) * stride + gl.arange(0, SIZE, gl.BlockedLayout([8], [32], [4], [0]))
    gl.store(out + at, gl.load(x + at))


def rows(x: jax.Array, **numbers: int) -> jax.Array:
    return jtf.shmem_call(
        rows_kernel, x, {"a": x, "b": x}, axis_name="tp", out_type=x, grid=4, scratch={"inbox": x}, none=None,
        SIZE=SIZE, **numbers,
    )  # fmt: skip


def gluon_rows(x: jax.Array, **numbers: int) -> jax.Array:
    return jtf.shmem_call(gluon_rows_kernel, x, axis_name=(), out_type=x, grid=4, SIZE=SIZE, **numbers)


def code_of(function: Any, **numbers: int) -> str:
    call = jax.shard_map(
        lambda x: function(x, **numbers), mesh=mesh_of(2), in_specs=P(), out_specs=P(), check_vma=False
    )
    return launch_of(lower_for_cuda(call, jax.ShapeDtypeStruct((8192,), np.float16)))[PTX].decode()


@pytest.mark.parametrize("function", (rows, gluon_rows))
@pytest.mark.parametrize(("stride", "whole"), ((SIZE, True), (16, True), (-32, True), (SIZE + 8, False), (1, False)))
def test_accesses_of_rows(function: Any, stride: int, whole: bool, no_cubin: None) -> None:
    code = code_of(function, stride=stride)
    for access in ("ld", "st"):
        # Words alone are those of the heap.
        widths = set(re.findall(rf"\b{access}\.global\.(v4\.b32|v2\.b32|v4\.b16|v2\.b16|b16)", code))
        assert widths == ({"v4.b32"} if whole else {"b16"}), (access, stride)


def test_some_of_several_numbers(no_cubin: None) -> None:
    assert "st.global.v4" in code_of(rows, stride=SIZE, offset=4 * SIZE)
    assert "st.global.v4" not in code_of(rows, stride=SIZE, offset=3)


@triton.jit(do_not_specialize=["left"], do_not_specialize_on_alignment=["aligned"])
def numbers_kernel(out, n, n_by_16, left, aligned, constant: tl.constexpr):
    tl.store(out, n + n_by_16 + left + aligned + constant)


@pytest.mark.parametrize("number", (0, 16, 32, -16, -48, 4096, 2**31 - 16, -(2**31) + 16))
def test_numbers_stay_what_they_are(number: int) -> None:
    given = dict.fromkeys(("n", "n_by_16", "left", "aligned", "constant"), number)
    assert multiples_of_16(numbers_kernel, given) == ("n", "n_by_16")
    kernel, told = telling(numbers_kernel, given, ["out"], ("n", "n_by_16"), {})
    assert kernel.arg_names == ["out", "n_by_16_", "n_by_16_by_16", "left", "aligned", "constant"]
    assert 1 not in told.values()  # which would be a constant
    call = re.search(r"the_kernel_itself\((.*)\)", kernel.src)
    assert call is not None
    passed = dict(each.split("=") for each in call[1].split(", "))
    assert passed.pop("out") == "out"
    assert {name: eval(text, {}, told) for name, text in passed.items()} == given
    assert telling(numbers_kernel, given, ["out"], ("n", "n_by_16"), {})[0] is kernel


def test_what_is_no_multiple() -> None:
    for value in (8, True, 16.0, 2**31, None, "16", tl.float16):
        assert multiples_of_16(numbers_kernel, {"n": value}) == ()


def test_on_amd() -> None:
    values = {"out": np.zeros(1, np.float32), **dict.fromkeys(("n", "n_by_16", "left", "aligned", "constant"), 32)}
    source, _ = amd._source(numbers_kernel, values, ("n",))
    assert source.attrs == {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
