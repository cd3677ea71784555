"""`python -m jaxtaxfree taxes`: accounts of XLA's programs and of the fused ones, side by side."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
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

from jaxtaxfree.ops.register import OPERATIONS, Operation
from jaxtaxfree.ops.shapes import MatmulShape
from jaxtaxfree.taxes import Account, Recording, account, account_of, compare, save_png, table

AXIS = "tp"
DTYPE = np.dtype(jnp.bfloat16)
# Seconds of a chain above which it has fewer calls, and of a step whose chain is repeated.
LONG = 4e-3
USUAL_STEP = 1.6e-3
# So much is read before an operand has its turn again that nothing of it stays in the cache of an H200.
TWICE_THE_L2_CACHE = 2 * 60 * 10**6


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


def program_of(operation: Operation, shape: Any, mesh: Mesh) -> Program:
    """Calls of an operation at a shape, by XLA and by the kernel."""
    types, specs = operation.operands(shape, mesh.size, DTYPE), operation.in_specs(AXIS)
    seconds = _seconds(operation, shape, mesh.size)
    calls = 16 if 16 * seconds < LONG else 4
    nbytes = sum(_bytes_of_a_rank(operation, shape, mesh.size)[1:])
    turns = min(calls, 1 + math.ceil(TWICE_THE_L2_CACHE / nbytes)) if nbytes else 1

    def made(index: int, count: int) -> tuple[jax.Array, ...]:
        size, sharding = types[index].shape, NamedSharding(mesh, specs[index])
        if types[index].dtype != DTYPE:  # lengths of sequences, whose caches are full
            return (jax.device_put(np.full(size, mesh.size * shape.s, types[index].dtype), sharding),) * count
        # Zeros would draw less power, and so run at higher clocks.
        make = jax.jit(lambda key: jax.random.normal(key, size, DTYPE), out_shardings=sharding)
        return tuple(make(key) for key in jax.random.split(jax.random.key(index), count))

    def by(implementation: str) -> Callable[..., jax.Array]:
        return functools.partial(operation.call, axis_name=AXIS, implementation=implementation)

    others = [made(index, turns) for index in range(1, len(types))]
    return Program(
        rounds=max(1, min(16, round(USUAL_STEP / (calls * seconds)))),
        operands=(made(0, calls), tuple(zip(*others)) or ((),)),
        in_specs=specs,
        out_spec=operation.out_spec(AXIS),
        implementations={"XLA": by("xla"), "fused": by("fused")},
    )


def _bytes_of_a_rank(operation: Operation, shape: Any, world: int) -> list[int]:
    """Of each operand, that part of it which a rank has."""
    return [
        x.size * x.dtype.itemsize // (1 if dimension is None else world)
        for x, dimension in zip(operation.operands(shape, world, DTYPE), operation.sharded)
    ]


def _seconds(operation: Operation, shape: Any, world: int) -> float:
    """About what a call takes on an H200."""
    flops = shape.flops(world) if isinstance(shape, MatmulShape) else 0
    return 2e-6 + max(sum(_bytes_of_a_rank(operation, shape, world)) / 4.8e12, flops / 800e12)


def _usual_shapes(operation: Operation, world: int) -> list[Any]:
    """Of the listed shapes the shortest call and the longest."""
    by_seconds = sorted(operation.shapes, key=lambda shape: _seconds(operation, shape, world))
    return [by_seconds[0], by_seconds[-1]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", nargs="?", choices=OPERATIONS, help="what to run; by default all")
    parser.add_argument(
        "--shape",
        action="append",
        metavar="SIZES",
        help="M,K,N, or B,S (keys a rank), or NBYTES of a rank; may be repeated; by default the shortest and the "
        "longest of the listed ones",
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
        for operation in [OPERATIONS[options.program]] if options.program else OPERATIONS.values():
            asked = [_shape(text, operation) for text in options.shape or ()]
            for shape in asked or _usual_shapes(operation, mesh.size):
                title = f"{operation.name} {_sizes(shape)}"
                accounts += _account_for(console, title, program_of(operation, shape, mesh), mesh, options)
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


def _sizes(shape: Any) -> str:
    """As `--shape` takes them."""
    return ",".join(str(getattr(shape, size)) for size in shape.sizes)


def _shape(text: str, operation: Operation) -> Any:
    """The shape of these sizes."""
    kind = type(operation.shapes[0])
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        sizes = ()
    if len(sizes) != len(kind.sizes):
        sys.exit(f"--shape {text}: {operation.name} takes {','.join(kind.sizes).upper()}")
    return kind.of(*sizes)
