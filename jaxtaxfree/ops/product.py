"""A product that a rank multiplies, as the kernels of an operation see it."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops import matmul
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from jaxtaxfree.ops.operand import Operand
from jaxtaxfree.ops.variant import Choice, Variant, choose
from jaxtaxfree.primitive import Labels
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.target import Target, target_of
from jaxtaxfree.teams import Team


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """All that decides which kernel takes a product, and how: a rank multiplies rows [rows, k] by its rhs [k, n].

    Attributes:
      operation: its name.
      rows: of the product, those of all ranks.
      k, n: the contracted dimension and the columns of this rank.
      world: number of ranks.
      lhs, rhs: the operands' types.
      out_dtype: of the result.
      target: the GPU.
      precision: of f32 products, in Triton's words.
      epilogue: what follows the product.
      residual: dtype of the residual; None if there is none.
      return_gathered: the gathered rows are a result, too.
    """

    operation: str
    rows: int
    k: int
    n: int
    world: int
    lhs: Operand
    rhs: Operand
    out_dtype: np.dtype
    target: Target
    precision: str = "tf32"
    epilogue: Epilogue = NONE
    residual: np.dtype | None = None
    return_gathered: bool = False

    @property
    def m(self) -> int:
        """The rows that belong to each rank, where rows are dealt out."""
        return self.rows // self.world

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the matrices by which the rows are multiplied."""
        return ("rhs", "gate") if self.epilogue.gated else ("rhs",)

    @property
    def products(self) -> int:
        """By how many matrices like rhs the rows are multiplied."""
        return len(self.weights)

    @property
    def columns(self) -> int:
        """Of all of them."""
        return self.products * self.n

    @property
    def dtype(self) -> np.dtype:
        """Of the rows."""
        return self.lhs.dtype

    @property
    def rhs_transposed(self) -> bool:
        """Whether rhs is [n, k]."""
        return self.rhs.transposed

    @property
    def operand_bytes(self) -> int:
        """Of all rows and all weights."""
        return self.lhs.nbytes(self.rows * self.k) + self.rhs.nbytes(self.k * self.columns)

    def bytes_of_a_step(self, rows: int, columns: int, k: int) -> int:
        """What blocks [rows, k] and [k, columns] of the operands take in shared memory."""
        return self.lhs.nbytes(rows * k) + self.rhs.nbytes(k * columns)

    def depth_of(self, nbytes: int) -> int:
        """How many elements of K are so many bytes of a row of either operand, or less of the narrower one."""
        return min(self.lhs.elements(nbytes), self.rhs.elements(nbytes))

    def wire(self, exact_wire: bool) -> np.dtype:
        """In which dtype partial sums travel."""
        return np.dtype(np.float32) if exact_wire else self.lhs.wire

    @property
    def widens(self) -> bool:
        """Whether the result has more bits than partial sums that are rounded on their way."""
        return self.out_dtype.itemsize > self.lhs.wire.itemsize


def call_of(
    operation: str,
    lhs: Any,
    rhs: Any,
    *others: Any,
    rows: int,
    world: int,
    compute_capability: int,
    precision: Any,
    preferred_element_type: Any,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
) -> Call:
    """The call of an operation with these operands (arrays or their types), which some kernel has to support."""
    k, n = reversed(rhs.shape) if rhs_transposed else rhs.shape
    residual = epilogue.split(rhs, others)[1].get("residual") if others else None
    return Call(
        operation=operation,
        rows=rows,
        k=k,
        n=n,
        world=world,
        lhs=Operand(dtype=np.dtype(lhs.dtype)),
        rhs=Operand(dtype=np.dtype(rhs.dtype), transposed=rhs_transposed),
        out_dtype=np.dtype(preferred_element_type or lhs.dtype),
        target=target_of(compute_capability),
        precision=matmul.triton_precision(precision) or "tf32",
        epilogue=epilogue,
        residual=None if residual is None else np.dtype(residual.dtype),
        return_gathered=return_gathered,
    )


def run(
    variants: Sequence[Variant[Call]],
    call: Call,
    *operands: Any,
    axes: tuple[str, ...],
    config: Sequence[tuple[str, Any]] | None,
    implementation: str | None,
) -> Any:
    """The results of the kernel that takes a call.

    Args:
      *operands: lhs as rows, rhs (or, where there may be several, the bundle of them), and the bundle of the epilogue.
      config: the settings that the caller makes.
    """
    chosen = choose(call.operation, variants, call, dict(config or ()))
    return shmem_call(
        chosen.variant.kernel,
        *chosen.variant.arrays(call, *operands),
        axis_name=axes,
        implementation=implementation,
        **chosen.keywords,
    )


def slower(variants: Sequence[Variant[Call]], call: Call) -> str | None:
    """Why XLA is known to be faster than the kernel that would be chosen, if it is."""
    chosen = choose(call.operation, variants, call, {})
    return chosen.variant.slower(call, chosen.config)


def dimensions(
    lhs: Any,
    rhs: Any,
    *others: Any,
    moved: int | None = None,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
) -> tuple[Labels, Labels]:
    """The `jaxtaxfree.primitive.Dimensions` of a product.

    Args:
      moved: the dimension of lhs that is gathered or scattered.
    """
    del others
    rows = [None if i == moved else f"row {i}" for i in range(len(lhs.shape) - 1)]
    weights, product = [None, "column"], [*rows, "column"]
    labels = {"gate": weights, "bias": ["column"], "residual": product}
    ins = [[*rows, None], weights[::-1] if rhs_transposed else weights, *(labels[name] for name in epilogue.operands)]
    return ins, [product, [*rows, None]] if return_gathered else [product]


def case(
    operation: str,
    variants: Sequence[Variant[Call]],
    lhs: Any,
    rhs: Any,
    *,
    rows: Callable[[int], int],
    team: Team,
    precision: Any,
    preferred_element_type: Any,
    rhs_transposed: bool = False,
    **_: Any,
) -> Case | None:
    """What the tables know a product of a rank's operands [m, k] and [k, n] by; None if none of its kind is in them.

    Args:
      rows: of the product, by m.
    """
    alike = lhs.dtype == rhs.dtype and preferred_element_type in (None, lhs.dtype)
    if not alike or rhs_transposed or matmul.triton_precision(precision) != "tf32":
        return None
    on: dict[str, Any] = {"world": team.world, "compute_capability": team.compute_capability}

    def chosen(m: int, settings: Mapping[str, Any]) -> Choice:
        form = {"precision": precision, "preferred_element_type": preferred_element_type}
        return choose(operation, variants, call_of(operation, lhs, rhs, rows=rows(m), **on, **form), settings)

    return Case(
        operation=operation,
        device_kind=team.device_kind,
        same={"world": team.world, "dtype": lhs.dtype.name, "k": rhs.shape[0], "n": rhs.shape[1]},
        along="m",
        size=math.prod(lhs.shape[:-1]),
        choose=chosen,
    )
