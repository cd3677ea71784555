"""What the compiler makes of `ragged_dot` and its gradients: no GPU needed."""

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

import jaxtaxfree as jtf
from jaxtaxfree.kernels.ragged_dot import portable
from jaxtaxfree.ops import ragged_dot as op
from tests.compiled.test_compiled import (
    SHARED_MEMORY,
    local_memory,
    parse,
    ptxas_report,
    spilled_bytes,
)
from tests.compiled.test_gluon import NAME, PTX, WARPS, launch_of
from tests.compiled.test_gluon import SHARED_MEMORY as SHARED
from tests.helpers.support import Compiled, compile_call, compile_for_amd, lower_for_cuda

pytestmark = pytest.mark.usefixtures("no_cubin")

S = jax.ShapeDtypeStruct


def program(of_weights: bool = False, config: Any = None, **keywords: Any) -> Any:
    """A call of lhs, rhs, sizes, and gate."""
    if of_weights:
        settings = tuple(sorted((config or {}).items()))
        own = {"axes": (), "precision": None, "preferred_element_type": None, "config": settings}
        return lambda *x: op.weights_p.bind(*x, implementation="fused", **own)[0]

    def call(lhs: Any, rhs: Any, sizes: Any, gate: Any = None) -> jax.Array:
        return jtf.ragged_dot(lhs, rhs, sizes, gate=gate, implementation="fused", config=config, **keywords)

    return call


def shapes(
    m: int = 32768,
    k: int = 2048,
    n: int = 768,
    groups: int = 64,
    dtype: str = "bfloat16",
    *,
    gate: bool = False,
    of_weights: bool = False,
    rhs_transposed: bool = False,
) -> list[Any]:
    weights = S((groups, n, k) if rhs_transposed else (groups, k, n), dtype)
    rhs = S((m, n), dtype) if of_weights else weights
    return [S((m, k), dtype), rhs, S((groups,), np.int32), *[weights] * gate]


HOPPER_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "transposed": ({"rhs_transposed": True}, {}),
    "weights": ({"of_weights": True}, {}),
    "weights-of-many-groups": ({"of_weights": True, "groups": 256}, {}),
    "gate": ({"gate": True}, {"activation": "silu"}),
    "few": ({"m": 512}, {}),
    "many-groups-float32": ({"groups": 256}, {"preferred_element_type": "float32"}),
    "odd": ({"m": 333, "k": 1000, "n": 264, "groups": 3, "dtype": "float16"}, {}),
}

OFTEN = ("weights", "few")  # each takes seconds


@functools.cache
def hopper(name: str) -> Compiled:
    sizes, keywords = HOPPER_CASES[name]
    how = {key: value for key, value in sizes.items() if key in ("of_weights", "rhs_transposed")}
    kernel = launch_of(lower_for_cuda(program(**how, **keywords), *shapes(**sizes)))
    assert kernel[NAME].decode() == "ragged_dot_hopper_kernel"
    assert kernel[WARPS] == (8 if name == "few" else 12)
    return Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.soak) for name in HOPPER_CASES],
)
def test_hopper(name: str) -> None:
    """Every role is there, all moves are TMA's, and products overlap."""
    call = hopper(name)
    assert ".target sm_90a" in call.ptx
    columns = 128 if name == "few" else 256
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", call.ptx)) == {str(columns)}
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::cta\.global", call.ptx)
    stored = 3 if name.startswith("weights") else 4
    assert re.search(rf"cp\.async\.bulk\.tensor\.{stored}d\.global\.shared::cta", call.ptx)
    assert "tensormap.replace" not in call.ptx  # all descriptors are the host's
    assert not [s for s in parse(call.ptx) if s.starts("st.") and s.has("global")]
    report = ptxas_report(call)
    assert spilled_bytes(report) == 0
    assert "C75" not in report
    assert call.shared <= SHARED_MEMORY[90]


PORTABLE_CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (portable.ragged_dot_kernel, {}),
    "transposed": (portable.ragged_dot_kernel, {"rhs_transposed": True}),
    "gate": (portable.ragged_dot_kernel, {"gate": True}),
    "weights": (portable.ragged_dot_weights_kernel, {"of_weights": True}),
}


@functools.cache
def compiled(name: str, capability: int) -> Compiled:
    function, how = PORTABLE_CASES[name]
    keywords = {key: value for key, value in how.items() if key != "gate"}
    call = program(config={"kernel": "portable"}, **keywords)
    return compile_call(function, call, *shapes(**how), compute_capability=capability)


@pytest.mark.covers(1)
@pytest.mark.parametrize("capability", (80, 90, 100))
@pytest.mark.parametrize("name", PORTABLE_CASES)
def test_portable(name: str, capability: int) -> None:
    """Operands are loaded ahead, by 16 bytes, into what shared memory there is."""
    call = compiled(name, capability)
    assert f".target sm_{capability}" in call.ptx
    assert local_memory(call.ptx) == []
    assert call.shared <= SHARED_MEMORY[capability]
    copies = [s for s in parse(call.ptx) if s.starts("cp.async.cg", "cp.async.ca")]
    assert copies
    assert [s.text for s in copies if ", 0x10" not in s.text] == []


@pytest.mark.parametrize("name", PORTABLE_CASES)
def test_gfx942(name: str) -> None:
    code = compile_for_amd(compiled(name, 80)).asm["amdgcn"]
    assert "v_mfma_f32" in code
    assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", code) == ["0"]


@pytest.mark.parametrize("block_n", [256, pytest.param(128, marks=pytest.mark.soak)])
def test_scales_of_blocks(block_n: int) -> None:
    """Tensor cores multiply 8 bits. Of wide tiles some registers are put aside: of stack, stores and loads."""
    m, k, n, groups = 8192, 4096, 14336, 4
    config = {"kernel": "hopper", "block_n": block_n}

    def call(lhs: Any, rhs: Any, sizes: Any, lhs_scale: Any, rhs_scale: Any) -> jax.Array:
        return jtf.ragged_dot(
            lhs, rhs, sizes, lhs_scale=lhs_scale, rhs_scale=rhs_scale, rhs_transposed=True, implementation="fused",
            config=config,
        )  # fmt: skip

    scales = [S((m, k // 128), "float32"), S((groups, n // 128, k // 128), "float32")]
    lhs, rhs, sizes = shapes(m, k, n, groups, "float8_e4m3fn", rhs_transposed=True)
    kernel = launch_of(lower_for_cuda(call, lhs, rhs, sizes, *scales))
    code = Compiled(kernel[PTX].decode(), kernel[SHARED], (), {})
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64(n\d+k\d+)\.f32\.e4m3\.e4m3", code.ptx)) == {"n128k32"}
    report = ptxas_report(code)
    assert spilled_bytes(report) <= (64 if block_n == 256 else 0), report
    assert "C75" not in report
