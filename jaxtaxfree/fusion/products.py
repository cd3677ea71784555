"""How a `dot_general` is a product that the operations take: rows [..., K] by weights [K, N]."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lax.lax import _convert_element_type

from jaxtaxfree import teams
from jaxtaxfree.ops import matmul
from jaxtaxfree.ops.all_gather_matmul import all_gather_matmul, all_gather_matmul_p, gathered_too_p
from jaxtaxfree.ops.matmul_all_reduce import matmul_all_reduce
from jaxtaxfree.ops.matmul_reduce_scatter import matmul_reduce_scatter, matmul_reduce_scatter_p
from jaxtaxfree.primitive import hashable, symbolic

# From so many rows on, a copy of the weights is small beside the product.
COPY_FROM = 512


@dataclasses.dataclass(frozen=True)
class Form:
    """A `dot_general` as a product of rows [..., K] and weights [K, N].

    Attributes:
      rows: which operand has the rows, 0 or 1; its contracted dimensions are the last ones.
      k: how many dimensions are contracted.
      contracted: those of the weights, in the order of the rows' dimensions.
      free: the other dimensions of the weights, in the order of the result.
      transposed: the weights lie in memory as [N, K].
    """

    rows: int
    k: int
    contracted: tuple[int, ...]
    free: tuple[int, ...]
    transposed: bool

    def tail(self, w: Any) -> tuple[int, ...]:
        """The sizes of the weights' dimensions that are the columns."""
        return tuple(w.shape[d] for d in self.free)

    def row_of(self, dimension: int, ndim: int) -> int | None:
        """The dimension of the rows that is this one of a result of `ndim` dimensions; None if it is of the weights."""
        if self.rows == 0:
            return dimension if dimension < ndim - len(self.free) else None
        return dimension - len(self.free) if dimension >= len(self.free) else None

    def flat_rows(self, x: Any) -> Any:
        """The rows with one dimension for all that is contracted."""
        return x if self.k == 1 else x.reshape(*x.shape[: x.ndim - self.k], -1)

    def flat_weights(self, w: Any) -> Any:
        """The weights as a matrix [K, N]; as [N, K], if they lie so."""
        order = (*self.free, *self.contracted) if self.transposed else (*self.contracted, *self.free)
        n = math.prod(self.tail(w))
        if order != tuple(range(w.ndim)):
            w = jnp.transpose(w, order)
        return w if w.ndim == 2 else w.reshape((n, -1) if self.transposed else (-1, n))

    def restored(self, y: Any, w: Any) -> Any:
        """The product [..., N] with the dimensions of the `dot_general`."""
        if len(self.free) > 1:
            y = y.reshape(*y.shape[:-1], *self.tail(w))
        if self.rows == 0:
            return y
        n = len(self.free)
        return jnp.moveaxis(y, range(y.ndim - n, y.ndim), range(n))


def form_of(params: Mapping[str, Any], operands: Sequence[Any], rows: int, permutation: Sequence[int]) -> Form | str:
    """The form of a `dot_general`, or why it has none.

    Args:
      params: its parameters.
      operands: types of what the form is of: the operands, but the weights before they were transposed.
      rows: which operand has the rows.
      permutation: for each dimension of the operand that has the weights, that of the weights.
    """
    if reasons := symbolic(*operands):
        return reasons[0]
    contracted, batch = params["dimension_numbers"]
    ndim = len(operands[rows].shape)
    if batch[0]:
        return "the product is one of batches of matrices"
    if not contracted[rows]:
        return "the product contracts no dimension"
    pairs = sorted(zip(contracted[rows], contracted[1 - rows]))
    last = list(range(ndim - len(pairs), ndim))
    if [a for a, _ in pairs] != last:
        side = ("left", "right")[rows]
        return (
            f"the {side} operand is contracted along {sorted(contracted[rows])}, not along its last dimensions {last}"
        )
    free = tuple(permutation[d] for d in range(len(permutation)) if d not in contracted[1 - rows])
    if not free:
        return "the product is one by a vector"
    order = tuple(permutation[b] for _, b in pairs)
    return Form(rows, len(pairs), order, free, transposed=(*free, *order) == tuple(range(len(permutation))))


def flat_shapes(form: Form, operands: Sequence[Any]) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The shapes of the rows [..., K] and of the weights [K, N]."""
    x = operands[form.rows]
    lengths = tuple(x.shape[: len(x.shape) - form.k])
    k = math.prod(x.shape[len(lengths) :])
    return (*lengths, k), (k, math.prod(form.tail(operands[1 - form.rows])))


def described(form: Form, operands: Sequence[Any]) -> str:
    x, w = (operands[i] for i in (form.rows, 1 - form.rows))
    return " @ ".join(f"{each.dtype}{list(each.shape)}" for each in (x, w))


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


def exact_wire(operation: str, operand: Any, dtypes: Sequence[Any]) -> bool:
    """Whether partial sums have to be sent as f32, so that they lose no bit that the program kept.

    Args:
      operand: dtype of the operands, in which they are sent otherwise.
      dtypes: of the product, and of what each cast makes of it.
    """
    sent = min(map(np.dtype, dtypes), key=lambda each: each.itemsize)
    if jnp.promote_types(sent, operand) == operand:
        return False
    wider = np.dtype(dtypes[-1]).itemsize > np.dtype(operand).itemsize
    return not (operation == "matmul_all_reduce" and wider)  # which then sends f32 anyway


@dataclasses.dataclass(frozen=True)
class Product:
    """A call of an operation.

    Attributes:
      operation: its name.
      form: of the `dot_general`.
      axes: the mesh axes along which it communicates.
      dimension: of the rows that is gathered or scattered; 0 if none is.
      precision: as in `jnp.matmul`.
      dtype: of the result.
      exact: whether partial sums are sent as f32.
      return_gathered: whether the gathered rows are a result as well.
    """

    operation: str
    form: Form
    axes: tuple[str, ...]
    dimension: int
    precision: Any
    dtype: Any
    exact: bool = False
    return_gathered: bool = False

    def refusals(self, operands: Sequence[Any]) -> list[str]:
        """Why no kernel takes operands of these types, or why it would be slower by much."""
        x, w = operands[self.form.rows], operands[1 - self.form.rows]
        rows, weights = flat_shapes(self.form, operands)
        reasons = matmul.unsupported(
            jax.ShapeDtypeStruct(rows if len(rows) > 1 else (1, *rows), x.dtype),
            jax.ShapeDtypeStruct(weights, w.dtype),
            precision=self.precision,
            preferred_element_type=np.dtype(self.dtype),
        )
        few = math.prod(rows[:-1]) < COPY_FROM and weights[1] > 1
        if self.operation == "matmul_all_reduce" and self.form.transposed and few:
            reasons.append(
                "matmul_all_reduce takes weights as [K, N] and these are [N, K], which would have to be copied for few "
                "rows"
            )
        return reasons

    def note(self, operands: Sequence[Any]) -> str:
        """What the report says besides."""
        notes = []
        if self.return_gathered:
            notes.append("returns the gathered rows")
        if self.exact:
            notes.append("partial sums are sent as float32")
        ndim = len(operands[1 - self.form.rows].shape)
        if (*self.form.contracted, *self.form.free) != tuple(range(ndim)):
            in_place = self.form.transposed and self.operation != "matmul_all_reduce"
            notes.append("reads the weights as [N, K]" if in_place else "copies the weights")
        return ", ".join(notes)

    def __call__(self, x: jax.Array, w: jax.Array, implementation: str | None) -> tuple[jax.Array, jax.Array | None]:
        """The result, as the `dot_general` has its dimensions, and the gathered rows, as they were given."""
        rows, weights = self.form.flat_rows(x), self.form.flat_weights(w)
        keywords: dict[str, Any] = {"precision": self.precision, "preferred_element_type": self._preferred(x, w)}
        keywords["implementation"] = implementation
        # The primitives read the weights where they lie; what has no kernel has no such primitive.
        in_place = self.form.transposed and self.operation != "matmul_all_reduce" and implementation != "xla"
        if self.exact:
            keywords["config"] = {"exact_wire": True}
        if self.form.transposed and not in_place:
            weights = weights.T
        gathered = None
        if self.operation == "matmul_all_reduce":
            out = matmul_all_reduce(rows, weights, self.axes, **keywords)
        elif self.operation == "matmul_reduce_scatter":
            if in_place:
                out = self._in_place(matmul_reduce_scatter_p, rows, weights, "scatter_dimension", keywords)
            else:
                out = matmul_reduce_scatter(rows, weights, self.axes, scatter_dimension=self.dimension, **keywords)
        elif in_place:
            primitive = gathered_too_p if self.return_gathered else all_gather_matmul_p
            out = self._in_place(primitive, rows, weights, "axis", keywords)
        else:
            out = all_gather_matmul(
                rows, weights, self.axes, axis=self.dimension, return_gathered=self.return_gathered, **keywords
            )
        if self.return_gathered:
            out, gathered = out
            gathered = gathered.reshape(*gathered.shape[:-1], *x.shape[x.ndim - self.form.k :])
        return self.form.restored(out, w), gathered

    def _preferred(self, x: Any, w: Any) -> Any:
        """None if the result has the operands' dtype, as the tables know it."""
        return None if x.dtype == w.dtype == self.dtype else self.dtype

    def _in_place(self, primitive: Any, rows: Any, weights: Any, name: str, keywords: Mapping[str, Any]) -> Any:
        """A primitive on weights [N, K]."""
        params = matmul.check_precision(keywords["precision"], keywords["preferred_element_type"])
        config = hashable(keywords["config"]) if "config" in keywords else None
        params |= {"implementation": keywords["implementation"], "config": config, "rhs_transposed": True}
        return matmul.bind(primitive, rows, weights, axes=self.axes, **{name: self.dimension}, **params)


def typed_as(y: jax.Array, aval: Any) -> jax.Array:
    """A result as a value of this type."""
    y = y if y.shape == aval.shape else y.reshape(aval.shape)
    if y.dtype != aval.dtype or jax.typeof(y).weak_type != aval.weak_type:
        y = _convert_element_type(y, aval.dtype, weak_type=aval.weak_type)
    y = teams.vary(y, aval.mat.varying)
    return teams.resharded(y, aval.sharding.spec) if aval.sharding.mesh.explicit_axes else y
