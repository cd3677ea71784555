"""How a `dot_general` is a product that the operations take: rows [..., K] by weights [K, N]."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lax.lax import _convert_element_type

from jaxtaxfree import teams
from jaxtaxfree.fusion.graph import Atom, Node, untransposed
from jaxtaxfree.ops import matmul
from jaxtaxfree.primitive import symbolic
from jaxtaxfree.sharded.plan import Plan, labels_of, local
from jaxtaxfree.sharded.run import COPY_FROM

Labels = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Operands:
    """What a `dot_general` is of.

    Attributes:
      rows: which operand has the rows, 0 or 1.
      atoms: the operands, but the weights before they were transposed.
      labels: of these and of the result.
    """

    rows: int
    atoms: tuple[Atom, Atom]
    labels: tuple[Labels, Labels, Labels]

    @property
    def types(self) -> tuple[Any, Any]:
        """Of the rows and of the weights."""
        x, w = (self.atoms[i].aval for i in (self.rows, 1 - self.rows))
        return x, w

    @property
    def weights(self) -> Atom:
        return self.atoms[1 - self.rows]


def operands_of(dot: Node, rows: int) -> Operands:
    """The operands of a product, of which this one has the rows."""
    weights, permutation = untransposed(dot.ins[1 - rows])
    lhs, rhs, out = labels_of(dot.params["dimension_numbers"], *(len(x.aval.shape) for x in dot.ins))
    named = dict(zip(permutation, (lhs, rhs)[1 - rows], strict=True))
    as_it_lies = tuple(named[i] for i in range(len(named)))
    if rows == 0:
        return Operands(0, (dot.ins[0], weights), (lhs, as_it_lies, out))
    return Operands(1, (weights, dot.ins[1]), (as_it_lies, rhs, out))


def local_plan(operation: str, axes: tuple[str, ...], operands: Operands, moved: str | None = None) -> Plan | list[str]:
    """The plan of a product inside of `jax.shard_map`, or why there is none."""
    if reasons := symbolic(*operands.types):
        return reasons
    found = local(operation, axes, operands.labels, operands.rows == 1, moved)
    return found if isinstance(found, list) else copied_rows(found) or found


def copied_rows(plan: Plan) -> list[str]:
    """Why rows would have to be copied for an operation, if they would."""
    k = len(plan.contracted)
    if set(plan.x.labels[-k:]) == set(plan.contracted):
        return []
    side, ndim = ("left", "right")[plan.swapped], len(plan.x.labels)
    along = [i for i, label in enumerate(plan.x.labels) if label in plan.contracted]
    return [f"the {side} operand is contracted along {along}, not along its last dimensions {[*range(ndim - k, ndim)]}"]


@dataclasses.dataclass(frozen=True)
class Product:
    """A product by an operation.

    Attributes:
      plan: which operation it is, and how.
      precision: as in `jnp.matmul`.
      dtype: of the result.
      exact: whether partial sums are sent as f32.
    """

    plan: Plan
    precision: Any
    dtype: Any
    exact: bool = False

    def refusals(self, operands: Operands) -> list[str]:
        """Why no kernel takes operands of these types."""
        x, w = operands.types
        rows, weights = self._shapes(x, w)
        return matmul.unsupported(
            jax.ShapeDtypeStruct(rows if len(rows) > 1 else (1, *rows), x.dtype),
            jax.ShapeDtypeStruct(weights, w.dtype),
            precision=self.precision,
            preferred_element_type=np.dtype(self.dtype),
        )

    def keywords(self, operands: Operands) -> dict[str, Any]:
        """Of the operation."""
        x, w = operands.types
        # None if the result has the operands' dtype, as the tables know it.
        preferred = None if x.dtype == w.dtype == self.dtype else self.dtype
        keywords: dict[str, Any] = {"precision": self.precision, "preferred_element_type": preferred}
        return keywords | ({"config": {"exact_wire": True}} if self.exact else {})

    def notes(self, operands: Operands) -> list[str]:
        """What the report says besides."""
        notes = []
        if self.plan.moved in self.plan.contracted:
            notes.append("gathers the contracted dimension")
        if self.plan.moved in self.plan.columns:
            notes.append("scatters columns")
        if self.exact:
            notes.append("partial sums are sent as float32")
        rows, _ = self._shapes(*operands.types)
        many = self.plan.operation == "matmul_all_reduce" and math.prod(rows[:-1]) >= COPY_FROM
        if self.plan.layout != "KN":
            notes.append("copies the weights" if many or self.plan.layout == "mixed" else "reads the weights as [N, K]")
        return notes

    def _shapes(self, x: Any, w: Any) -> tuple[tuple[int, ...], tuple[int, int]]:
        """The shapes of the rows [..., K] and of the weights [K, N]."""
        of_x, of_w = dict(zip(self.plan.x.labels, x.shape)), dict(zip(self.plan.w.labels, w.shape))
        k = math.prod(of_w[label] for label in self.plan.contracted)
        return (*(of_x[label] for label in self.plan.rows), k), (k, math.prod(of_w[x] for x in self.plan.columns))


def described(x: Any, weights: Sequence[Any]) -> str:
    """The types of the operands of a product, or of products by several weights."""
    names = [f"{each.dtype}{list(each.shape)}" for each in (x, *weights)]
    return f"{names[0]} @ {names[1] if len(weights) == 1 else '(' + ', '.join(names[1:]) + ')'}"


def cast_reason(dtypes: Sequence[Any]) -> str | None:
    """Why casts between a product and its sum are not those of an operation, which rounds once.

    Args:
      dtypes: of the product, and of what each cast makes of it.
    """
    wider = [np.dtype(jnp.promote_types(a, b)) for a, b in itertools.pairwise(dtypes)]
    names = " to ".join(str(np.dtype(each)) for each in dtypes)
    if not all(jnp.issubdtype(each, jnp.floating) for each in dtypes):
        return f"the product is cast from {names} before its sum, not among floating-point numbers"
    narrows = all(w == a for w, a in zip(wider, dtypes))
    widens = all(w == b for w, b in zip(wider, dtypes[1:]))
    return None if narrows or widens else f"the product is cast from {names} before its sum, which rounds it twice"


def exact_wire(operation: str | None, operand: Any, dtypes: Sequence[Any]) -> bool:
    """Whether partial sums have to be sent as f32, so that they lose no bit that the program kept.

    Args:
      operand: dtype of the operands, in which they are sent otherwise.
      dtypes: of the product, and of what each cast makes of it.
    """
    sent = min(map(np.dtype, dtypes), key=lambda each: each.itemsize)
    if operation == "all_gather_matmul" or jnp.promote_types(sent, operand) == operand:
        return False
    wider = np.dtype(dtypes[-1]).itemsize > np.dtype(operand).itemsize
    return not (operation == "matmul_all_reduce" and wider)  # which then sends f32 anyway


def typed_as(y: jax.Array, aval: Any) -> jax.Array:
    """A result as a value of this type."""
    y = y if y.shape == aval.shape else y.reshape(aval.shape)
    if y.dtype != aval.dtype or jax.typeof(y).weak_type != aval.weak_type:
        y = _convert_element_type(y, aval.dtype, weak_type=aval.weak_type)
    y = teams.vary(y, aval.mat.varying)
    return teams.resharded(y, aval.sharding.spec) if aval.sharding.mesh.explicit_axes else y
