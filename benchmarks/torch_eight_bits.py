"""Products of e4m3 by PyTorch, as a peer: eight_bits.py starts this file, which starts one process a GPU.

`torch.ops.symm_mem.fused_all_gather_scaled_matmul` and `fused_scaled_matmul_reduce_scatter` on operands of the shapes,
layout, dtype and distribution of its "e4m3 rows": lhs with a scale of each row, weights [N, K] with one of each of
their rows. Both give bfloat16. What is between two ranks is rounded to it, too. A program is a chain of calls, timed as
in `torch_async_tp.py`, and compared with products of f32 of the dequantised operands.

torch: the operation, with sums in f32.
torch/fast: with `use_fast_accum`.
torch/nccl: NCCL's collective and `torch._scaled_mm` with `use_fast_accum`, one after the other.

Reads a request (see `torch_peer.py`) from standard input and prints a line of JSON for each job and implementation.
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sampling import Mode
from benchmarks.torch_async_tp import Call, Job, group_name, measure_calls, run_ranks, this_device

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0

# Numbers [rows, K], and the scale of each row [rows, 1].
Scaled = tuple[torch.Tensor, torch.Tensor]


def gather_matmul(lhs: Scaled, rhs: Scaled, fast: bool) -> torch.Tensor:
    """[M / world, K] @ [N / world, K].T -> [M, N / world]."""
    return torch.ops.symm_mem.fused_all_gather_scaled_matmul(
        lhs[0], [rhs[0].t()], lhs[1], [rhs[1].t()], 0, group_name(), [None], [None], [torch.bfloat16], [fast]
    )[1][0]


def matmul_scatter(lhs: Scaled, rhs: Scaled, fast: bool) -> torch.Tensor:
    """[M, K / world] @ [N, K / world].T -> [M / world, N]."""
    shape = [len(lhs[0]), len(rhs[0])]
    return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
        lhs[0], rhs[0].t(), lhs[1], rhs[1].t(), "sum", 0, 0, group_name(), shape, None, None, torch.bfloat16, fast
    )


def product(lhs: Scaled, rhs: Scaled) -> torch.Tensor:
    return torch._scaled_mm(
        lhs[0], rhs[0].t(), scale_a=lhs[1], scale_b=rhs[1].t(), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def gathered(x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, as bytes on their way, because NCCL may not know the dtype."""
    part = x.view(torch.uint8)
    whole = part.new_empty(len(part) * dist.get_world_size(), part.shape[1])
    dist.all_gather_into_tensor(whole, part)
    return whole.view(x.dtype)


def scattered(x: torch.Tensor) -> torch.Tensor:
    own_rows = x.new_empty(len(x) // dist.get_world_size(), x.shape[1])
    dist.reduce_scatter_tensor(own_rows, x)
    return own_rows


def gather_then_matmul(lhs: Scaled, rhs: Scaled) -> torch.Tensor:
    return product((gathered(lhs[0]), gathered(lhs[1])), rhs)


def matmul_then_scatter(lhs: Scaled, rhs: Scaled) -> torch.Tensor:
    return scattered(product(lhs, rhs))


def dequantised(x: Scaled) -> torch.Tensor:
    return x[0].float() * x[1]


def expected_gather_matmul(lhs: Scaled, rhs: Scaled) -> torch.Tensor:
    return dequantised((gathered(lhs[0]), gathered(lhs[1]))) @ dequantised(rhs).t()


def expected_matmul_scatter(lhs: Scaled, rhs: Scaled) -> torch.Tensor:
    return scattered(dequantised(lhs) @ dequantised(rhs).t())


def calls_of(job: Job) -> tuple[dict[str, Call], Call]:
    """The implementations by name, and what gives the right results."""
    if job["op"] == "matmul_reduce_scatter":
        fused, plain, expected = matmul_scatter, matmul_then_scatter, expected_matmul_scatter
    else:
        fused, plain, expected = gather_matmul, gather_then_matmul, expected_gather_matmul
    return {"torch": partial(fused, fast=False), "torch/fast": partial(fused, fast=True), "torch/nccl": plain}, expected


def operands(job: Job, device: torch.device) -> tuple[list[Scaled], list[Scaled]]:
    """This rank's part of each lhs, and of rhs: uniform numbers, and scales that differ by powers of 2."""
    world = dist.get_world_size()
    m, k, n = job["m"], job["k"], job["n"]
    if job["op"] == "matmul_reduce_scatter":
        lhs_shape, rhs_shape = (m, k // world), (n, k // world)
    else:
        lhs_shape, rhs_shape = (m // world, k), (n // world, k)
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def noise(*shape: int) -> torch.Tensor:
        return 2 * torch.rand(shape, device=device, generator=generator) - 1

    def make(rows: int, columns: int) -> Scaled:
        scales = (1.5 + 0.5 * noise(rows, 1)) * torch.exp2(torch.round(1.5 * noise(rows, 1)))
        return (LARGEST * noise(rows, columns)).to(E4M3), scales * (k**-0.25 / LARGEST)

    return [make(*lhs_shape) for _ in range(job["calls"])], [make(*rhs_shape)]


def measure(job: Job, modes: list[Mode], seconds: float) -> Iterator[dict[str, Any]]:
    """What was found of each implementation at one shape. All ranks do the same, so a refusal is one of all ranks."""
    torch.backends.cuda.matmul.allow_tf32 = False
    yield from measure_calls(*calls_of(job), *operands(job, this_device()), modes, seconds)


if __name__ == "__main__":
    run_ranks(measure)
