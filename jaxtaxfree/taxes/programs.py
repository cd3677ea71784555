"""`python -m jaxtaxfree taxes`: accounts of XLA's programs and of the fused ones, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxtaxfree.ops.all_gather_matmul import all_gather_matmul
from jaxtaxfree.ops.decode_attention import decode_attention
from jaxtaxfree.taxes import Account, Recording, account, account_of, compare, save_png, table

AXIS = "tp"
DTYPE = jnp.bfloat16

# Of decode_attention: query heads, key/value heads and their size.
N, KV_HEADS, H = 64, 8, 128
CACHES = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A chain of calls, none of which begins before the one before has ended.

    Short calls are repeated in a loop, as a decode step is, so that a step lasts longer than its dispatch, and XLA
    replays a CUDA graph. Otherwise the account would show little but a launch tax that no decode loop pays.

    Attributes:
      rounds: how often a step goes through the chain.
      operands: of each call the first operand; and the other operands, in tuples that the calls take turns with.
      in_specs, out_spec: of the operands of one call, and of its result.
      implementations: by name, functions of the operands of one call.
    """

    rounds: int
    operands: tuple[tuple[jax.Array, ...], tuple[tuple[jax.Array, ...], ...]]
    in_specs: tuple[P, ...]
    out_spec: P
    implementations: dict[str, Callable[..., jax.Array]]

    @property
    def calls(self) -> int:
        return self.rounds * len(self.operands[0])

    def jitted(self, name: str, mesh: Mesh) -> Any:
        # One trace and one lowering for all calls, but for no other program.
        call = jax.jit(lambda *operands: self.implementations[name](*operands))

        def chain(xs: Sequence[jax.Array], others: Sequence[tuple[jax.Array, ...]]) -> list[jax.Array]:
            outs: list[jax.Array] = []
            for i, x in enumerate(xs):
                if outs:
                    x, outs[-1] = lax.optimization_barrier((x, outs[-1]))
                outs.append(call(x, *others[i % len(others)]))
            return outs

        def chains(xs: Sequence[jax.Array], others: Sequence[tuple[jax.Array, ...]]) -> list[jax.Array]:
            if self.rounds == 1:
                return chain(xs, others)

            def again(_: Any, outs: list[jax.Array]) -> list[jax.Array]:
                # Nothing is the same in every round, as far as XLA can see.
                tied_xs, tied_others, _ = lax.optimization_barrier((xs, others, outs))
                return chain(tied_xs, tied_others)

            outs = [jnp.zeros(out.shape, out.dtype) for out in jax.eval_shape(chain, xs, others)]
            return lax.fori_loop(0, self.rounds, again, outs)

        x_spec, *other_specs = self.in_specs
        specs = ((x_spec,) * len(self.operands[0]), (tuple(other_specs),) * len(self.operands[1]))
        return jax.jit(jax.shard_map(chains, mesh=mesh, in_specs=specs, out_specs=self.out_spec, check_vma=False))


def all_gather_matmul_program(sizes: Sequence[int], mesh: Mesh) -> Program:
    """lhs [M, K] sharded on rows, rhs [K, N] on columns."""
    m, k, n = sizes
    calls = 16 if m <= 256 else 4
    specs = (P(AXIS, None), P(None, AXIS))
    lhs = _normal(mesh, specs[0], (m, k), calls)
    # Two, so that neither stays in the L2 cache from call to call.
    rhs = _normal(mesh, specs[1], (k, n), 2)
    return Program(
        rounds=4 if m <= 256 else 1,
        operands=(lhs, tuple((w,) for w in rhs)),
        in_specs=specs,
        out_spec=P(None, AXIS),
        implementations={
            "XLA": lambda x, w: lax.all_gather(x, AXIS, axis=0, tiled=True) @ w,
            "fused": lambda x, w: all_gather_matmul(x, w, AXIS, implementation="fused"),
        },
    )


def decode_attention_program(sizes: Sequence[int], mesh: Mesh) -> Program:
    """One token of B sequences over S keys a rank, all of them used."""
    b, s = sizes
    cache = P(None, AXIS, None, None)
    slots = s * mesh.size
    query = _normal(mesh, P(), (b, N, H), 16)
    # So many that none stays in the L2 cache until its turn comes again.
    keys_and_values = _normal(mesh, cache, (b, slots, KV_HEADS, H), 2 * CACHES)
    lengths = jax.device_put(np.full((b,), slots, np.int32), NamedSharding(mesh, P()))

    def attend(implementation: Any) -> Callable[..., jax.Array]:
        return lambda q, k, v, lengths: decode_attention(
            q, k, v, AXIS, key_value_seq_lengths=lengths, implementation=implementation
        )

    return Program(
        rounds=max(1, 2**17 // (b * s)),
        operands=(query, tuple((k, v, lengths) for k, v in zip(keys_and_values[::2], keys_and_values[1::2]))),
        in_specs=(P(), cache, cache, P()),
        out_spec=P(),
        implementations={"XLA": attend("xla"), "fused": attend("fused")},
    )


# By name: the sizes of its shapes in words, those that are taken by default, and what makes it.
PROGRAMS: dict[str, tuple[str, tuple[tuple[int, ...], ...], Callable[[Sequence[int], Mesh], Program]]] = {
    "all_gather_matmul": (
        "M,K,N",
        ((16, 8192, 28672), (2048, 8192, 28672), (8192, 8192, 28672)),
        all_gather_matmul_program,
    ),
    "decode_attention": ("B,S", ((1, 8192), (8, 32768)), decode_attention_program),
}


def _normal(mesh: Mesh, spec: P, shape: tuple[int, ...], count: int) -> tuple[jax.Array, ...]:
    """Random arrays: zeros would draw less power, and so run at higher clocks."""
    make = jax.jit(lambda key: jax.random.normal(key, shape, DTYPE), out_shardings=NamedSharding(mesh, spec))
    return tuple(make(key) for key in jax.random.split(jax.random.key(0), count))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", nargs="?", choices=PROGRAMS, help="what to run; by default all")
    parser.add_argument(
        "--shape", action="append", metavar="SIZES", help="M,K,N, or B,S (keys a rank); may be repeated"
    )
    parser.add_argument("--gpus", type=int, help="how many; by default all")
    parser.add_argument("--xla-option", action="append", default=[], metavar="FLAG=VALUE", help="for XLA's program")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="account for recordings instead, on any machine")
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER", help="where to keep traces and recordings")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where to write the accounts")
    parser.add_argument("--png", type=pathlib.Path, metavar="FILE", help="where to draw them")


def main(options: argparse.Namespace) -> int:
    """Prints the accounts. Returns the exit code."""
    console = Console()
    if options.read:
        accounts = [_read(pathlib.Path(path)) for path in options.read]
        _print(console, "", accounts)
    else:
        try:
            gpus = jax.devices("cuda")
        except RuntimeError:  # JAX's answer where there are none
            gpus = []
        if len(gpus) < 2 or len(gpus) < (options.gpus or 2):
            wanted = "at least two GPUs" if options.gpus is None else f"{options.gpus} GPUs, two or more"
            print(
                f"taxes needs {wanted} to run a program, and JAX sees {len(gpus)}; --read needs none.", file=sys.stderr
            )
            return 2
        mesh = Mesh(np.array(gpus[: options.gpus]), (AXIS,))
        accounts = []
        for name in [options.program] if options.program else PROGRAMS:
            words, shapes, make = PROGRAMS[name]
            for sizes in [_sizes(text, words) for text in options.shape or ()] or shapes:
                title = f"{name} {','.join(map(str, sizes))}"
                accounts += _account_for(console, title, make(sizes, mesh), mesh, options)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(one) for one in accounts], indent=1))
    if options.png:
        save_png(accounts, options.png)
    return 0


def _account_for(
    console: Console, title: str, program: Program, mesh: Mesh, options: argparse.Namespace
) -> list[Account]:
    accounts = []
    for name in program.implementations:
        with console.status(f"{title}, {name}"):
            made = account(
                program.jitted(name, mesh),
                *program.operands,
                name=f"{title}, {name}",
                calls=program.calls,
                compiler_options=dict(flag.split("=", 1) for flag in options.xla_option) if name == "XLA" else None,
                keep=options.keep and options.keep / f"{title}-{name}".replace(" ", "-").replace(",", "x"),
            )
        accounts.append(made)
    _print(console, title, accounts)
    return accounts


def _print(console: Console, title: str, accounts: Sequence[Account]) -> None:
    """The table, how the last account differs from the first, and what to know about each."""
    shown = [dataclasses.replace(one, name=one.name.removeprefix(f"{title}, ")) for one in accounts]
    printed = table(shown)
    printed.title = f"{title}, {shown[0].calls} calls a step" if title else None
    console.print(printed)
    if len(shown) > 1:
        console.print(compare(shown[0], shown[-1]))
    for one in shown:
        for note in one.notes:
            console.print(f"{one.name}: {note}", style="dim")


def _read(path: pathlib.Path) -> Account:
    return account_of(Recording.load(path), path.parent.name or path.stem)


def _sizes(text: str, words: str) -> tuple[int, ...]:
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        sizes = ()
    if len(sizes) != words.count(",") + 1:
        sys.exit(f"--shape {text}: the program takes {words}")
    return sizes
