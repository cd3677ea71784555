"""Errors and times of the three products with operands of 8 bits, beside XLA's and beside ours of 16 bits.

    python benchmarks/eight_bits.py                          # 8192 x 8192 x 28672 over all GPUs
    python benchmarks/eight_bits.py --shapes 2048,4096,14336 --operations matmul_all_reduce --json rows.jsonl

A shape is M, K, N of the gather's whole product; the two reductions have K and N the other way round. Weights are
[N, K]. "gated" is the gather with a gate of as many columns, and SiLU. "gated:2048,4096,14336" is a shape of one
operation alone. Programs:

* "fused" is the kernel, of each kind of scales: bfloat16 (none), e4m3 rows, e4m3 blocks, int8 rows.
* "fast" is the same kernel, with `fast_sums` in `config`.
* "narrow" is the kernel with tiles of 128 columns, "wide" with tiles of 256, "fast narrow" and "fast wide" likewise.
* "xla" is `lax`'s collective and product: of bfloat16, of 8 bits with one scale for each operand (said as XLA finds it,
  in front of the product, so that cuBLASLt applies it), and of 8 bits as they are, which is the least that it can cost.
* "product" is the part of a rank alone, by XLA, of rows that are gathered already: the floor where the wire is none.
* "torch" is PyTorch's operations by symmetric memory, and by NCCL, of e4m3 rows, which run after the rest in processes
  of their own (`torch_eight_bits.py`). They take operands of their own and are timed as `torch_async_tp.py` says.

All programs are compiled first, by threads. Then results of the kernels are compared with products of f32 of the
dequantised operands (some rows of each rank, all columns), and several calls with each other. An error is the largest
difference over the sum of what is expected and what is usual of its row and column (root mean squares): 0.004 is the
rounding of bfloat16, which meets the parts of a sum as well. Last come the times, in turns: the median over rounds of
20 queued calls. Rows are written as soon as they are there, and nothing new begins after `--budget` seconds.

`--lower` compiles our kernels for a GPU and runs nothing. It needs no GPU, and a run behind it finds them on the disk.
"""

import argparse
import concurrent.futures
import functools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jaxtaxfree as jtf
from benchmarks import torch_peer
from benchmarks.operation import AXIS

ROWS, COLUMNS = P(AXIS), P(None, AXIS)
# Of lhs, of rhs and of the result.
SPECS = {
    "all_gather_matmul": (ROWS, ROWS, COLUMNS),
    "matmul_reduce_scatter": (COLUMNS, COLUMNS, ROWS),
    "matmul_all_reduce": (COLUMNS, COLUMNS, P()),
    "gated": (ROWS, ROWS, COLUMNS),
}
GATHERS = ("all_gather_matmul", "gated")
# A dtype, and what of lhs and rhs has one scale.
KINDS: dict[str, tuple[str, Any, Any]] = {
    "bfloat16": ("bfloat16", None, None),
    "e4m3 rows": ("float8_e4m3fn", (1, -1), (1, -1)),
    "e4m3 blocks": ("float8_e4m3fn", (1, 128), (128, 128)),
    "int8 rows": ("int8", (1, -1), (1, -1)),
    "e4m3 one": ("float8_e4m3fn", (), ()),
    "e4m3 none": ("float8_e4m3fn", None, None),
    "int8 none": ("int8", None, None),
}
# What each program multiplies.
PROGRAMS = {
    "fused": ("e4m3 rows", "e4m3 blocks", "int8 rows", "bfloat16"),
    "fast": ("e4m3 rows",),
    "narrow": ("e4m3 rows", "e4m3 blocks", "int8 rows"),
    "wide": ("e4m3 blocks", "e4m3 rows", "int8 rows"),
    "fast narrow": ("e4m3 rows",),
    "fast wide": ("e4m3 rows",),
    "xla": ("e4m3 one", "e4m3 none", "int8 none", "bfloat16"),
    "product": ("e4m3 none", "bfloat16"),
    "torch": ("e4m3 rows",),
}
TORCH_SCRIPT = "torch_eight_bits.py"
TORCH_CALLS = 4  # of a program, each of its own lhs
KERNELS = ("fused", "fast", "narrow", "wide", "fast narrow", "fast wide")
COMPARED = 128  # rows at the beginning and at the end of each rank's, and some between them
TOLERANCE = 0.03
CALLS = 20

type Key = tuple[str, tuple[int, int, int], str, str]  # operation, shape, program, kind


def shapes_of(operation: str, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """M, K, N of the whole product."""
    m, k, n = shape
    return (m, k, n) if operation in GATHERS else (m, n, k)


def scale_shape(shape: Sequence[int], block: Any) -> tuple[int, ...]:
    """Of a part's scales."""
    if not block:
        return ()
    extents = [length if each == -1 else each for length, each in zip(shape, block, strict=True)]
    return tuple(-(-length // extent) for length, extent in zip(shape, extents, strict=True))


def operand_types(mesh: Mesh, operation: str, shape: tuple[int, int, int], kind: str) -> list[jax.ShapeDtypeStruct]:
    """Of lhs, rhs and the gate, and of their scales if they have some."""
    m, k, n = shapes_of(operation, shape)
    dtype, *blocks = KINDS[kind]
    values, scales = [], []
    each = list(zip(SPECS[operation], blocks, ((m, k), (n, k)), strict=False))
    for spec, block, size in [*each, *(each[1:] if operation == "gated" else [])]:
        sharding = NamedSharding(mesh, spec)
        values.append(jax.ShapeDtypeStruct(size, dtype, sharding=sharding))
        if block is not None:
            part = sharding.shard_shape(size)
            own = scale_shape(part, block)
            spec = spec if own else P()
            whole = [length * (mesh.size if spec[i : i + 1] == (AXIS,) else 1) for i, length in enumerate(own)]
            scales.append(jax.ShapeDtypeStruct(tuple(whole), "float32", sharding=NamedSharding(mesh, spec)))
    return values + scales


def noise(shape: Sequence[int], seed: int) -> jax.Array:
    """Uniform in [-1, 1), by a hash of the place, which compiles in no time."""
    bits = jnp.full(shape, seed * 2654435761 % 2**32, jnp.uint32)
    for axis in range(len(shape)):
        bits = (bits ^ lax.broadcasted_iota(jnp.uint32, shape, axis)) * jnp.uint32(2246822519)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(3266489917)
        bits ^= bits >> 13
    return (bits >> 8).astype(jnp.float32) * (2.0 / 2**24) - 1.0


def arrays_of(mesh: Mesh, operation: str, shape: tuple[int, int, int], kind: str) -> Any:
    """A program that makes the operands. Scales differ by powers of 2 from one to the next."""
    types = operand_types(mesh, operation, shape, kind)
    k = shapes_of(operation, shape)[1]
    largest = {"bfloat16": 1.0, "float8_e4m3fn": 448.0, "int8": 127.0}[KINDS[kind][0]]

    def make() -> list[jax.Array]:
        found = []
        for seed, each in enumerate(types):
            values = noise(each.shape, seed + 1)
            if each.dtype != np.float32:
                values *= largest
            else:
                values = (1.5 + 0.5 * values) * jnp.exp2(jnp.round(1.5 * noise(each.shape, seed + 7)))
                values *= k**-0.25 / largest
            found.append((jnp.round(values) if each.dtype == np.int8 else values).astype(each.dtype))
        return found

    return jax.jit(make, out_shardings=[each.sharding for each in types])


def program(mesh: Mesh, key: Key, simulate: bool) -> Any:
    """What is timed, of the operands of `operand_types`."""
    operation, shape, name, kind = key
    types = operand_types(mesh, operation, shape, kind)
    specs = tuple(each.sharding.spec for each in types)
    gathers = operation in GATHERS
    weights = 2 if operation == "gated" else 1

    def plain(x: jax.Array, w: jax.Array, *scales: jax.Array) -> jax.Array:
        if scales:
            x, w = (each.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for each, scale in zip((x, w), scales))
        sums = jnp.int32 if x.dtype == np.int8 else jnp.bfloat16
        out = lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=sums)
        return out.astype(jnp.bfloat16)

    def local(x: jax.Array, *operands: jax.Array) -> jax.Array:
        (w, *gate), scales = operands[:weights], operands[weights:]
        if name == "product":
            x = jnp.tile(x, (mesh.size, 1)) if gathers and simulate else x
            return plain(x, jnp.concatenate([w, *gate]) if gate else w, *scales[:2])
        if name == "xla":
            x = lax.all_gather(x, AXIS, tiled=True) if gathers else x
            out = plain(x, w, *scales[:2])
            if gate:
                out *= jax.nn.silu(plain(x, gate[0], *scales[::2]))
            if operation == "matmul_reduce_scatter":
                out = lax.psum_scatter(out, AXIS, tiled=True)
            return lax.psum(out, AXIS) if operation == "matmul_all_reduce" else out
        given: Any = dict(zip(("lhs_scale", "rhs_scale", "gate_scale"), scales, strict=False))
        given |= {"gate": gate[0], "activation": "silu"} if gate else {}
        if kind != "bfloat16" or simulate:
            given["config"] = {"kernel": "hopper"}
        if name.startswith("fast"):
            given["config"] |= {"fast_sums": True}
        if "narrow" in name and not simulate:
            given["config"] |= {"block_n": 128, "num_stages": 6} | ({} if gathers else {"chunk": 2048})
        if "wide" in name and not simulate:
            given["config"] |= {"block_n": 256, "num_stages": 4} | ({} if gathers else {"chunk": 1024})
        if simulate:
            small = {"block_m": 32, "block_n": 32, "block_k": 128 if scales else 64, "num_stages": 2, "programs": 2}
            given["config"] |= small | ({"part": 128, "unit": 8} if gathers else {"chunk": 128})
        given["preferred_element_type"] = jnp.bfloat16
        call = jtf.all_gather_matmul if gathers else getattr(jtf, operation)
        return call(x, w, AXIS, rhs_transposed=True, implementation="simulate" if simulate else "fused", **given)

    out = SPECS[operation][2]
    if name == "product":
        out = COLUMNS if gathers else P(AXIS)
        if gathers and not simulate:
            specs = (P(), *specs[1:])  # all rows are there
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))


def compared(m: int) -> np.ndarray:
    """Which of so many rows of a rank are compared."""
    return np.unique([*range(min(m, COMPARED)), *range(0, m, 29), *range(max(m - COMPARED, 0), m)])


def error_of(mesh: Mesh, operation: str, shape: tuple[int, int, int], kind: str) -> Any:
    """A program of a result and the operands: the error, and whether all numbers are finite."""
    types = operand_types(mesh, operation, shape, kind)
    out_spec = SPECS[operation][2]
    gathers = operation in GATHERS
    rows = compared(shape[0] // mesh.size)
    per_rank = shape[0] // mesh.size
    of_all = np.concatenate([rows + per_rank * rank for rank in range(mesh.size)])

    def local(out: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        finite = jnp.all(jnp.isfinite(out.astype(jnp.float32)))
        arrays = 3 if operation == "gated" else 2
        scales = operands[arrays:] or (jnp.float32(1),) * arrays
        x, *weights = (jtf.dequantize(*each) for each in zip(operands[:arrays], scales, strict=True))
        x = x[rows if gathers else of_all]
        x = lax.all_gather(x, AXIS, tiled=True) if gathers else x
        wanted, *gate = (lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision="highest") for w in weights)
        wanted = wanted if gathers else lax.psum(wanted, AXIS)
        wanted = wanted * jax.nn.silu(gate[0]) if gate else wanted
        found = out
        if operation == "matmul_reduce_scatter":
            start = lax.axis_index(AXIS) * len(rows)
            wanted = lax.dynamic_slice_in_dim(wanted, start, len(rows))
            found = out[rows]
        else:
            found = out[of_all]
        square = jnp.square(wanted)
        usual = jnp.sqrt(square.mean(1, keepdims=True) * square.mean(0, keepdims=True) / square.mean())
        error = jnp.max(jnp.abs(found.astype(jnp.float32) - wanted) / (usual + jnp.abs(wanted)))
        return lax.pmax(error, AXIS), lax.pmin(finite.astype(jnp.int32), AXIS)

    specs = (out_spec, *(each.sharding.spec for each in types))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))


class Clock:
    """What is said and written, with the seconds since the start."""

    def __init__(self, budget: float, path: str | None) -> None:
        self.start, self.budget, self.path = time.monotonic(), budget, path

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    @property
    def over(self) -> bool:
        return self.seconds > self.budget

    def say(self, text: str) -> None:
        print(f"[{self.seconds:6.1f}] {text}", flush=True)

    def failed(self, what: str, error: Exception) -> None:
        self.say(f"{what}: {type(error).__name__}: {str(error)[:500]}")

    def row(self, **fields: Any) -> None:
        self.say(", ".join(f"{name} {value}" for name, value in fields.items()))
        if self.path:
            with Path(self.path).open("a") as file:
                file.write(json.dumps(fields) + "\n")


def keys_of(options: argparse.Namespace) -> Iterator[Key]:
    for text in options.shapes:
        only, _, sizes = text.rpartition(":")
        m, k, n = map(int, sizes.split(","))
        for operation in [only] if only else options.operations:
            for name in options.programs:
                for kind in PROGRAMS[name]:
                    if kind in options.kinds or kind.endswith((" one", " none")):
                        yield operation, (m, k, n), name, kind


def abstract(mesh: Mesh, key: Key, simulate: bool) -> list[jax.ShapeDtypeStruct]:
    """The operands of a program."""
    operation, shape, name, kind = key
    types = operand_types(mesh, operation, shape, kind)
    if name == "product" and operation in GATHERS and not simulate:
        first = types[0]
        types[0] = jax.ShapeDtypeStruct(first.shape, first.dtype, sharding=NamedSharding(mesh, P()))
    return types


def compile_all(mesh: Mesh, keys: Sequence[Key], simulate: bool, clock: Clock) -> dict[Any, Any]:
    """Futures of the compiled programs: of each key, of ("error", ...) and of ("arrays", ...)."""
    pool = concurrent.futures.ThreadPoolExecutor(16)
    futures: dict[Any, Any] = {}

    def compiled(program: Any, *types: Any) -> Any:
        return program.lower(*types).compile()

    for key in keys:
        operation, shape, name, kind = key
        case = (operation, shape, kind)
        run, types = program(mesh, key, simulate), abstract(mesh, key, simulate)
        if name in KERNELS:
            try:
                # One after the other: Triton's compiler is Python for the most part, and has a cache.
                futures[key] = pool.submit(run.lower(*types).compile)
            except Exception as error:
                clock.failed(f"{key} is not lowered", error)
                continue
            m, _, n = shapes_of(operation, shape)
            out = jax.ShapeDtypeStruct((m, n), "bfloat16", sharding=NamedSharding(mesh, SPECS[operation][2]))
            if ("error", *case) not in futures:
                futures["error", *case] = pool.submit(compiled, error_of(mesh, *case), out, *types)
        else:
            futures[key] = pool.submit(compiled, run, *types)
        if ("arrays", *case) not in futures:
            futures["arrays", *case] = pool.submit(compiled, arrays_of(mesh, *case))
    clock.say(f"{len(keys)} programs are lowered")
    pool.shutdown(wait=False)
    return futures


def lower_all(mesh: Mesh, keys: Sequence[Key], clock: Clock) -> bool:
    """Compiles the kernels of our programs for a GPU. Returns whether all could be."""
    good = True
    for key in keys:
        operation, shape, name, kind = key
        if name in KERNELS:
            try:
                kernels = lower(program(mesh, key, simulate=False), *abstract(mesh, key, simulate=False))
            except Exception as error:
                clock.failed(f"{key} is not lowered", error)
                good = False
                continue
            clock.row(operation=operation, shape=shape, kind=kind, program=name, kernels=kernels)
    return good


def lower(run: Any, *types: Any) -> int:
    """How many kernels a program has, which this compiles for a GPU, with or without one."""
    return run.trace(*types).lower(lowering_platforms=("cuda",)).as_text().count("triton_kernel_call")


def check(key: Key, run: Any, arrays: Sequence[jax.Array], error_of: Any, clock: Clock) -> bool:
    """Compares a kernel's result with what is expected, and that of several calls with the first."""
    operation, shape, name, kind = key
    first = jtf.block_until_ready(run(*arrays))
    error, finite = error_of(first, *arrays)
    again = [run(*arrays) for _ in range(4)]
    same = all(bool(jnp.array_equal(first, jtf.block_until_ready(each))) for each in again)
    good = float(error) <= TOLERANCE and bool(finite) and same
    clock.row(
        operation=operation, shape=list(shape), kind=kind, program=name, error=float(error), finite=bool(finite),
        same_bits=same, ok=good,
    )  # fmt: skip
    return good


def times(runs: Mapping[Key, tuple[Any, Sequence[jax.Array]]], rounds: int, clock: Clock) -> None:
    """Microseconds of a call, each program in turn."""
    found: dict[Key, list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, (run, arrays) in runs.items():
            jax.block_until_ready(run(*arrays))
            start = time.perf_counter()
            for _ in range(CALLS - 1):
                run(*arrays)
            jax.block_until_ready(run(*arrays))
            found[key].append((time.perf_counter() - start) / CALLS * 1e6)
    for (operation, shape, name, kind), samples in found.items():
        clock.row(
            operation=operation, shape=list(shape), kind=kind, program=name, us=round(float(np.median(samples)), 1),
            least=round(min(samples), 1), most=round(max(samples), 1), rounds=len(samples),
        )  # fmt: skip


def torch_jobs(keys: Sequence[Key]) -> list[dict[str, Any]]:
    """What PyTorch's processes are asked of the programs that are theirs."""
    jobs = []
    for operation, shape, name, _ in keys:
        if name == "torch" and operation in ("all_gather_matmul", "matmul_reduce_scatter"):
            m, k, n = shapes_of(operation, shape)
            label = f"{operation}:{','.join(map(str, shape))}"
            jobs.append({"name": label, "op": operation, "m": m, "k": k, "n": n, "calls": TORCH_CALLS})
    return jobs


def ask_torch(keys: Sequence[Key], world: int, python: str, seconds: float, clock: Clock) -> None:
    """Rows of what PyTorch's processes find; they are ended when they are silent for too long."""

    def write(answer: Mapping[str, Any]) -> None:
        operation, _, sizes = answer["name"].partition(":")
        fields = {
            "operation": operation, "shape": [int(size) for size in sizes.split(",")], "kind": "e4m3 rows",
            "program": answer["implementation"], "torch": answer.get("torch"), "launch": answer.get("launch"),
        }  # fmt: skip
        if "failed" in answer:
            clock.row(**fields, failed=" ".join(answer["failed"].split())[:500])
            return
        good = answer["error"] <= TOLERANCE
        clock.row(**fields, error=answer["error"], ok=good)
        if good and (samples := answer["samples"].get("sustained")):
            clock.row(
                **fields, us=round(float(np.median(samples)), 1), least=round(min(samples), 1),
                most=round(max(samples), 1), rounds=len(samples),
            )  # fmt: skip

    if jobs := torch_jobs(keys):
        request = {"world": world, "modes": ["sustained"], "seconds": seconds, "jobs": jobs}
        command = [python, str(torch_peer.FOLDER / TORCH_SCRIPT)]
        silence = min(120.0, max(1.0, clock.budget - clock.seconds))
        _, failure = torch_peer.converse(command, request, silence, write)
        if failure:
            clock.say(f"PyTorch's processes ended early: {failure}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["8192,8192,28672"], metavar="M,K,N")
    parser.add_argument("--operations", nargs="+", default=list(SPECS)[:3], choices=list(SPECS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS)[:4], choices=list(KINDS)[:4])
    programs = [name for name in PROGRAMS if name in ("fused", "fast", "xla", "product")]
    parser.add_argument("--programs", nargs="+", default=programs, choices=list(PROGRAMS))
    parser.add_argument("--world", type=int, help="number of devices (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="of times (default: %(default)s; 0: none)")
    parser.add_argument("--budget", type=float, default=600, help="seconds (default: %(default)s)")
    parser.add_argument("--torch-python", default=sys.executable, metavar="PATH", help="a Python that has PyTorch")
    parser.add_argument("--torch-seconds", type=float, default=1.0, help="for each of its rows (default: %(default)s)")
    parser.add_argument("--json", metavar="PATH", help="where rows are appended")
    parser.add_argument("--simulate", action="store_true", help="on the CPU, in small tiles")
    parser.add_argument("--lower", action="store_true", help="only compile our kernels")
    options = parser.parse_args(arguments)
    clock = Clock(options.budget, options.json)
    mesh = Mesh(np.array(jax.devices()[: options.world]), (AXIS,))
    clock.say(f"{mesh.size} x {jax.devices()[0].device_kind}, JAX {jax.__version__}")
    asked = list(keys_of(options))
    keys = [key for key in asked if key[2] != "torch"]
    if options.lower:
        sys.exit(not lower_all(mesh, keys, clock))
    futures = compile_all(mesh, keys, options.simulate, clock)

    @functools.cache
    def arrays(*case: Any) -> list[jax.Array]:
        return futures["arrays", *case].result()()

    def ready(key: Any) -> Any:
        """A program, or None if it is not there in time."""
        if key not in futures:
            return None
        try:
            return futures[key].result(timeout=max(1.0, 0.7 * options.budget - clock.seconds))
        except Exception as error:
            clock.failed(f"{key} fails", error)
            return None

    runs: dict[tuple[Any, ...], dict[Key, Any]] = {}
    for key in sorted(keys, key=lambda key: key[2] not in KERNELS):
        operation, shape, name, kind = key
        if clock.over or (run := ready(key)) is None:
            continue
        operands = arrays(operation, shape, kind)
        try:
            if name in KERNELS and (judge := ready(("error", operation, shape, kind))) is not None:
                check(key, run, operands, judge, clock)
            if name == "product" and operation in GATHERS and not options.simulate:
                operands = [jax.device_put(operands[0], NamedSharding(mesh, P())), *operands[1:]]
            jax.block_until_ready(run(*operands))
            runs.setdefault(key[:2], {})[key] = run, operands
        except Exception as error:
            clock.failed(f"{key} fails", error)
    for own in runs.values():
        if options.rounds and not clock.over:
            times(own, options.rounds, clock)
    if not clock.over:
        ask_torch(asked, mesh.size, options.torch_python, options.torch_seconds, clock)
    clock.say("done")
    if not all(each.done() for each in futures.values()):
        os._exit(0)  # threads that still compile would hold the process


if __name__ == "__main__":
    main()
