"""What the kernels of a compiled program hand each other through device memory, from its optimized HLO."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# What runs no kernel.
_FREE = {"add-dependency", "after-all", "constant", "domain", "partition-id", "replica-id"}
# New names for what is there already.
_SAME = {"all-reduce-done", "async-update", "bitcast", "opt-barrier"}
_SLICES = {"dynamic-slice", "gather", "slice"}
_COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that kernels of one device write for later kernels of the same step, and that those read back.

    Attributes:
      compute: by kernels that are no collectives.
      collective: by collectives.
      notes: what was not counted, in sentences.
    """

    compute: int
    collective: int
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        return self.compute + self.collective


def traffic(text: str) -> Traffic:
    """Counts what the kernels of a program exchange through memory.

    Counted is what one kernel writes and another one reads, as often as it is read: not the program's operands, and of
    its results what is read again. The bodies of loops count as often as they run, and where a kernel reads or writes a
    slice of an array, the slice. It is an upper bound, because caches may hold what is read back soon.

    Args:
      text: of the optimized program, such as `jax.jit(f).lower(x).compile().as_text()`.
    """
    return _Program(text).traffic()


def groups(text: str) -> tuple[tuple[int, ...], ...] | None:
    """The groups of positions that all collectives of a program run in; None if they differ or are not known."""
    attribute = r"\breplica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[[^\]]*\] \{[^}]*\}|)"
    found = set(re.findall(attribute, text))
    if len(found) != 1:
        return None
    (written,) = found
    if written.startswith("{{"):
        return tuple(tuple(_integers(group)) for group in re.findall(r"\{([\d,]+)\}", written))
    if match := re.fullmatch(r"\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", written):
        return _iota_groups(int(match[1]), _integers(match[2]), _integers(match[3] or ""))
    if match := re.fullmatch(r"mesh\[((?:'\w+'=\d+,? ?)+)\] \{((?:'\w+',? ?)+)\}", written):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        along = re.findall(r"'(\w+)'", match[2])
        axes = [*(axis for axis in sizes if axis not in along), *along]
        size = math.prod(sizes[axis] for axis in along)
        return _iota_groups(size, [*sizes.values()], [[*sizes].index(axis) for axis in axes])
    return None


def _iota_groups(size: int, dims: Sequence[int], permutation: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of consecutive elements of 0, 1, 2, ... after they were given a shape and transposed."""
    order = permutation or range(len(dims))
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    indices = itertools.product(*(range(dims[axis]) for axis in order))
    flat = [sum(i * strides[axis] for i, axis in zip(index, order)) for index in indices]
    return tuple(itertools.batched(flat, size))


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


# Text


@dataclass(frozen=True, kw_only=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def number(self) -> int:
        """Of a parameter its number, of a get-tuple-element its index."""
        found = re.search(r"^\d+|\bindex=(\d+)", self.attributes)
        assert found, self
        return int(found[1] or found[0])

    def called(self, role: str) -> str:
        """The name of the computation that it calls in this role."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        assert found, self
        return found[1]


@dataclass(frozen=True)
class _Computation:
    instructions: dict[str, _Instruction] = field(default_factory=dict)

    @property
    def root(self) -> _Instruction:
        return next(instruction for instruction in self.instructions.values() if instruction.is_root)

    def users(self, name: str) -> Iterator[_Instruction]:
        return (instruction for instruction in self.instructions.values() if name in instruction.operands)


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """All computations by name, and the name of the entry."""
    computations: dict[str, _Computation] = {}
    current, entry = None, ""
    for line in text.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            current = computations[header[2]] = _Computation()
            entry = header[2] if header[1] else entry
        elif current is not None and (found := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line)):
            instruction = _instruction(found[2], re.sub(r"/\*.*?\*/", "", found[3]), is_root=bool(found[1]))
            current.instructions[instruction.name] = instruction
    return computations, entry


def _instruction(name: str, text: str, is_root: bool) -> _Instruction:
    shape_end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:shape_end], text[shape_end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    inside = rest[opening + 1 : closing - 1]
    operands = () if rest[:opening] in ("constant", "parameter") else _split(inside)
    return _Instruction(
        name=name,
        shape=shape,
        opcode=rest[:opening],
        # Some versions write the shape of an operand before its name.
        operands=tuple(operand.split()[-1].removeprefix("%") for operand in operands),
        attributes=f"{inside if rest[:opening] == 'parameter' else ''}{rest[closing:]}",
        is_root=is_root,
    )


def _closing(text: str, opening: int) -> int:
    """The index behind the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"unbalanced parentheses in HLO: {text[:80]}")


def _split(text: str) -> list[str]:
    """What the commas outside of brackets separate."""
    parts, depth, begin = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
    return [part for part in (*parts, text[begin:]) if part.strip()]


def _array_bytes(shape: str) -> int:
    """Bytes of an array, such as bf16[16,8192]{1,0}."""
    found = re.match(r"([a-z]+)(\d*)\w*\[([\d,]*)\]", shape.strip())
    if not found or found[1] in ("token", "opaque"):
        return 0
    bits = 8 if found[1] == "pred" else int(found[2] or 0)
    return math.prod(_integers(found[3])) * bits // 8


# Values: what an instruction returns is a buffer, or a list of such values.


@dataclass(eq=False)
class _Buffer:
    """An array in memory.

    Attributes:
      size: bytes that kernels of this program wrote there; 0 for what was there before.
      reads, writes: bytes, by "compute" and "collective" kernels.
    """

    size: int
    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)


type _Value = _Buffer | list[_Value]


def _leaves(value: _Value) -> list[_Buffer]:
    return [value] if isinstance(value, _Buffer) else [leaf for part in value for leaf in _leaves(part)]


def _build(shape: str, make: Callable[[int], _Buffer]) -> _Value:
    """A value of this shape, with buffers made from the bytes of its arrays."""
    shape = shape.strip()
    if not shape.startswith("("):
        return make(_array_bytes(shape))
    return [_build(part, make) for part in _split(shape[1 : _closing(shape, 0) - 1])]


def _nothing(_: int) -> _Buffer:
    return _Buffer(0)


def _part(value: _Value, index: int) -> _Value:
    return value if isinstance(value, _Buffer) else value[index]


class _Program:
    def __init__(self, text: str):
        self.computations, self.entry = _parse(text)
        if not self.entry:
            raise ValueError("The text is no HLO module: it has no ENTRY computation.")
        self.buffers: list[_Buffer] = []
        self.notes: dict[str, None] = {}

    def traffic(self) -> Traffic:
        results = set(map(id, _leaves(self.run(self.entry, [], 1))))
        total: Counter[str] = Counter()
        for buffer in self.buffers:
            if buffer.reads.total():
                total += buffer.reads
                # A result must be written; in a loop, once of all the times.
                for kind, written in buffer.writes.items():
                    total[kind] += written - (buffer.size if id(buffer) in results else 0)
        return Traffic(compute=total["compute"], collective=total["collective"], notes=tuple(self.notes))

    def run(self, name: str, arguments: Sequence[_Value], times: int) -> _Value:
        """What a computation returns, after its kernels have been counted `times` times."""
        computation = self.computations[name]
        values: dict[str, _Value] = {}
        for instruction in computation.instructions.values():
            values[instruction.name] = self.value(instruction, values, arguments, times)
        return values[computation.root.name]

    def value(
        self, instruction: _Instruction, values: Mapping[str, _Value], arguments: Sequence[_Value], times: int
    ) -> _Value:
        operands = [values[name] for name in instruction.operands]
        match instruction.opcode:
            case "parameter":
                return arguments[instruction.number] if arguments else _build(instruction.shape, _nothing)
            case "tuple":
                return operands
            case "get-tuple-element":
                return _part(operands[0], instruction.number)
            case opcode if opcode in _SAME:
                return operands[0]
            case "copy-done" | "recv-done":
                return _part(operands[0], 0)
            case opcode if opcode.endswith("-done"):
                return _part(operands[0], 1)
            case "call":
                return self.run(instruction.called("to_apply"), operands, times)
            case "async-start":
                return [operands, self.run(instruction.called("calls"), operands, times)]
            case "while":
                return self.loop(instruction, operands[0], times)
            case "conditional":
                self.notes[f"What the branches of {instruction.name} exchange is not known."] = None
                return _build(instruction.shape, _nothing)
            case opcode if opcode in _FREE or '"AllocateBuffer"' in instruction.attributes:
                return _build(instruction.shape, _nothing)
        return self.kernel(instruction, operands, times)

    def kernel(self, instruction: _Instruction, operands: list[_Value], times: int) -> _Value:
        opcode = instruction.opcode.removesuffix("-start")
        kind = "collective" if opcode in _COLLECTIVES else "compute"
        fused = self.computations[instruction.called("calls")] if opcode == "fusion" else _Computation()
        slices = _slices_read(fused)
        read = {
            id(buffer): (buffer, slices.get(n)) for n, operand in enumerate(operands) for buffer in _leaves(operand)
        }
        for buffer, size in read.values():
            buffer.reads[kind] += times * (buffer.size if size is None else min(buffer.size, size))

        def written(size: int) -> _Buffer:
            self.buffers.append(_Buffer(size, writes=Counter({kind: times * size})))
            return self.buffers[-1]

        if instruction.opcode == "copy-start":
            return [_build(_split(instruction.shape[1:-1])[0], written), operands]
        if instruction.opcode.endswith("-start") and opcode != "all-reduce":
            return [operands, _build(_split(instruction.shape[1:-1])[1], written)]
        if opcode == "fusion" and (update := _update_in_place(fused)):
            array, size = update
            buffer = written(size)
            # The rest of the array stays what it was, and only what this program wrote can be read back.
            buffer.size = min(_array_bytes(instruction.shape), size + _leaves(operands[array])[0].size)
            return buffer
        return _build(instruction.shape, written)

    def loop(self, instruction: _Instruction, initial: _Value, times: int) -> _Value:
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
        if not trips:
            self.notes[f"How often {instruction.name} runs is not known: its body was counted once."] = None
        body, times = instruction.called("body"), times * (int(trips[1]) if trips else 1)

        # Once without counting, to learn which parts of the state an iteration writes for the next one.
        before, counted = _leaves(initial), len(self.buffers)
        after = _leaves(self.run(body, [_like(initial, [_Buffer(old.size) for old in before])], 0))
        del self.buffers[counted:]
        state = [_Buffer(max(old.size, new.size)) for old, new in zip(before, after)]
        after = _leaves(self.run(body, [_like(initial, state)], times))

        # What the body only hands on is still what it was before the loop.
        outside = {id(inner): old for inner, old in zip(state, before)}
        after = [outside.get(id(new), new) for new in after]
        for inner, new in zip(state, after):
            new.reads += inner.reads
        return _like(initial, after)


def _like(value: _Value, buffers: Sequence[_Buffer]) -> _Value:
    """A value of the same structure, of other buffers."""
    rest = iter(buffers)

    def build(value: _Value) -> _Value:
        return next(rest) if isinstance(value, _Buffer) else [build(part) for part in value]

    return build(value)


def _behind_bitcasts(computation: _Computation, instruction: _Instruction) -> _Instruction:
    while instruction.opcode == "bitcast":
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _slices_read(fused: _Computation) -> dict[int, int]:
    """How many bytes a fusion reads of those parameters of which it reads slices only."""
    sizes = {}
    for parameter in fused.instructions.values():
        if parameter.opcode == "parameter" and (size := _sliced(fused, parameter.name)) is not None:
            sizes[parameter.number] = size
    return sizes


def _sliced(fused: _Computation, name: str) -> int | None:
    """How many bytes of an array are read where all that reads it takes slices of it."""
    total = 0
    for user in fused.users(name):
        if user.opcode == "bitcast" and (size := _sliced(fused, user.name)) is not None:
            total += size
        elif user.opcode in _SLICES and user.operands[0] == name:
            total += _array_bytes(user.shape)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
            return None
    return total


def _update_in_place(fused: _Computation) -> tuple[int, int] | None:
    """Of a fusion that writes a slice of an array: which parameter is the array, and bytes of the slice."""
    root = _behind_bitcasts(fused, fused.root)
    if root.opcode != "dynamic-update-slice":
        return None
    array = _behind_bitcasts(fused, fused.instructions[root.operands[0]])
    if array.opcode != "parameter":
        return None
    return array.number, _array_bytes(fused.instructions[root.operands[1]].shape)
