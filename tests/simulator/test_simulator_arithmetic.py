"""The simulator's shortcuts give what Triton's interpreter gives, for all operators, types and forms of operands."""

import itertools
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from jaxtaxfree.simulator import arithmetic, functions, interpreter, scalars

INT32, INT64 = np.iinfo(np.int32), np.iinfo(np.int64)
POINTER = tl.pointer_type(tl.int32)
# Types, what NumPy keeps of each, and values of which operands are made.
TYPES: tuple[tuple[Any, Any, list[Any]], ...] = (
    (tl.int1, np.bool_, [True, False]),
    (tl.int32, np.int32, [0, 1, -1, 3, -7, 31, 32, INT32.max, INT32.min, INT32.max - 1]),
    (tl.int64, np.int64, [0, 1, -1, 5, -9, 63, 64, INT64.max, INT64.min, INT32.max + 1]),
    (tl.uint32, np.uint32, [0, 1, 2, 2**31, 2**32 - 1]),
    (tl.float32, np.float32, [0.0, -0.0, 1.5, -2.25, 1e30, 1e-40, np.inf, -np.inf, np.nan]),
    (tl.bfloat16, jnp.bfloat16, [0.0, 1.5, -2.25, np.inf]),
    (POINTER, np.uint64, [0x7F0000001000, 8, 2**63 + 16, 2**64 - 4]),
)
SHAPES = ((), (4,), (2, 1), (1, 4), (1,))
CONSTANTS = (0, 1, -1, 3, -5, 32, 63, 2**31 - 1, -(2**31), 2**31, 2**40, -(2**63), 2**63, True, False, 0.0, -2.5, 1e39)
CONSTANTS += (float("nan"), float("-inf"), 1e-42, 2)

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "and_", "or_", "xor")},
    **{name: getattr(operator, name) for name in ("lshift", "rshift", "lt", "le", "gt", "ge", "eq", "ne", "truediv")},
    "minimum": lambda x, y: tl.minimum(x, y),
    "maximum": lambda x, y: tl.maximum(x, y),
    "logical_and": lambda x, y: x.logical_and(y),
    "logical_or": lambda x, y: x.logical_or(y),
}
UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": lambda x: -x,
    "invert": lambda x: ~x,
    "row": lambda x: x[None, :],
    "column": lambda x: x[:, None],
    "too many": lambda x: x[:, :, None],
    "reshape": lambda x: x.reshape(2, 2),
    "reshape list": lambda x: tl.reshape(x, [4]),
    "permute": lambda x: tl.permute(x, (1, 0)),
    "broadcast": lambda x: tl.broadcast_to(x, (2, 4)),
    "bool": lambda x: bool(x),
    "sum": lambda x: tl.sum(x, 0),
    "max": lambda x: tl.max(x, 0),
    "bits": lambda x: x.to(tl.int32, bitcast=True),
    "floats of bits": lambda x: x.to(tl.float32, bitcast=True),
    "full": lambda x: tl.full((2, 2), x, tl.float32),
    "full of integers": lambda x: tl.full([4], x, tl.int32),
    "assigned": lambda x: interpreter.triton_interpreter.interpreter_semantic.to_tensor(x, False),
    **{f"to {type_}": lambda x, type_=type_: x.to(type_) for type_, *_ in TYPES},
    "to i8": lambda x: x.to(tl.int8),
    "to f16": lambda x: x.to(tl.float16),
    "to bytes": lambda x: x.to(tl.pointer_type(tl.int8)),
}


class _NoMachine:
    """Without memory."""

    grid, program_index = (4, 2, 1), (3, 1, 0)

    def product(self) -> None:
        """Nobody counts."""


def tensors() -> Iterator[Callable[[], Any]]:
    """Makers of tensors of each type and shape, of random values."""
    rng = np.random.default_rng(0)
    for (type_, kept, values), shape in itertools.product(TYPES, SHAPES):
        data = np.array([values[i] for i in rng.integers(len(values), size=shape or (1,)).flat], kept)
        data = data.reshape(shape or (1,))
        if type_ is tl.bfloat16:
            data = data.view(np.uint16)

        def make(data: np.ndarray = data, type_: Any = type_, shape: tuple[int, ...] = shape) -> Any:
            return tl.tensor(TensorHandle(data.copy(), type_), tl.block_type(type_, list(shape)) if shape else type_)

        yield make


def numbers(type_: Any) -> Iterator[Callable[[], Any]]:
    """Makers of scalars of each value of a type."""
    [(kept, values)] = [(kept, values) for known, kept, values in TYPES if known is type_]
    for value in values:
        yield lambda value=value: tl.tensor(TensorHandle(np.array([value], kept), type_), type_)


def constants() -> Iterator[Callable[[], Any]]:
    for value in CONSTANTS:
        yield lambda value=value: value
        yield lambda value=value: tl.constexpr(value)


def outcome(compute: Callable, *makers: Callable[[], Any]) -> Any:
    """The type, the shape and the bits of a result, or that there was an error."""
    try:
        result = compute(*(scalars.of(make()) for make in makers))
    except Exception as error:
        return f"raises {type(error).__name__}"
    if not isinstance(result, tl.tensor):
        return type(result), str(result)
    data = result.handle.data
    # NaN are as good as each other.
    data = np.where(np.isnan(data), np.nan, data).astype(data.dtype) if data.dtype.kind == "f" else data
    types = str(result.type), str(result.dtype), str(result.handle.dtype.scalar)
    sizes = result.numel.value, [size.value for size in result.shape]
    return types, sizes, data.dtype, data.shape, data.tobytes()


def outcomes(calls: list[tuple], shortcuts: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not shortcuts:
            patch.setattr(arithmetic, "bind", lambda scope: None)
            patch.setattr(functions, "_shortcuts", {})
            patch.setattr(scalars, "of", lambda tensor: tensor)
        with interpreter.interpreting(interpreter.Builder(_NoMachine())):
            return [outcome(*call) for call in calls]


def check(calls: list[tuple], monkeypatch: pytest.MonkeyPatch, at_least: int) -> None:
    """Compares the outcomes of calls, of which so many have to be results and not errors."""
    quick, slow = (outcomes(calls, shortcuts, monkeypatch) for shortcuts in (True, False))
    assert sum(isinstance(each, tuple) for each in slow) >= at_least
    for call, found, expected in zip(calls, quick, slow):
        assert found == expected, ([make() for make in call[1:]], found, expected)


@pytest.mark.parametrize("name", BINARY)
def test_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, of_type, fixed = BINARY[name], list(tensors()), list(constants())
    pairs = [*itertools.product(of_type, of_type), *itertools.product(of_type, fixed)]
    if "logical" not in name:
        pairs += itertools.product(fixed, of_type)
    for mine, theirs in itertools.product((tl.int1, tl.int32, tl.int64, POINTER), repeat=2):
        pairs += itertools.product(numbers(mine), numbers(theirs))
    check([(compute, x, y) for x, y in pairs], monkeypatch, 150)


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    makers = [*tensors(), *(make for type_, *_ in TYPES if type_ is not tl.bfloat16 for make in numbers(type_))]
    if name in ("full", "full of integers", "assigned"):
        makers += [*constants()]
    check([(UNARY[name], make) for make in makers], monkeypatch, 1)


# Of all calls each third has each pair of operands.
@pytest.mark.parametrize(("every", "results"), [(5, 600), pytest.param(1, 3000, marks=pytest.mark.soak)])
def test_where(monkeypatch: pytest.MonkeyPatch, every: int, results: int) -> None:
    of_type, fixed = list(tensors()), [lambda value=value: value for value in CONSTANTS]
    conditions = [make for make in of_type if make().dtype is tl.int1] + [lambda: True, lambda: False]
    values = of_type + fixed
    calls = [(lambda c, x, y: tl.where(c, x, y), *each) for each in itertools.product(conditions, values, values)]
    check(calls[::every], monkeypatch, results)


def test_places_and_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = [(lambda axis=axis: tl.program_id(axis),) for axis in (0, 1, 2, 3, -1)]
    calls += [(lambda axis=axis: tl.num_programs(axis),) for axis in (0, 1, 2, 3)]
    calls += [(lambda ends=ends: tl.arange(*ends),) for ends in ((0, 8), (3, 7), (0, 6), (4, 4), (0, tl.constexpr(4)))]
    check(calls, monkeypatch, 8)


def test_products(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)

    def block(*args: Any) -> Callable[[], Any]:
        *sizes, type_ = args
        data = rng.integers(-3, 4, sizes).astype(np.float32)
        data = data.astype(jnp.bfloat16).view(np.uint16) if type_ is tl.bfloat16 else data
        return lambda: tl.tensor(TensorHandle(data, type_), tl.block_type(type_, sizes))

    calls = []
    for type_, other in itertools.product((tl.float32, tl.bfloat16), repeat=2):
        x, y, acc = block(4, 8, type_), block(8, 2, other), block(4, 2, tl.float32)
        calls += [(lambda x, y, acc: tl.dot(x, y, acc), x, y, acc), (lambda x, y: tl.dot(x, y), x, y)]
        calls += [(lambda x, y, acc: tl.dot(x, y, acc=acc, input_precision="ieee"), x, y, acc)]
        calls += [(lambda x, y, acc: tl.dot(x, y, acc), x, y, block(2, 4, tl.float32))]
        calls += [(lambda x, y, acc: tl.dot(x, y, acc), y, y, acc)]
        batch = block(2, 4, 8, type_), block(2, 8, 4, other), block(2, 4, 4, tl.float32)
        calls += [(lambda x, y, acc: tl.dot(x, y, acc), *batch)]
    check(calls, monkeypatch, 6)
