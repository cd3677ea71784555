"""What a benchmark of an operation consists of, and the program that every implementation of it is timed in.

All implementations run in the same program: a chain of `calls` calls in one executable, each on a first operand of its
own, x, while the second, y (weights, caches), may be one that several calls take turns with.

* Each call has another x, because XLA merges equal collectives and hoists invariant products, also across
  `lax.optimization_barrier`.
* A barrier ties the x of call i + 1 to the output of call i. XLA removes barriers only after it has scheduled the
  program, so no call overlaps the next one.
* The program samples every output, and returns the last one whole, for the check. The samples are taken behind a
  barrier after the last call: XLA can neither shrink a product to what is sampled nor put small kernels between calls.
* Where calls are shorter than the time that the host takes to launch them, the chain is the body of a `lax.fori_loop`,
  as a decode step is: XLA replays the body as a CUDA graph.

What is timed describes itself by a subclass of `Operation`; `run.py` measures, checks and prints all of them alike.
"""

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.layout import Row, by_peer
from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops import register
from jaxtaxfree.teams import Team

AXIS = "tp"
# A second axis, of size 1: what runs along it is the part of an operation that needs no peer.
ONE = "one"
DTYPE = jnp.bfloat16

LATENCY_HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}
NCCL_SYMMETRIC = {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}
# NCCL's collectives in CUDA graphs. By default XLA launches every collective by itself, and takes a kernel of its own
# for small all-reduces, which it cannot put into a graph.
GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,COLLECTIVES",
    "xla_gpu_experimental_use_collective_kernels": "",
    "xla_gpu_graph_min_graph_size": 1,
}
FLAG_SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "latency_hiding": LATENCY_HIDING,
    "nccl_symmetric": NCCL_SYMMETRIC,
    "both": LATENCY_HIDING | NCCL_SYMMETRIC,
    "graph": GRAPH,
    "graph_symmetric": GRAPH | NCCL_SYMMETRIC,
}
# Where nothing is there to hide latency behind.
DEPENDENT = tuple(name for name, flags in FLAG_SETS.items() if not flags.keys() & LATENCY_HIDING.keys())

# What calls find in the L2 cache of weights and caches: what the operation says; as much as fits; nothing.
L2 = ("usual", "warm", "cold")
COLD_BYTES = 2 * 60 * 10**6  # read in between: twice the L2 cache of an H200

# XLA runs a program once launch by launch, and as a CUDA graph from then on: both are checked.
CHECKED_RUNS = 3

Config = dict[str, Any]
Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute the operation, or one part of it.

    Attributes:
      call: (x, y) -> out, inside shard_map; with alternatives it takes `config` as well.
      in_specs, out_spec: of x and y, and of out, each of which may be a tree.
      takes: which of the layouts of x in `Operands.xs`.
      options: XLA flags of this executable alone.
      auto: the call sees global arrays, and XLA partitions it.
      flat: the call wants a mesh of no other axis than AXIS.
      alternatives: of a peer that has to be tuned, configurations. Of those that are right the one that is fastest in a
        few programs is timed.
      apart: it runs when the others of its shape have been timed and checked. For peers that were seen to give wrong
        results, which may have been written anywhere.
      mixed: of ours, a program that leaves products to XLA, which times them while it compiles.
      steps: how many of what is timed a call makes, one after the other.
      tolerance: relative Frobenius error of a row of the result. Two roundings to bf16 differ by about 2e-3.
      config: of a fused kernel, what was asked for, None if it chooses by shape; of a tuned peer, what was chosen.
      compile: (implementation, mesh, xs, ys, rounds) -> what is launched, instead of the usual program: a function of
        every x and every y to what that program returns. It may take `waits` as well, see `sampling.Mode`.
      reads: y -> what of it the program takes; None: all.
    """

    name: str
    call: Call
    in_specs: tuple[Any, Any]
    out_spec: Any
    takes: str = "sharded"
    options: dict[str, Any] = field(default_factory=dict)
    auto: bool = False
    flat: bool = False
    alternatives: tuple[Config, ...] = ()
    apart: bool = False
    mixed: bool = False
    steps: int = 1
    tolerance: float = 1e-2
    config: Config | None = None
    compile: Callable[..., Callable[..., Any]] | None = None
    reads: Callable[[Any], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Random operands of one program.

    Attributes:
      xs: by layout, one x for each call, and the spare ones.
      ys: what the calls take turns with.
      spare: x that take part where results are checked, for chains that have fewer calls than there are checks.
    """

    xs: Mapping[str, tuple[Any, ...]]
    ys: tuple[Any, ...]
    spare: int = 0

    def of(self, implementation: Implementation, rotation: int = 0) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What a program takes: the x from this one on, round in a circle, and of every y what it reads."""
        xs = self.xs[implementation.takes]
        ys = self.ys if implementation.reads is None else tuple(map(implementation.reads, self.ys))
        return (xs[rotation:] + xs[:rotation])[: len(xs) - self.spare], ys


class Operation(abc.ABC):
    """One operation, or a program of several, as `run.py` measures it.

    Attributes:
      name: on the command line and in results.
      shapes, tiny_shapes: what is measured, and what `--check` runs.
      sizes: attributes that tell a shape from the others; also keys of a row of results.
      parts: implementations that do only a part of the operation, and may well be faster than its floor.
      peers: beginnings of the names of what the fused kernel has to be ahead of.
      optional_peers: the same of what only some machines can run. "torch" runs in processes of its own (torch_peer.py).
      torch_script, torch_tolerance: the file in this folder that they run, and the `tolerance` of what it finds.
      own, rival: the implementations that the tables compare: the kernel as it is chosen by shape, and what None takes
        instead.
      fewest_calls: in a chain.
      ceiling: in words, what `ceilings` measures.
      heading: in words, the sizes in tables of documents.
      digits: of the microseconds there.
    """

    name: ClassVar[str]
    shapes: ClassVar[tuple[Any, ...]]
    tiny_shapes: ClassVar[tuple[Any, ...]]
    sizes: ClassVar[tuple[str, ...]]
    parts: ClassVar[tuple[str, ...]]
    peers: ClassVar[tuple[str, ...]] = ("xla",)
    optional_peers: ClassVar[tuple[str, ...]] = ()
    torch_script: ClassVar[str] = "torch_async_tp.py"
    torch_tolerance: ClassVar[float] = Implementation.tolerance
    own: ClassVar[str] = "fused"
    rival: ClassVar[str] = "xla/default"
    fewest_calls: ClassVar[int] = 8
    ceiling: ClassVar[str]
    heading: ClassVar[str]
    digits: ClassVar[int] = 0

    @abc.abstractmethod
    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        """Every implementation by name; with `configs`, one more fused kernel for each, named by `config_name`."""

    @abc.abstractmethod
    def expected_from(self, implementation: Implementation) -> Implementation:
        """What gives the right results for this one. It runs a single call and is not timed."""

    @abc.abstractmethod
    def operands(self, shape: Any, mesh: Mesh, calls: int, turns: int) -> Operands:
        """An x for each of the calls, and `turns` y."""

    def usual_turns(self, shape: Any, calls: int) -> int:
        """How many y the calls take turns with if nothing else is asked for."""
        del shape, calls
        return 1

    def y_bytes(self, shape: Any, world: int) -> int:
        """Of the part of a y that a rank has; 0 where calls read nothing but their x."""
        del shape, world
        return 0

    def turns(self, shape: Any, world: int, calls: int, l2: str) -> int:
        """How many y the calls take turns with, so that they find in the L2 cache what `l2` says: see L2.

        Raises:
          ValueError: if there is no y.
        """
        if l2 == "usual":
            return self.usual_turns(shape, calls)
        if not (nbytes := self.y_bytes(shape, world)):
            raise ValueError(f"{self.name} has no weights and no cache that could be in the L2 cache or not")
        return 1 if l2 == "warm" else min(calls, 1 + math.ceil(COLD_BYTES / nbytes))

    @abc.abstractmethod
    def fastest_seconds(self, shape: Any, world: int) -> float:
        """About what the fastest call on an H200 takes."""

    @abc.abstractmethod
    def ceilings(self, mesh: Mesh, on_gpu: bool) -> dict[str, float]:
        """Bytes a second, by several plain ways. The best is what floors are computed from."""

    @abc.abstractmethod
    def floor_us(self, shape: Any, world: int, medians: Mapping[str, float], bandwidth: float) -> float | None:
        """Microseconds below which no schedule can get, None if what it takes was not measured.

        Args:
          medians: of the implementations in the same mode, in microseconds.
          bandwidth: the best of `ceilings`.
        """

    @abc.abstractmethod
    def parse_shape(self, text: str) -> Any:
        """The shape with these sizes, by its name where it is listed. Raises ValueError if the text names none."""

    def check_shape(self, shape: Any, world: int) -> None:
        """Raises ValueError if so many devices cannot share it out."""
        del shape, world

    def unavailable(self, peer: str) -> str:
        """Why one of `optional_peers` cannot run in this process; empty if it can."""
        del peer
        return ""

    def shapes_for(self, world: int) -> tuple[Any, ...]:
        """Of the listed shapes those that so many devices can share out."""
        del world
        return self.shapes

    def stepwise(self, implementation: Implementation) -> Implementation | None:
        """The same, of which each step is a program of its own, as it is timed in the modes of `STEPWISE`; or None."""
        del implementation
        return None

    def torch_job(self, shape: Any, world: int, l2: str) -> dict[str, Any]:
        """What the processes of PyTorch are to be told of a shape."""
        calls = self.calls_per_program(shape, world)
        turns = self.turns(shape, world, calls, l2)
        return {"op": self.name, "calls": calls, "count_rhs": turns, **vars(shape)}

    def case_at(self, shape: Any, team: Team) -> Case | None:
        """The call at a shape, as the tables know it; None if there is nothing to tune."""
        entry = register.OPERATIONS.get(self.name)
        return entry.case_at(shape, team, DTYPE) if entry else None

    def needed_for_floor(self) -> tuple[str, ...]:
        """Implementations that are timed in any case."""
        return ()

    def calls_per_program(self, shape: Any, world: int) -> int:
        """Calls in a chain: a power of two up to 64 that makes the program last several times its dispatch.

        The chain of one that is repeated may be short: XLA captures each of its custom calls anew for every program.
        """
        fastest = self.fastest_seconds(shape, world)
        seconds = 0.2e-3 if self.is_repeated(shape) else 2e-3
        calls = self.fewest_calls
        while calls < 64 and calls * fastest < seconds:
            calls *= 2
        return calls

    def is_repeated(self, shape: Any) -> bool:
        """Whether a program goes through its chain in a loop, as a decode step does."""
        del shape
        return False

    def rounds(self, shape: Any, world: int) -> int:
        """How often a program goes through its chain: for some 16 ms, if it is repeated.

        XLA captures the chain as a graph anew for every program, which few rounds would make a part of each call.
        """
        if not self.is_repeated(shape):
            return 1
        chain_seconds = self.calls_per_program(shape, world) * self.fastest_seconds(shape, world)
        return max(2, round(16e-3 / chain_seconds))

    def sizes_of(self, shape: Any) -> tuple[int, ...]:
        """Its sizes; `shape` may be a row of results."""
        return tuple(shape[size] if isinstance(shape, Mapping) else getattr(shape, size) for size in self.sizes)

    def table(self, rows: Sequence[Row]) -> list[str]:
        """The lines of a table in a document: times, and how the fused kernel stands to the others."""
        return by_peer(rows, sizes=self.sizes, heading=self.heading, digits=self.digits)

    def remarks(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """What else a run is to say of its rows, each in one line."""
        del rows
        return []


def config_name(config: Config) -> str:
    """The name of the fused implementation with this configuration."""
    return f"fused[{','.join(f'{key}={value}' for key, value in config.items())}]"


def by_flags(
    make: Callable[..., Implementation], name: str, call: Call, flag_sets: Sequence[str] = tuple(FLAG_SETS)
) -> tuple[Implementation, ...]:
    """One and the same call under several sets of XLA flags: "name/flag set"."""
    return tuple(make(name=f"{name}/{each}", call=call, options=FLAG_SETS[each]) for each in flag_sets)


def fused_call(entry: register.Operation) -> Callable[..., Any]:
    """The usual call of an operation of two operands: (x, y, *, config)."""

    def call(x: Any, y: Any, *, config: Config | None = None) -> Any:
        return entry.call(x, y, axis_name=AXIS, implementation="fused", config=config)

    return call


def fused(
    make: Callable[..., Implementation], call: Callable[..., Any], configs: Sequence[Config]
) -> tuple[Implementation, ...]:
    """The fused kernel as it chooses by shape, and with each of the configurations; `call` takes `config`.

    They come last in an operation, so that everything else has been compiled and checked should they break the device.
    """
    return (
        make(name="fused", call=call),
        *(make(name=config_name(config), call=partial(call, config=config), config=config) for config in configs),
    )


def family(name: str) -> str:
    """An implementation's name without its variant: that of the peer, where it is one."""
    return name.partition("/")[0].partition("[")[0]


def variant(name: str) -> str:
    """The set of flags, or whatever tells variants of a peer apart; empty if it has none."""
    return name.partition("/")[2]


def is_ours(name: str) -> bool:
    """Whether an implementation is made of jaxtaxfree's kernels."""
    return name.startswith(("fused", "local"))


def is_written_by_hand(implementation: Implementation) -> bool:
    """Whether an implementation is a kernel of which XLA times nothing while it compiles."""
    return not implementation.mixed and family(implementation.name) in ("fused", "local", "pallas", "tokamax", "iris")


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    # Auto rather than Explicit axes, because some implementations leave the partitioning to XLA.
    return jax.make_mesh((len(devices), 1), (AXIS, ONE), axis_types=(AxisType.Auto,) * 2, devices=devices)


def normal(size: tuple[int, ...], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Makes normally distributed arrays on the devices, since zeros would draw less power and run at higher clocks."""
    return jax.jit(lambda key: jax.random.normal(key, size, DTYPE), out_shardings=sharding)


def chain(call: Call, xs: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
    """All the outputs of the calls, made one after the other."""
    outs: list[Any] = []
    for i, x in enumerate(xs):
        if outs:
            x, outs[-1] = lax.optimization_barrier((x, outs[-1]))
        outs.append(call(x, ys[i % len(ys)]))
    return lax.optimization_barrier(outs)


def repeated(call: Call, xs: Sequence[Any], ys: Sequence[Any], rounds: int) -> list[Any]:
    """The outputs of the last of several chains, each of which begins when the one before has ended."""
    if rounds == 1:
        return chain(call, xs, ys)

    def again(_: Any, outs: list[Any]) -> list[Any]:
        # Nothing is the same in every round, as far as XLA can see: it prepares no cache ahead of the loop.
        tied_xs, tied_ys, _ = lax.optimization_barrier((xs, ys, outs))
        return chain(call, tied_xs, tied_ys)

    likes = jax.eval_shape(lambda: chain(call, xs, ys))
    outs = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), likes)
    return lax.fori_loop(0, rounds, again, outs)


def _sample(outs: Sequence[Any]) -> Any:
    """About 8 x 8 elements of this rank's part of each array of the outputs: [calls, ~8, ~8]."""

    def of(out: jax.Array) -> jax.Array:
        rows = out.reshape(-1, out.shape[-1])
        return rows[:: -(-rows.shape[0] // 8), :: -(-rows.shape[1] // 8)]

    return jax.tree.map(lambda *of_calls: jnp.stack(of_calls), *(jax.tree.map(of, out) for out in outs))


def make_program(
    implementation: Implementation, mesh: Mesh, rounds: int = 1
) -> Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Any]]:
    """(every x, every y) -> (samples of all outputs, the last output), of the last of so many rounds."""
    if implementation.flat:
        mesh = Mesh(mesh.devices.reshape(-1), (AXIS,), axis_types=(AxisType.Auto,))
    # One trace and one lowering serve all the calls of the chain, but no other program.
    call = jax.jit(lambda x, y: implementation.call(x, y))
    local = partial(jax.shard_map, mesh=mesh, check_vma=False)
    out_spec, samples = implementation.out_spec, P(None, None, AXIS)

    if implementation.auto:
        out_sharding = NamedSharding(mesh, out_spec)

        def constrained(x: Any, y: Any) -> Any:
            return lax.with_sharding_constraint(call(x, y), out_sharding)

        def program(xs: Sequence[Any], ys: Sequence[Any]) -> tuple[Any, Any]:
            outs = repeated(constrained, xs, ys, rounds)
            return local(_sample, in_specs=(out_spec,), out_specs=samples)(outs), outs[-1]

        return program

    def body(xs: Sequence[Any], ys: Sequence[Any]) -> tuple[Any, Any]:
        outs = repeated(call, xs, ys, rounds)
        return _sample(outs), outs[-1]

    x_spec, y_spec = implementation.in_specs

    def on_mesh(xs: Sequence[Any], ys: Sequence[Any]) -> tuple[Any, Any]:
        specs = ([x_spec] * len(xs), [y_spec] * len(ys))
        return local(body, in_specs=specs, out_specs=(samples, out_spec))(list(xs), list(ys))

    return on_mesh
