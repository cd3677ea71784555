"""The forms of a cache that `decode_attention` takes, timed side by side: python benchmarks/attention_forms.py.

One new token of one sequence, bf16, 64 query heads over 8 key/value heads of 128, 8192 keys on each of the GPUs that
there are. No form should take more than a few per cent longer than the one that it is compared with. The calls of a
chain have caches of their own, as layers have, so nothing is left in the L2 cache; the chain is repeated in a loop.

The forms:

plain: [B, S, K, H] along a mesh axis, of one rank if there is one GPU.
alone/...: without peers (`axis_name=()`), outside of `jax.shard_map`, on the first GPU. "axis" is the plain form there.
ring/...: a full ring that begins in the middle.
BKSH, KBSH: the other layouts. paged: pages of 64 in random order.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf

N, K, H, PAGE = 64, 8, 128, 64


@dataclasses.dataclass(frozen=True)
class Form:
    """A form: its name, the form that it is compared with, and what the call says."""

    name: str
    beside: str
    alone: bool = False
    layout: str = "BSKH"
    paged: bool = False
    ring: bool = False


def forms(alone: bool) -> list[Form]:
    plain = "alone/axis" if alone else "plain"
    prefix = "alone/" if alone else ""
    return [
        Form(plain, plain),
        *([Form("alone/plain", plain, True)] if alone else []),
        Form(f"{prefix}ring", plain, alone, ring=True),
        Form(f"{prefix}BKSH", plain, alone, "BKSH"),
        Form(f"{prefix}KBSH", plain, alone, "KBSH"),
        Form(f"{prefix}ring/KBSH", plain, alone, "KBSH", ring=True),
        Form(f"{prefix}paged", f"{prefix}paged", alone, paged=True),
        Form(f"{prefix}paged/ring", f"{prefix}paged", alone, paged=True, ring=True),
        Form(f"{prefix}paged/KBSH", f"{prefix}paged", alone, "KBSH", paged=True),
        Form(f"{prefix}paged/ring/KBSH", f"{prefix}paged", alone, "KBSH", paged=True, ring=True),
    ]


def program(form: Form, mesh: Mesh, slots: int, implementation: str, calls: int) -> tuple[Callable, tuple[Any, ...]]:
    """(query, caches) -> the result of a loop of `calls` chains, and the operands."""
    world = mesh.devices.size
    axis_name = () if form.alone else "tp"
    along = "S" if not form.paged else "B"  # of a pool the pages
    page = PAGE if form.paged else slots
    sizes = {"B": world * (slots // PAGE) if form.paged else 1, "S": page if form.paged else world * slots, "K": K}
    shape = (*(sizes[letter] for letter in form.layout[:3]), H)
    spec = P(*("tp" if letter == along else None for letter in form.layout))
    arguments: dict[str, Any] = {"key_value_seq_lengths": jnp.array([world * slots], jnp.int32)}
    if form.ring:
        arguments["starts"] = jnp.array([world * slots * 5 // 8 + 3], jnp.int32)
    if form.paged:
        arguments["block_tables"] = jax.random.permutation(jax.random.key(1), slots // PAGE)[None]

    def chains(query: jax.Array, caches: list[tuple[jax.Array, jax.Array]], arguments: dict[str, Any]) -> jax.Array:
        def chain(_: Any, query: jax.Array) -> jax.Array:
            for keys, values in caches:
                query = jtf.decode_attention(
                    query, keys, values, axis_name, kv_layout=form.layout, implementation=implementation, **arguments
                )
            return query

        return lax.fori_loop(0, calls, chain, query)

    layers = max(2, -(-(512 << 20) // (4 * slots * K * H)))  # caches of half a GiB on a GPU
    normal = jax.jit(
        lambda key: jax.random.normal(key, shape, jnp.bfloat16),
        out_shardings=jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
        if form.alone
        else NamedSharding(mesh, spec),
    )
    keys = jax.random.split(jax.random.key(0), 2 * layers)
    caches = [(normal(keys[2 * i]), normal(keys[2 * i + 1])) for i in range(layers)]
    query = jnp.ones((1, N, H), jnp.bfloat16)
    call: Callable = chains
    if not form.alone:
        specs = (P(), [(spec, spec)] * layers, P())
        call = jax.shard_map(chains, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(call), (query, caches, arguments)


def measure(mesh: Mesh, alone: bool, slots: int, implementation: str, calls: int, rounds: int) -> None:
    """Times all forms in turns, and prints what a call takes."""
    every = forms(alone)
    runs = {form.name: program(form, mesh, slots, implementation, calls) for form in every}
    seconds: dict[str, list[float]] = {form.name: [] for form in every}
    for turn in range(rounds + 2):
        for name, (call, operands) in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(call(*operands))
            if turn >= 2:
                seconds[name].append((time.perf_counter() - start) / (calls * len(operands[1])))
    kind = mesh.devices.flat[0].device_kind
    print(f"{mesh.devices.size} x {kind}, {slots} keys a rank, {implementation}: us a call (median of {rounds}, least)")
    for form in every:
        mine, other = seconds[form.name], seconds[form.beside]
        ratio = statistics.median(np.array(mine) / np.array(other))
        times = f"{1e6 * statistics.median(mine):8.2f} {1e6 * min(mine):8.2f}"
        print(f"  {form.name:22} {times}   {ratio:.3f} x {form.beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=8192, help="on each GPU")
    parser.add_argument("--implementation", default="fused")
    parser.add_argument("--calls", type=int, default=50, help="chains of a loop")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    devices = np.array(jax.devices())
    how = (options.keys, options.implementation, options.calls, options.rounds)
    measure(Mesh(devices[:1], ("tp",)), True, *how)
    if len(devices) > 1:
        measure(Mesh(devices, ("tp",)), False, *how)
    if options.implementation == "fused":
        jtf.heap.check()


if __name__ == "__main__":
    main()
