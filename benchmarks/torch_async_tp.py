"""PyTorch's asynchronous tensor parallelism, as a peer: run.py starts this file, which starts one process a GPU.

`torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter` on operands of the shapes, layout, dtype
and distribution that run.py uses, in the same modes, on the same GPUs, though not in turns with the others. A program
is a chain of calls, as a CUDA graph where that can be captured (the rows say so), otherwise launch by launch. Its time
is that of the slowest rank, by the host's clock. Every result of a chain is compared with what PyTorch's own collective
and `torch.matmul` give, before and after it is timed.

torch: the operation as it comes.
torch/native: with its native kernel, which PyTorch offers for an all-gather of 2,048 < M <= 4,096 rows.

Reads a request (see `torch_peer.py`) from standard input and prints a line of JSON for each job and implementation.
Nothing of JAX is imported, so another Python than that of run.py may run this file.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # defines torch.ops.symm_mem
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import _SymmetricMemory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sampling import MIN_ROUNDS, MODES, STEPWISE, Mode

# Neither NCCL nor symmetric memory may create NVLink multicast objects.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
NATIVE = "TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP"

# (lhs, rhs) -> the result. An operand is a tensor, or one with its scales.
Operand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Call = Callable[[Any, Any], torch.Tensor]
Job = dict[str, Any]
# (job, modes, seconds) -> what was found of each implementation
Measure = Callable[[Job, list[Mode], float], Iterator[dict[str, Any]]]


def group_name() -> str:
    return dist.group.WORLD.group_name


def gather_matmul(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """[M / world, K] @ [K, N / world] -> [M, N / world]."""
    return torch.ops.symm_mem.fused_all_gather_matmul(lhs, [rhs], 0, group_name(), return_A=False)[1][0]


def native_gather_matmul(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    os.environ[NATIVE] = "1"
    try:
        return gather_matmul(lhs, rhs)
    finally:
        del os.environ[NATIVE]


def matmul_scatter(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """[M, K / world] @ [K / world, N] -> [M / world, N]."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(lhs, rhs, "sum", 0, group_name())


def expected_gather_matmul(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    gathered = lhs.new_empty(lhs.shape[0] * dist.get_world_size(), lhs.shape[1])
    dist.all_gather_into_tensor(gathered, lhs)
    return torch.matmul(gathered, rhs)


def expected_matmul_scatter(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    partial_sum = torch.matmul(lhs, rhs).float()
    own_rows = partial_sum.new_empty(lhs.shape[0] // dist.get_world_size(), rhs.shape[1])
    dist.reduce_scatter_tensor(own_rows, partial_sum)
    return own_rows


def calls_of(job: Job) -> tuple[dict[str, Call], Call]:
    """The implementations by name, and what gives the right results."""
    if job["op"] == "matmul_reduce_scatter":
        return {"torch": matmul_scatter}, expected_matmul_scatter
    native = {"torch/native": native_gather_matmul} if 2048 < job["m"] <= 4096 else {}
    return {"torch": gather_matmul, **native}, expected_gather_matmul


def operands(job: Job, device: torch.device) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """This rank's part of each lhs, and of the rhs that the calls take turns with."""
    world = dist.get_world_size()
    m, k, n = job["m"], job["k"], job["n"]
    if job["op"] == "matmul_reduce_scatter":
        lhs_shape, rhs_shape = (m, k // world), (k // world, n)
    else:
        lhs_shape, rhs_shape = (m // world, k), (k, n // world)
    torch.manual_seed(dist.get_rank())
    make = partial(torch.randn, dtype=torch.bfloat16, device=device)
    return [make(lhs_shape) for _ in range(job["calls"])], [make(rhs_shape) for _ in range(job["count_rhs"])]


def this_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def slowest(value: float) -> float:
    """The largest value of any rank; every rank must ask."""
    largest = torch.tensor([value], dtype=torch.float64, device=this_device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


@dataclass(kw_only=True)
class Program:
    """A chain of calls; `launch` starts all of them and gives their results."""

    launch: Callable[[], list[torch.Tensor]]
    calls: int
    eager: str = ""  # why it is no CUDA graph
    seconds: float = 0.0
    samples: dict[str, list[float]] = field(default_factory=dict)

    def run(self, count: int) -> float:
        """Seconds until so many have ended on the slowest rank; all ranks begin together."""
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            self.launch()
        torch.cuda.synchronize()
        return slowest(time.perf_counter() - start)

    def sample(self, mode: Mode) -> None:
        time.sleep(mode.idle)
        if warm := mode.warm_launches(self.seconds):
            self.run(warm)
        count = mode.launches(self.seconds)
        self.samples.setdefault(mode.name, []).append(self.run(count) / (count * self.calls) * 1e6)

    def error(self, expected: Call, lhs: Sequence[Operand], rhs: Sequence[Operand]) -> float:
        """The largest relative Frobenius error of any row of any result on any rank."""
        if not self.eager:
            # What is not written must not pass because an earlier run wrote it.
            for out in self.launch():
                out.fill_(math.nan)
        worst = 0.0
        for i, out in enumerate(self.launch()):
            want = expected(lhs[i], rhs[i % len(rhs)]).float()
            rows = torch.linalg.norm(out.float() - want, dim=-1) / torch.linalg.norm(want, dim=-1)
            worst = max(worst, torch.nan_to_num(rows, nan=math.inf).max().item())
        return slowest(worst)


def make_program(call: Call, lhs: Sequence[Operand], rhs: Sequence[Operand]) -> Program:
    def launch() -> list[torch.Tensor]:
        return [call(x, rhs[i % len(rhs)]) for i, x in enumerate(lhs)]

    # Allocates what a capture must not: the symmetric workspace, the library's own.
    launch()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    obstacle = ""
    outs: list[torch.Tensor] = []
    try:
        # Other threads, such as NCCL's watchdog, may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outs = launch()
    except RuntimeError as error:
        obstacle = str(error)
    if slowest(float(bool(obstacle))):
        return Program(launch=launch, calls=len(lhs), eager=obstacle or "another rank could not capture it")

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return outs

    return Program(launch=replay, calls=len(lhs))


def measure(job: Job, modes: list[Mode], seconds: float) -> Iterator[dict[str, Any]]:
    """What was found of each implementation at one shape. All ranks do the same, so a refusal is one of all ranks."""
    yield from measure_calls(*calls_of(job), *operands(job, this_device()), modes, seconds)


def measure_calls(
    calls: Mapping[str, Call],
    expected: Call,
    lhs: Sequence[Operand],
    rhs: Sequence[Operand],
    modes: list[Mode],
    seconds: float,
) -> Iterator[dict[str, Any]]:
    for name, call in calls.items():
        found: dict[str, Any] = {"implementation": name, "torch": torch.__version__}
        try:
            program = make_program(call, lhs, rhs)
            found["launch"] = f"eager: {program.eager}" if program.eager else "CUDA graph"
            errors = [program.error(expected, lhs, rhs)]
            program.seconds = program.run(1)
            for mode in modes:
                once = mode.sample_seconds(program.seconds)
                for _ in range(max(MIN_ROUNDS, int(seconds / len(modes) / once))):
                    program.sample(mode)
            errors.append(program.error(expected, lhs, rhs))
            yield found | {"error": max(errors), "samples": program.samples}
        except Exception as error:  # whatever a function of PyTorch refuses by
            yield found | {"failed": f"{type(error).__name__}: {error}"}


def rank_main(rank: int, port: int, request: dict[str, Any], measure: Measure) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=request["world"], device_id=device)
    if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, rank):
        raise RuntimeError("this PyTorch would use NVLink multicast although TORCH_SYMM_MEM_DISABLE_MULTICAST is set")
    modes = [mode for mode in (*MODES, *STEPWISE) if mode.name in request["modes"]]
    for job in request["jobs"]:
        for found in measure(job, modes, request["seconds"]):
            if rank == 0:
                print(json.dumps({"name": job["name"], **found}), flush=True)
    # Nobody ends while another one needs it. A communicator cannot be destroyed while a CUDA graph has its kernels:
    # NCCL waits for ever.
    dist.barrier()
    torch.cuda.synchronize()
    os._exit(0)


def run_ranks(measure: Measure) -> None:
    """Answers the request on standard input by a process for each rank."""
    request = json.load(sys.stdin)
    # The ranks inherit them.
    os.environ |= NO_MULTICAST
    os.environ.pop(NATIVE, None)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(rank_main, args=(store.port, request, measure), nprocs=request["world"])


if __name__ == "__main__":
    run_ranks(measure)
