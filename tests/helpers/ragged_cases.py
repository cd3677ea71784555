"""Rows for `ragged_all_to_all`: who sends how many to whom, and what must come of it."""

import dataclasses
import functools
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Routing:
    """How many rows each rank sends to each other one.

    Attributes:
      sizes: [world, world], of the sender and the receiver.
      spare: rows of operand and output that belong to no transfer, the first of them in front.
    """

    sizes: np.ndarray
    spare: int = 3

    @classmethod
    def drawn(cls, world: int, seed: int, most: int = 7, spare: int = 3) -> "Routing":
        """Any sizes from 0 up to `most`; rank 0 sends nothing to the last one."""
        sizes = np.random.default_rng(seed).integers(0, most + 1, (world, world))
        sizes[0, -1] = 0
        return cls(sizes, spare)

    @property
    def world(self) -> int:
        return len(self.sizes)

    @property
    def front(self) -> int:
        return min(1, self.spare)

    @property
    def rows_in(self) -> int:
        return int(self.sizes.sum(1).max()) + self.spare

    @property
    def rows_out(self) -> int:
        return int(self.sizes.sum(0).max()) + self.spare

    @functools.cached_property
    def tables(self) -> list[np.ndarray]:
        """input_offsets, send_sizes, output_offsets and recv_sizes, of each rank in a row: [world, world]."""
        first = self.front + np.cumsum(self.sizes, 1) - self.sizes
        to = self.front + np.cumsum(self.sizes, 0) - self.sizes
        return [x.astype(np.int32) for x in (first, self.sizes, to, self.sizes.T)]

    def transfers(self) -> list[tuple[int, int, slice, slice]]:
        """(sender, receiver, rows of the sender's operand, rows of the receiver's result)"""
        first, sizes, to, _ = self.tables
        return [
            (a, b, slice(first[a, b], first[a, b] + sizes[a, b]), slice(to[a, b], to[a, b] + sizes[a, b]))
            for a in range(self.world)
            for b in range(self.world)
        ]

    def expected(self, operand: np.ndarray, output: np.ndarray) -> np.ndarray:
        """The results of operands [world, rows_in, ...] and outputs [world, rows_out, ...]."""
        out = output.copy()
        for sender, receiver, source, dest in self.transfers():
            out[receiver, dest] = operand[sender, source]
        return out

    def gradients(self, ct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What of the results' gradients is the operands', and the outputs'."""
        of_operand = np.zeros((self.world, self.rows_in, *ct.shape[2:]), ct.dtype)
        of_output = ct.copy()
        for sender, receiver, source, dest in self.transfers():
            of_operand[sender, source] = ct[receiver, dest]
            of_output[receiver, dest] = 0
        return of_operand, of_output

    def arrays(self, dtype: Any, *row: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Operands and outputs of all ranks, of whole numbers."""
        draw = np.random.default_rng(seed).integers
        operand = draw(0, 12, (self.world, self.rows_in, *row))
        output = draw(20, 29, (self.world, self.rows_out, *row))
        if np.dtype(dtype).name == "bool":
            operand, output = operand % 2, output % 2
        return operand.astype(dtype), output.astype(dtype)


def reports(routing: Routing, tables: list[np.ndarray], rank: str = "rank {}", call: int | str = 1) -> list[str]:
    """What the ranks report of such tables in one call, which only one rank has been given wrong.

    Args:
      rank: how one is named.
      call: its number.
    """
    first, sizes, to, received = (x.tolist() for x in tables)
    found = []
    for sender, receiver in np.ndindex(routing.world, routing.world):
        size = sizes[sender][receiver]
        numbers = (
            ("send_sizes", size, min(routing.rows_in, routing.rows_out)),
            ("input_offsets", first[sender][receiver], routing.rows_in - size),
            ("output_offsets", to[sender][receiver], routing.rows_out - size),
        )
        wrong = [
            f"{rank.format(sender)} was given {operand}[{receiver}] = {value} in call {call}, where 0 to {most} is "
            "allowed."
            for operand, value, most in numbers
            if not 0 <= value <= most
        ]
        found += wrong[:1]
        if wrong and sender != receiver:
            found.append(
                f"{rank.format(receiver)} has no result in call {call}, because the sizes or offsets that rank "
                f"{sender} was given for it do not fit"
            )
        awaited = received[receiver][sender]
        if not wrong and size != awaited:
            found.append(
                f"{rank.format(receiver)} was given recv_sizes[{sender}] = {awaited} in call {call}, where it must be "
                f"{size}."
            )
    return found


def garbage(world: int) -> tuple[tuple[str, Routing, list[np.ndarray], list[int]], ...]:
    """(what is wrong, the routing without it, tables, the receivers that can have no result)"""
    routing = Routing(np.full((world, world), 3), spare=2)
    first, sizes, to, received = range(4)
    last = world - 1
    most = np.iinfo(np.int32)
    wrong = (
        ("negative size", sizes, -1),
        ("huge size", sizes, most.max),
        ("one row more than is awaited", sizes, 4),
        ("offset in front of the operand", first, -1),
        ("offset behind the operand", first, routing.rows_in - 2),
        ("huge offset", first, most.max),
        ("lowest offset", first, most.min),
        ("offset in front of the result", to, -1),
        ("offset behind the result", to, routing.rows_out - 2),
        ("huge offset in the result", to, most.max),
    )
    found = []
    for sender, receiver in ((last, 0), (last, last)):
        for name, table, value in wrong:
            tables = [x.copy() for x in routing.tables]
            tables[table][sender, receiver] = value
            found.append((f"{name}, of {sender} to {receiver}", routing, tables, [receiver]))
    tables = [x.copy() for x in routing.tables]
    tables[received][0, last] = 2
    return (*found, ("fewer rows are awaited than come", routing, tables, [0]))
