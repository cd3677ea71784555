"""A decode step by PyTorch, as a peer: run.py starts this file, which starts one process a GPU.

A step of the same sizes as `decode_step.py` has, as PyTorch's users write it: weights in bf16, queries, keys and values
by one product, gate and up by one, PyTorch's own fused RMSNorm, and the sum over the ranks by
`torch.ops.symm_mem.one_shot_all_reduce` or NCCL. A step is a CUDA graph, which ends with the next token of each
sequence, by which the next step begins. All steps write the last slot of a full cache, and attend to all of it.

Attention is the fastest of what runs there, by its time alone: `scaled_dot_product_attention` with the queries of a
key/value head as rows, or with `enable_gqa`; the same over parts of the keys, whose results are merged (flash
decoding); `flex_attention`; FlashInfer.

torch/symmetric: sums by symmetric memory.
torch/nccl: sums by NCCL.
torch/compiled: the first, with everything between products compiled by `torch.compile`.

The logits are compared with those of the same step in eager PyTorch, attention in f32 and sums by NCCL.

Reads a request (see `torch_peer.py`) from standard input and prints a line of JSON for each job and implementation.
Nothing of JAX is imported, so another Python than that of run.py may run this file.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sampling import MIN_ROUNDS, Mode
from benchmarks.torch_async_tp import Program, group_name, run_ranks, slowest, this_device

EPS = 1e-6
PARTS = (1, 8, 16, 32, 64)  # of the keys

# (queries [B, K, G, H], keys [B, K, S, H], values) -> [B, K, G, H]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# f32 or bf16 of this rank -> the sum over the ranks
Sum = Callable[[torch.Tensor], torch.Tensor]


class Step:
    """This rank's part of a model, and its buffers.

    Attributes:
      token: i64[B], the tokens that a step reads, and then those that it makes.
      logits: f32[B, V / W] of the last step.
    """

    def __init__(self, job: dict[str, Any], device: torch.device):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.b, self.context, self.h, self.layers = job["b"], job["context"], job["h"], job["layers"]
        self.heads, self.kv_heads, f = job["n"] // world, job["kv_heads"] // world, job["d_mlp"] // world
        self.d, self.vocab, self.first = job["d_model"], job["vocab"] // world, rank * (job["vocab"] // world)
        generator = torch.Generator(device).manual_seed(1 + rank)
        shared = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, scale: float = 1.0, by: torch.Generator = generator) -> torch.Tensor:
            return scale * torch.randn(shape, dtype=torch.bfloat16, device=device, generator=by)

        def weight(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
            return draw(rows, columns, scale=scale / math.sqrt(columns))

        out = 1 / math.sqrt(2 * self.layers)
        self.embed = draw(job["vocab"], self.d, by=shared)
        self.qkv = [weight((self.heads + 2 * self.kv_heads) * self.h, self.d) for _ in range(self.layers)]
        self.o = [weight(self.d, self.heads * self.h, out) for _ in range(self.layers)]
        self.gate_up = [weight(2 * f, self.d) for _ in range(self.layers)]
        self.down = [weight(self.d, f, out) for _ in range(self.layers)]
        self.unembed = weight(self.vocab, self.d)
        self.norm = torch.ones(self.d, dtype=torch.bfloat16, device=device)
        size = (self.b, self.kv_heads, self.context, self.h)
        # As in decode_step.py: so large that what attention gives counts for as much as the rest.
        self.keys = [draw(*size) for _ in range(self.layers)]
        self.values = [draw(*size, scale=math.sqrt(self.context / math.e)) for _ in range(self.layers)]
        angle = (self.context - 1) * 1e4 ** (-torch.arange(self.h // 2, device=device) / (self.h // 2))
        self.cos, self.sin = angle.cos(), angle.sin()
        self.token = torch.arange(self.b, device=device)
        self.logits = torch.zeros(self.b, self.vocab, device=device)

    def normal(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.d,), self.norm, EPS)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), dim=-1).to(x.dtype)

    def heads_of(self, qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Puts the new keys and values into their slot; returns the queries [B, K, G, H]."""
        k = self.kv_heads
        qkv = qkv.view(self.b, -1, self.h)
        turned = self.rotate(qkv[:, : self.heads + k])
        keys[:, :, -1] = turned[:, self.heads :]
        values[:, :, -1] = qkv[:, self.heads + k :]
        return turned[:, : self.heads].reshape(self.b, k, -1, self.h)

    def gated(self, y: torch.Tensor) -> torch.Tensor:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up

    def next_token(self, x: torch.Tensor, summed: Sum) -> None:
        self.logits.copy_(F.linear(self.normal(x), self.unembed))
        best, at = self.logits.max(dim=-1)
        # Of each rank its candidates, in a sum to which the others add 0.
        all_of = torch.zeros(dist.get_world_size(), 2, self.b, device=x.device)
        all_of[dist.get_rank(), 0], all_of[dist.get_rank(), 1] = best, (at + self.first).float()
        best, at = summed(all_of).unbind(1)
        self.token.copy_(at.gather(0, best.argmax(dim=0, keepdim=True))[0].long())

    def run(self, attend: Attention, summed: Sum) -> None:
        x = self.embed[self.token]
        for i in range(self.layers):
            q = self.heads_of(F.linear(self.normal(x), self.qkv[i]), self.keys[i], self.values[i])
            y = attend(q, self.keys[i], self.values[i]).reshape(self.b, -1)
            x = x + summed(F.linear(y, self.o[i]))
            y = self.gated(F.linear(self.normal(x), self.gate_up[i]))
            x = x + summed(F.linear(y, self.down[i]))
        self.next_token(x, summed)

    def compiled(self) -> "Step":
        """The same, with everything between products compiled; weights and buffers are shared."""
        other = object.__new__(Step)
        other.__dict__.update(self.__dict__)
        for name in ("normal", "heads_of", "gated"):
            setattr(other, name, torch.compile(getattr(self, name), dynamic=False))
        return other


def attend_plainly(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    scores = q.float() @ keys.float().mT / math.sqrt(q.shape[-1])
    return (scores.softmax(-1).to(values.dtype).float() @ values.float()).to(q.dtype)


def grouped(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, keys, values)


def by_gqa(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    b, k, g, h = q.shape
    return F.scaled_dot_product_attention(q.view(b, k * g, 1, h), keys, values, enable_gqa=True).view(b, k, g, h)


def in_parts(parts: int) -> Attention:
    """Flash decoding: attention over parts of the keys at once, and a merge by their log-sums of exponentials."""

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        b, k, g, h = q.shape
        queries = q[:, :, None].expand(b, k, parts, g, h).reshape(b, k * parts, g, h)
        split = lambda x: x.view(b, k * parts, -1, h)  # noqa: E731
        found = torch.ops.aten._scaled_dot_product_flash_attention(queries, split(keys), split(values))
        weights = found[1].view(b, k, parts, g, 1).softmax(dim=2)
        return (found[0].reshape(b, k, parts, g, h) * weights).sum(dim=2).to(q.dtype)

    return attend


def by_flex() -> Attention:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def by_flashinfer() -> Attention:
    import flashinfer

    def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if len(q) > 1:
            raise NotImplementedError("one sequence a call")
        y = flashinfer.single_decode_with_kv_cache(q.flatten(0, 2), keys[0], values[0], kv_layout="HND")
        return y.view(q.shape)

    return attend


def fastest_attention(step: Step) -> tuple[str, Attention]:
    """Of all that are right on all ranks the one that takes the least time, by name."""
    makers: dict[str, Callable[[], Attention]] = {"sdpa": lambda: grouped, "sdpa, gqa": lambda: by_gqa}
    for parts in PARTS[1:]:
        if step.context % parts == 0:
            makers[f"sdpa in {parts} parts"] = lambda parts=parts: in_parts(parts)
    makers |= {"flex": by_flex, "flashinfer": by_flashinfer}
    q = torch.randn_like(step.keys[0][:, :, : step.heads // step.kv_heads])
    want = attend_plainly(q, step.keys[0], step.values[0]).float()
    found: dict[str, tuple[float, Attention]] = {}
    for name, make in makers.items():
        seconds, attend = math.inf, None
        try:
            attend = make()
            error = torch.linalg.norm(attend(q, step.keys[0], step.values[0]).float() - want) / torch.linalg.norm(want)
            if error.item() < 0.02:
                torch.cuda.synchronize()
                start = time.perf_counter()
                for i in range(20 * step.layers):
                    attend(q, step.keys[i % step.layers], step.values[i % step.layers])
                torch.cuda.synchronize()
                seconds = time.perf_counter() - start
        except Exception as error:  # whatever a library that is not there, or not for this, raises
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        seconds = slowest(seconds)
        if attend is not None and seconds < math.inf:
            found[name] = seconds, attend
    name = min(found, key=lambda name: found[name][0])
    return name, found[name][1]


def by_nccl(x: torch.Tensor) -> torch.Tensor:
    if dist.get_world_size() > 1:
        dist.all_reduce(x)
    return x


def by_symmetric_memory(step: Step) -> Sum:
    """Sums in buffers of symmetric memory that take turns: one has been read by all before it is written again."""
    import torch.distributed._symmetric_memory as symmetric

    elements, count, turn = 2 * max(step.b * step.d, 2 * dist.get_world_size() * step.b), 2, 0
    buffers = {}
    for dtype in (torch.bfloat16, torch.float32):
        buffers[dtype] = [symmetric.empty(elements, dtype=dtype, device=step.token.device) for _ in range(count)]
        for buffer in buffers[dtype]:
            symmetric.rendezvous(buffer, group_name())

    def summed(x: torch.Tensor) -> torch.Tensor:
        nonlocal turn
        turn += 1
        part = buffers[x.dtype][turn % count][: x.numel()]
        part.copy_(x.reshape(-1))
        return torch.ops.symm_mem.one_shot_all_reduce(part, "sum", group_name()).view(x.shape)

    return summed if dist.get_world_size() > 1 else by_nccl


@dataclass(kw_only=True)
class Steps(Program):
    """A step that is launched so often as a call has steps.

    Attributes:
      one: launches it once.
      waits: whether the host waits for each.
    """

    one: Callable[[], None]
    waits: bool = False

    def sample(self, mode: Mode) -> None:
        self.waits = mode.waits
        super().sample(mode)


def program_of(run: Callable[[], None], step: Step, count: int) -> Steps:
    for _ in range(3):  # allocates and compiles what a capture must not
        run()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    obstacle = ""
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    except RuntimeError as error:
        obstacle = str(error)
    one = run if slowest(float(bool(obstacle))) else graph.replay

    def launch() -> list[torch.Tensor]:
        for _ in range(count):
            one()
            if program.waits:
                torch.cuda.synchronize()
        return [step.logits]

    program = Steps(launch=launch, calls=count, eager=obstacle, one=one)
    return program


def error_of(step: Step, program: Steps) -> float:
    """The largest relative error of a row of logits on any rank, after a step of the same tokens."""
    token = step.token.clone()
    step.run(attend_plainly, by_nccl)
    want = step.logits.clone()
    # What is not written must not pass because an earlier step wrote it.
    step.logits.fill_(math.nan)
    step.token.copy_(token)
    program.one()
    rows = torch.linalg.norm(step.logits - want, dim=-1) / torch.linalg.norm(want, dim=-1)
    return slowest(torch.nan_to_num(rows, nan=math.inf).max().item())


def measure(job: dict[str, Any], modes: list[Mode], seconds: float) -> Iterator[dict[str, Any]]:
    """What was found of each implementation at one shape. All ranks do the same, so a refusal is one of all ranks."""
    step = Step(job, this_device())
    attention, attend = fastest_attention(step)
    symmetric = by_symmetric_memory(step)
    ways: dict[str, tuple[Callable[[], Step], Sum]] = {
        "torch/symmetric": (lambda: step, symmetric),
        "torch/nccl": (lambda: step, by_nccl),
        "torch/compiled": (step.compiled, symmetric),
    }
    for name, (make, summed) in ways.items():
        found: dict[str, Any] = {"implementation": name, "torch": torch.__version__}
        try:
            own = make()
            program = program_of(lambda own=own, summed=summed: own.run(attend, summed), step, job["steps"])
            found["launch"] = f"eager: {program.eager}" if program.eager else f"CUDA graph, attention by {attention}"
            errors = [error_of(step, program)]
            program.seconds = program.run(1)
            for mode in modes:
                once = mode.sample_seconds(program.seconds)
                for _ in range(max(MIN_ROUNDS, int(seconds / len(modes) / len(ways) / once))):
                    program.sample(mode)
            errors.append(error_of(step, program))
            yield found | {"error": max(errors), "samples": program.samples}
        except Exception as error:  # whatever a compiler raises, too
            yield found | {"failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    run_ranks(measure)
