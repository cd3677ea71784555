"""Iris's device functions, called as its unit tests do: for each of their dtypes, blocks, semantics and scopes."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from jaxtaxfree.simulator import DataRaceError
from jaxtaxfree.simulator.iris import BASES, CONTEXT, RANK, WORLD, Buffer, Launch, symmetric
from tests.helpers import iris_kernels

WORLD_SIZE = 4
BLOCKS = (1, 8, 16, 32)
DTYPES = (np.int8, np.float16, jnp.bfloat16, np.float32)
INTEGERS = (np.int32, np.int64)
SEMANTICS, SCOPES = ("acquire", "release", "acq_rel"), ("cta", "gpu", "sys")

iris: Any = None  # the module, for the kernels: see `cases`


@triton.jit
def load(x, out, rank, world, bases, B: tl.constexpr):
    at = tl.arange(0, B)
    tl.store(out + at, iris.load(x + at, rank, (rank + world // 2) % world, bases))


@triton.jit
def store(x, out, rank, world, bases, B: tl.constexpr):
    at = tl.arange(0, B)
    value = tl.load(x + at)
    for to in range(world):
        iris.store(out + at, value, rank, to, bases)


@triton.jit
def get(x, out, rank, world, bases, B: tl.constexpr):
    at = tl.arange(0, B)
    for source in range(world):
        iris.get(x + at, out + source * B + at, rank, source, bases)


@triton.jit
def put(x, out, rank, world, bases, B: tl.constexpr):
    at = tl.arange(0, B)
    for to in range(world):
        iris.put(x + at, out + at, rank, to, bases)


@triton.jit
def copy_get(x, out, rank, world, bases, B: tl.constexpr):
    at = tl.arange(0, B)
    for source in range(world):
        iris.copy(x + at, out + source * B + at, source, rank, rank, bases)


@triton.jit
def copy_put(x, out, rank, world, bases, B: tl.constexpr):
    at = tl.arange(0, B)
    for to in range(world):
        iris.copy(x + at, out + rank * B + at, rank, to, rank, bases)


@triton.jit
def copy_local(x, out, rank, world, bases, B: tl.constexpr):
    at = tl.arange(0, B)
    for i in range(world):
        iris.copy(x + at, out + i * B + at, rank, rank, rank, bases)


@triton.jit
def context_load(x, out, rank, world, context, B: tl.constexpr):
    at = tl.arange(0, B)
    ctx = iris.Context.initialize(context, rank, world)
    tl.store(out + at, ctx.load(x + at, (rank + world // 2) % world))


@triton.jit
def context_store(x, out, rank, world, context, B: tl.constexpr):
    at = tl.arange(0, B)
    ctx = iris.Context.initialize(context, rank, world)
    ctx.store(out + at, tl.load(x + at), (rank + world // 2) % world)


@triton.jit
def context_get(x, out, rank, world, context, B: tl.constexpr):
    at = tl.arange(0, B)
    ctx = iris.Context.initialize(context, rank, world)
    ctx.get(x + at, out + at, (rank + world // 2) % world)


@triton.jit
def context_put(x, out, rank, world, context, B: tl.constexpr):
    at = tl.arange(0, B)
    ctx = iris.Context.initialize(context, rank, world)
    ctx.put(x + at, out + at, (rank + world // 2) % world)


@triton.jit
def atomic(out, rank, world, bases, OP: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr, B: tl.constexpr):
    at = out + tl.arange(0, B)
    for to in range(world):
        if OP == "add":
            iris.atomic_add(at, 1, rank, to, bases, sem=SEM, scope=SCOPE)
        elif OP == "xor":
            iris.atomic_xor(at, 1, rank, to, bases, sem=SEM, scope=SCOPE)
        elif OP == "or":
            iris.atomic_or(at, 1 << rank, rank, to, bases, sem=SEM, scope=SCOPE)
        elif OP == "and":
            iris.atomic_and(at, -1 - (1 << rank), rank, to, bases, sem=SEM, scope=SCOPE)
        elif OP == "min":
            iris.atomic_min(at, rank + 1, rank, to, bases, sem=SEM, scope=SCOPE)
        elif OP == "max":
            iris.atomic_max(at, rank + 1, rank, to, bases, sem=SEM, scope=SCOPE)


@triton.jit
def exchange(out, rank, world, bases, OP: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr):
    """One word on each rank: the ranks take turns by compare-and-swap, or all leave the number of ranks there."""
    dtype: tl.constexpr = out.dtype.element_ty
    for to in range(world):
        if OP == "cas":
            turn, after = tl.cast(rank, dtype), tl.cast(rank + 1, dtype)
            while iris.atomic_cas(out, turn, after, rank, to, bases, sem=SEM, scope=SCOPE) != turn:
                pass
        else:
            iris.atomic_xchg(out, tl.cast(world, dtype), rank, to, bases, sem=SEM, scope=SCOPE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call of one device function.

    Attributes:
      function, name: which, and its parameters.
      launch, result: to run, and to compare.
      expected: of a rank.
      error: what is found instead, because the call breaks a rule.
      says: what the finding says.
    """

    function: str
    name: str
    launch: Launch
    result: Buffer
    expected: Callable[[int], Any]
    error: type[Exception] | None = None
    says: str = ""


def _moves(dtype: Any, n: int) -> Iterator[Case]:
    world = WORLD_SIZE
    ranks = [np.full(n, rank, dtype) for rank in range(world)]
    ones = [np.ones(n, dtype)] * world

    def far(rank: int) -> np.ndarray:
        return np.full(n, (rank + world // 2) % world)

    def rows(rank: int) -> np.ndarray:
        return np.repeat(np.arange(world), n)

    def own(rank: int) -> np.ndarray:
        return np.full(world * n, rank)

    everybodys_place = {"error": DataRaceError, "says": "nothing orders the one after the other"}
    for kernel, values, size, expected, found in (
        (load, ranks, n, far, {}),
        (store, ones, n, lambda rank: np.ones(n), everybodys_place),
        (get, ranks, world * n, rows, {}),
        (put, ones, n, lambda rank: np.ones(n), everybodys_place),
        (copy_get, ranks, world * n, rows, {}),
        (copy_put, ranks, world * n, rows, {}),
        (copy_local, ranks, world * n, own, {}),
        (context_load, ranks, n, far, {}),
        (context_store, ranks, n, far, {}),
        (context_get, ranks, n, far, {}),
        (context_put, ranks, n, far, {}),
    ):
        x, out = symmetric((n,), dtype, values), symmetric((size,), dtype)
        name = kernel.fn.__name__
        table = {"context": CONTEXT} if name.startswith("context") else {"bases": BASES}
        launch = Launch(kernel, 1, {"x": x, "out": out, "rank": RANK, "world": WORLD, "B": n, **table})
        dtype_name = np.dtype(dtype).name
        yield Case(function=name, name=f"{dtype_name} {n}", launch=launch, result=out, expected=expected, **found)


def _atomics() -> Iterator[Case]:
    world = WORLD_SIZE
    numbers = (*INTEGERS, np.float16, jnp.bfloat16, np.float32)
    operations = {
        "add": (numbers, lambda dtype: 0, world),
        "xor": (INTEGERS, lambda dtype: 0, world % 2),
        "or": (INTEGERS, lambda dtype: 0, (1 << world) - 1),
        "and": (INTEGERS, lambda dtype: -1, -(1 << world)),
        "min": (INTEGERS, lambda dtype: np.iinfo(dtype).max, 1),
        "max": (INTEGERS, lambda dtype: np.iinfo(dtype).min, world),
        "cas": ((np.int16, *INTEGERS), lambda dtype: 0, world),
        "xchg": ((*INTEGERS, np.float32), lambda dtype: 0, world),
    }
    for op, (dtypes, initial, expected) in operations.items():
        blocks = (None,) if op in ("cas", "xchg") else BLOCKS
        for dtype, sem, scope, n in itertools.product(dtypes, SEMANTICS, SCOPES, blocks):
            out = symmetric((n or 1,), dtype, initial(dtype))
            arguments = {"out": out, "rank": RANK, "world": WORLD, "bases": BASES, "OP": op, "SEM": sem, "SCOPE": scope}
            launch = Launch(atomic, 1, {**arguments, "B": n}) if n else Launch(exchange, 1, arguments)
            found: Any = {} if scope == "sys" else {"error": DataRaceError, "says": "both must be at scope sys"}
            yield Case(
                function=f"atomic_{op}",
                name=f"{np.dtype(dtype).name} {sem} {scope} {n or 1}",
                launch=launch,
                result=out,
                expected=lambda rank, e=expected, n=n: np.full(n or 1, e),
                **found,
            )


def cases() -> list[Case]:
    """All of them. Skips the test if Iris is not there."""
    global iris
    iris = iris_kernels.module()
    moves = [case for dtype, n in itertools.product(DTYPES, BLOCKS) for case in _moves(dtype, n)]
    return moves + list(_atomics())


FUNCTIONS = [
    *(kernel.fn.__name__ for kernel in (load, store, get, put, copy_get, copy_put, copy_local)),
    *(kernel.fn.__name__ for kernel in (context_load, context_store, context_get, context_put)),
    *(f"atomic_{op}" for op in ("add", "xor", "or", "and", "min", "max", "cas", "xchg")),
]
