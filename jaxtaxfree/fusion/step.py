"""A part of a program that one operation replaces, while it is put together and when it runs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxtaxfree.fusion.graph import Atom, Node, Step, Value
from jaxtaxfree.fusion.products import Operands, Product, described, typed_as
from jaxtaxfree.fusion.report import Found


@dataclasses.dataclass(eq=False)
class Replacement(Step):
    """A step that runs an operation.

    Attributes:
      run: (values of `ins`, implementation) -> values of `outs`.
      found: for the report.
      collective: name of the primitive that it replaces.
    """

    run: Callable[[Sequence[Any], str | None], list[Any]]
    found: Found
    collective: str


@dataclasses.dataclass(eq=False)
class Branch:
    """One of the products of an operation.

    Attributes:
      dot: the product.
      operands: of it.
      product: how it is done.
      out: whose place the result takes.
      plain: nothing is between the product and that place, so that a bias is one of its columns.
      bias, activation: of its epilogue.
    """

    dot: Node
    operands: Operands
    product: Product
    out: Value
    plain: bool = True
    bias: Atom | None = None
    activation: str | None = None


# (x, weights, others, keywords) -> the results of all products, and the values that are kept.
Call = Callable[[Any, Sequence[Any], Mapping[str, Any], Mapping[str, Any]], list[Any]]


@dataclasses.dataclass(eq=False)
class Draft:
    """An operation in the place of some nodes.

    Attributes:
      branches: its products, all of them of the same rows.
      source: the rows, as the operation takes them.
      kept: the values of gathered rows that others use.
      nodes: that no longer run.
      collective: name of the primitive that it replaces.
      where: for the report.
      call: runs it.
      whole: no operand is sharded along an axis that `jax.shard_map` leaves over.
      gate, residual: of the epilogue.
    """

    branches: list[Branch]
    source: Atom
    kept: list[Value]
    nodes: list[Node]
    collective: str
    where: str
    call: Call
    whole: bool = True
    gate: Branch | None = None
    residual: Atom | None = None

    @property
    def operation(self) -> str:
        name = self.branches[0].product.plan.operation
        assert name is not None
        return name

    @property
    def axes(self) -> tuple[str, ...]:
        return self.branches[0].product.plan.axes

    def sealed(self) -> Replacement:
        """The step."""
        one = len(self.branches) == 1
        first = self.branches[0]
        biases = tuple(branch.bias for branch in self.branches)
        activations = tuple(branch.activation for branch in self.branches)
        others = {
            "gate": self.gate and self.gate.operands.weights,
            "bias": biases[0] if one else biases if any(x is not None for x in biases) else None,
            "residual": self.residual,
        }
        # Values are leaves, and None is nothing.
        ins, tree = jax.tree.flatten((self.source, [branch.operands.weights for branch in self.branches], others))
        outs = (*(branch.out for branch in self.branches), *self.kept)
        keywords = first.product.keywords(first.operands) | {"activation": activations[0] if one else activations}

        def run(given: Sequence[Any], implementation: str | None) -> list[Any]:
            x, weights, others = jax.tree.unflatten(tree, given)
            results = self.call(x, weights, others, keywords | {"implementation": implementation})
            return [typed_as(y, value.aval) for y, value in zip(results, outs, strict=True)]

        return Replacement(self.nodes, tuple(ins), outs, first.dot.index, run, self._found(), self.collective)

    def _found(self) -> Found:
        notes = ["returns the gathered rows"] if self.kept else []
        notes += [note for branch in self.branches for note in branch.product.notes(branch.operands)]
        if self.gate is not None:
            notes.append("with a gate")
        for i, branch in enumerate(self.branches):
            which = f" of the product {i}" if len(self.branches) > 1 else ""
            notes += [f"with a bias{which}"] if branch.bias is not None else []
            notes += [f"with {branch.activation}{which}"] if branch.activation else []
        if self.residual is not None:
            notes.append("with a residual")
        x, _ = self.branches[0].operands.types
        weights = [branch.operands.types[1] for branch in self.branches]
        operands = described(x, weights)
        return Found(self.operation, self.axes, operands, self.where, ", ".join(dict.fromkeys(notes)))
