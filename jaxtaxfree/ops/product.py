"""A product that a rank multiplies, as the kernels of an operation see it."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops import matmul
from jaxtaxfree.ops.epilogue import NONE, Epilogue
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
      dtype: of the operands.
      out_dtype: of the result.
      target: the GPU.
      precision: of f32 products, in Triton's words.
      epilogue: what follows the product.
      residual: dtype of the residual; None if there is none.
      rhs_transposed: rhs is [n, k].
      return_gathered: the gathered rows are a result, too.
      along_columns: columns are gathered or scattered, not rows. Each rank has k columns of lhs, or n of the result.
    """

    operation: str
    rows: int
    k: int
    n: int
    world: int
    dtype: np.dtype
    out_dtype: np.dtype
    target: Target
    precision: str = "tf32"
    epilogue: Epilogue = NONE
    residual: np.dtype | None = None
    rhs_transposed: bool = False
    return_gathered: bool = False
    along_columns: bool = False

    @property
    def m(self) -> int:
        """The rows that belong to each rank, where rows are dealt out; else all."""
        return self.rows if self.along_columns else self.rows // self.world

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
    def itemsize(self) -> int:
        """Bytes of an element of the operands."""
        return self.dtype.itemsize

    def wire(self, exact_wire: bool) -> np.dtype:
        """In which dtype partial sums travel."""
        return np.dtype(np.float32) if exact_wire else self.dtype


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
    along_columns: bool = False,
) -> Call:
    """The call of an operation with these operands (arrays or their types), which some kernel has to support."""
    k, n = reversed(rhs.shape) if rhs_transposed else rhs.shape
    if along_columns:
        k, n = (k // world, n) if operation == "all_gather_matmul" else (k, n // world)
    residual = epilogue.split(rhs, others)[1].get("residual") if others else None
    return Call(
        operation=operation,
        rows=rows,
        k=k,
        n=n,
        world=world,
        dtype=np.dtype(lhs.dtype),
        out_dtype=np.dtype(preferred_element_type or lhs.dtype),
        target=target_of(compute_capability),
        precision=matmul.triton_precision(precision) or "tf32",
        epilogue=epilogue,
        residual=None if residual is None else np.dtype(residual.dtype),
        rhs_transposed=rhs_transposed,
        return_gathered=return_gathered,
        along_columns=along_columns,
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
    scattered: bool = False,
    epilogue: Epilogue = NONE,
    rhs_transposed: bool = False,
    return_gathered: bool = False,
) -> tuple[Labels, Labels]:
    """The `jaxtaxfree.primitive.Dimensions` of a product.

    Args:
      moved: the dimension of lhs that is gathered, or that of the result that is scattered.
      scattered: whether it is the result's.
    """
    del others
    rows = [None if i == moved else f"row {i}" for i in range(len(lhs.shape) - 1)]
    column = None if scattered and moved == len(rows) else "column"
    weights, product = [None, column], [*rows, column]
    labels = {"gate": weights, "bias": [column], "residual": product}
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
