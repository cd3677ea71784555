"""The compiled code of the fused products with a bias, an activation, a gate and a residual."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxtaxfree import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from jaxtaxfree.kernels.blocks import matmul as matmul_kernels
from jaxtaxfree.ops.shapes import MatmulShape
from tests.compiled import test_compiled as compiled_code
from tests.helpers import amd
from tests.helpers.support import KERNELS, Kernel, compile_for_amd, compile_for_cuda
from tests.operations.test_epilogue import ELEMENTWISE, PAIRS, name_of, names_of


def with_epilogue(kernel: Kernel, given: dict[str, Any]) -> Kernel:
    """A kernel as it is launched with an epilogue."""
    gathers = kernel.operation is all_gather_matmul

    def operation(lhs: jax.Array, rhs: jax.Array, axis_name: str, **keywords: Any) -> Any:
        world = lax.axis_size(axis_name)
        rows = lhs.shape[0]
        if kernel.operation is not matmul_all_reduce:
            rows = rows * world if gathers else rows // world
        arrays = {
            "gate": rhs,
            "bias": jnp.zeros(rhs.shape[1], rhs.dtype),
            "residual": jnp.zeros((rows, rhs.shape[1]), rhs.dtype),
        }
        arrays = {name: arrays[name] for name in names_of(given)}
        return kernel.operation(lhs, rhs, axis_name, activation=given.get("activation"), **arrays, **keywords)

    return dataclasses.replace(kernel, name=f"{kernel.name}-{name_of(given)}", operation=operation)


FORWARD = tuple(
    kernel for kernel in KERNELS if kernel.operation in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
)
GATHERING = tuple(kernel for kernel in FORWARD if kernel.operation is all_gather_matmul)
VARIANTS = (
    *(with_epilogue(kernel, given) for kernel in FORWARD for given in ELEMENTWISE[2:]),
    *(with_epilogue(kernel, given) for kernel in GATHERING for given in PAIRS[1:]),
)
RESIDUALS = [kernel for kernel in VARIANTS if kernel.name.endswith("residual")]


def soak_unless(quick: Callable[[Kernel], bool], kernels: Sequence[Kernel]) -> pytest.MarkDecorator:
    """Each kernel; those that are not quick in `make soak` alone."""
    marked = [kernel if quick(kernel) else pytest.param(kernel, marks=pytest.mark.soak) for kernel in kernels]
    return pytest.mark.parametrize("kernel", marked, ids=lambda kernel: kernel.name)


def _is_like_another(name: str) -> bool:
    """Whether an epilogue is an activation alone which takes less than that of `gelu_exact`."""
    return name.endswith(("-silu", "-gelu_tanh")) and "gate" not in name


def _is_full(kernel: Kernel) -> bool:
    """Whether it stands for the others on further GPUs: one that gathers and one that reduces."""
    return kernel.name in ("all_gather_matmul-gate-bias-gelu_tanh-residual", "matmul_all_reduce-bias-silu-residual")


@soak_unless(lambda kernel: not _is_like_another(kernel.name), VARIANTS)
def test_sm_90(kernel: Kernel) -> None:
    compiled = compile_for_cuda(kernel, kernel.aligned)
    program = compiled_code.parse(compiled.ptx)
    assert compiled_code.waits_that_do_not_wait(program, kernel.waits) == []
    assert compiled_code.publishes_out_of_order(program) == []
    assert compiled_code.narrow_remote_stores(program) == []
    assert compiled_code.copies_not_in_flight(program, kernel.dot) == []
    assert compiled_code.local_memory(compiled.ptx) == []
    assert compiled.shared <= compiled_code.SHARED_MEMORY[90]


@pytest.mark.parametrize("kernel", FORWARD, ids=lambda kernel: kernel.name)
def test_the_residual_is_read_as_the_result_is_stored(kernel: Kernel) -> None:
    """In as few accesses. An all-reduce stores every tile in two places of its code: its own, and those of peers."""
    program = compiled_code.parse(compile_for_cuda(with_epilogue(kernel, {"residual": True}), kernel.aligned).ptx)
    loads = [s for s in program if s.starts("ld.global") and s.place.startswith("epilogue.py")]
    # `multiply` stores as well, what it carries.
    places = compiled_code.places_of(matmul_kernels.store_tile, "tl.store(")
    stores = [s for s in program if s.starts("st.global") and s.place in places]
    times = 2 if kernel.operation is matmul_all_reduce else 1
    assert sorted(map(compiled_code.bytes_of, times * loads)) == sorted(map(compiled_code.bytes_of, stores))


@soak_unless(_is_full, RESIDUALS)
@pytest.mark.parametrize("compute_capability", (80, 100))
def test_other_nvidia_gpus(kernel: Kernel, compute_capability: int) -> None:
    compiled = compile_for_cuda(kernel, kernel.aligned, compute_capability=compute_capability)
    program = compiled_code.parse(compiled.ptx)
    assert compiled_code.waits_that_do_not_wait(program, kernel.waits) == []
    assert compiled_code.publishes_out_of_order(program) == []
    assert compiled.shared <= compiled_code.SHARED_MEMORY[compute_capability]


@soak_unless(_is_full, RESIDUALS)
@pytest.mark.parametrize("architecture", amd.EACH)
def test_amd(kernel: Kernel, architecture: str) -> None:
    code = compile_for_amd(compile_for_cuda(kernel, kernel.aligned, amd=True), architecture).asm["amdgcn"]
    assert "mfma" in code
    assert re.findall(r"\.(?:sgpr|vgpr)_spill_count:\s*(\d+)", code) == ["0", "0"]
    assert amd.publishes_out_of_order(code) == []


def default_cases() -> Iterator[Any]:
    """A call for every configuration that the benchmarks' shapes lead to on 4 ranks."""
    for kernel in FORWARD:
        for given in ELEMENTWISE[2:] + (PAIRS[1:2] if kernel in GATHERING else ()):
            seen, dtypes = set(), set()
            for shape in kernel.benchmarks:
                for dtype in ("bfloat16", "float32") if len(given) > 1 else ("bfloat16",):
                    columns = 2 * shape.n if "gate" in given else shape.n
                    config = kernel.default_config(dataclasses.replace(shape, n=columns), 4, dtype)
                    if (config, dtype) not in seen:
                        seen.add((config, dtype))
                        variant = with_epilogue(kernel, given)
                        # Of the configurations after the first one the epilogue stands for others that takes most.
                        first, full = dtype not in dtypes, {"bias", "activation", "residual"} <= given.keys()
                        quick = not _is_like_another(variant.name) and (first or (full and dtype == "bfloat16"))
                        dtypes.add(dtype)
                        marks = [] if quick else [pytest.mark.soak]
                        yield pytest.param(variant, shape, dtype, marks=marks)


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype"), tuple(default_cases()), ids=lambda x: getattr(x, "name", x).replace("/", "-")
)
def test_default_configs_fit_sm_90(kernel: Kernel, shape: MatmulShape, dtype: str) -> None:
    compiled = compile_for_cuda(kernel, shape, dtype)
    assert 0 < compiled.shared <= compiled_code.SHARED_MEMORY[90]
    assert compiled_code.local_memory(compiled.ptx) == []
    assert compiled_code.spilled_bytes(compiled_code.ptxas_report(compiled)) == 0
