"""Times `jtf.einsum` of global arrays beside the same operation in a `jax.shard_map` written by hand.

Both are the same kernel, so they are to be within 1 % of each other, and their results are to be the same bits:

    python benchmarks/global_products.py
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))

import jaxtaxfree as jtf
from benchmarks.operation import AXIS, chain, normal
from benchmarks.sampling import MODES, quantiles
from benchmarks.timing import Run, can_queue, guard, sample_rounds

CALLS, WEIGHTS = 8, 2  # calls of a program, and the weights between which they take turns
ALLOWED = 1.01


@dataclass(frozen=True)
class Case:
    """A product of m rows, [m, k] x [k, n], with the specs of its operands and its result."""

    operation: Callable[..., jax.Array]
    m: int
    k: int
    n: int
    specs: tuple[P, P]
    out: P


CASES = {
    "matmul_all_reduce": Case(jtf.matmul_all_reduce, 16, 28672, 8192, (P(None, AXIS), P(AXIS)), P()),
    "all_gather_matmul": Case(jtf.all_gather_matmul, 2048, 8192, 28672, (P(AXIS), P(None, AXIS)), P(None, AXIS)),
}


def programs(case: Case, mesh: Mesh, implementation: str | None) -> dict[str, Any]:
    """What `jax.jit` makes of (every lhs, every rhs) -> every result, by `einsum` and by hand."""

    def einsum(x: jax.Array, w: jax.Array) -> jax.Array:
        how: dict[str, Any] = {"in_shardings": case.specs, "out_sharding": case.out, "implementation": implementation}
        return jtf.einsum("mk,kn->mn", x, w, **how)

    by_hand = jax.shard_map(
        lambda x, w: case.operation(x, w, AXIS, implementation=implementation),
        mesh=mesh,
        in_specs=case.specs,
        out_specs=case.out,
    )
    calls = {"einsum": einsum, "shard_map": by_hand}
    return {name: jax.jit(lambda xs, ws, call=call: chain(call, xs, ws)) for name, call in calls.items()}


def measure(case: Case, mesh: Mesh, args: argparse.Namespace, name: str) -> float:
    """Prints the times of a case, and returns how much longer `einsum` takes in a queue of programs."""
    sizes = [max(len(mesh.devices) * 8, size // args.shrink) for size in (case.k, case.n)]
    (k, n), m = sizes, max(len(mesh.devices), case.m // args.shrink)
    x_of, w_of = (
        normal(size, NamedSharding(mesh, spec)) for size, spec in zip(((m, k), (k, n)), case.specs, strict=True)
    )
    keys = jax.random.split(jax.random.key(0), CALLS + WEIGHTS)
    operands = [x_of(key) for key in keys[:CALLS]], [w_of(key) for key in keys[CALLS:]]
    runs = {}
    for way, program in programs(case, mesh, args.implementation).items():
        with guard(f"{name}, {way}", args.timeout):
            executable = program.lower(*operands).compile()
            runs[way] = Run(label=name, executable=executable, operands=operands, calls=CALLS, queue=can_queue(mesh))
            runs[way].launch(2)
            runs[way].program_seconds = min(runs[way].launch() for _ in range(3))
    found, by_hand = (np.asarray(runs[way].last_result[-1], np.float32) for way in ("einsum", "shard_map"))
    same = bool(np.array_equal(found, by_hand) and np.isfinite(found).all())
    for mode in MODES:
        for way, error in sample_rounds(runs, mode, args.seconds, args.timeout).items():
            raise RuntimeError(f"{name}, {way}") from error
        for way, run in runs.items():
            median, low, high = quantiles(run.samples[mode.name])
            print(f"{name} [{m}, {k}] x [{k}, {n}], {mode.name:9}  {way:9}  {median:8.2f} us ({low:.2f} to {high:.2f})")
    medians = [statistics.median(runs[way].samples["sustained"]) for way in ("einsum", "shard_map")]
    print(
        f"{name}: einsum / shard_map {medians[0] / medians[1]:.4f}, results {'alike' if same else 'DIFFER'}", flush=True
    )
    return medians[0] / medians[1] if same else float("inf")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="for each case and way of timing")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a step is given up")
    parser.add_argument("--implementation", default="fused", help="fused, xla or simulate")
    parser.add_argument("--shrink", type=int, default=1, help="by how much sizes are divided, for a trial on a CPU")
    args = parser.parse_args(argv)
    mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
    print(f"{mesh.size} x {jax.devices()[0].device_kind}, JAX {jax.__version__}")
    with jax.set_mesh(mesh):
        ratios = [measure(case, mesh, args, name) for name, case in CASES.items()]
    return int(max(ratios) > ALLOWED)


if __name__ == "__main__":
    raise SystemExit(main())
