"""A product that a rank multiplies, as the kernels of an operation see it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import matmul, scaled
from jaxtaxfree.ops.epilogue import NONE, Epilogue
from jaxtaxfree.ops.operand import Operand, Scales
from jaxtaxfree.ops.scaled import UNSCALED, Scaling
from jaxtaxfree.ops.variant import Choice, Variant, choose
from jaxtaxfree.primitive import Labels, Lasting, Unsupported, bilinear, collective
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.target import Target, target_of
from jaxtaxfree.teams import Team

# From so many rows on, products of operands with scales were measured.
SCALED_MEASURED = 2048


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
      gate_scales: by what the gate is multiplied, as `Operand.scales`.
      epilogue: what follows the product.
      residual: dtype of the residual; None if there is none.
      return_gathered: the gathered rows are a result, too.
      along_columns: columns are gathered or scattered, not rows. Each rank has k columns of lhs, or n of the result.
      widths: columns of each of several rhs, of which n is the sum, and `epilogue` that of `epilogue.joined`; () if
        there is one.
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
    gate_scales: Scales = "none"
    epilogue: Epilogue = NONE
    residual: np.dtype | None = None
    return_gathered: bool = False
    along_columns: bool = False
    widths: tuple[int, ...] = ()

    @property
    def m(self) -> int:
        """The rows that belong to each rank, where rows are dealt out; else all."""
        return self.rows if self.along_columns else self.rows // self.world

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the matrices by which the rows are multiplied."""
        if self.widths:
            return tuple(f"rhs{i}" for i in range(len(self.widths)))
        return ("rhs", "gate") if self.epilogue.gated else ("rhs",)

    @property
    def products(self) -> int:
        """Of how many matrices a tile has columns."""
        return 2 if self.epilogue.gated else 1

    @property
    def widths_or_n(self) -> int | tuple[int, ...]:
        """What a kernel calls N, see `kernels.blocks.several`."""
        return self.widths or self.n

    def column_blocks(self, block_n: int) -> int:
        """How many blocks of so many columns, none of which has columns of two rhs."""
        return sum(math.ceil(width / block_n) for width in self.widths or (self.n,))

    @property
    def columns(self) -> int:
        """Of all of them."""
        return self.products * self.n

    @property
    def dtype(self) -> np.dtype:
        """Of the rows."""
        return self.lhs.dtype

    @property
    def scaled(self) -> bool:
        """Whether an operand has scales."""
        return bool(self.scales - {"none"})

    @property
    def scales(self) -> set[Scales]:
        """Of the operands."""
        return {self.lhs.scales, self.rhs.scales, self.gate_scales}

    @property
    def rhs_transposed(self) -> bool:
        """Whether rhs is [n, k]."""
        return self.rhs.transposed

    @property
    def operand_bytes(self) -> int:
        """Of all rows and all weights."""
        parts = self.world if self.along_columns else 1
        return self.lhs.nbytes(self.rows * self.k) + self.rhs.nbytes(parts * self.k * self.columns)

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """An operation that multiplies a rank's rows: what is alike in all of them between its reference and its kernels.

    Attributes:
      name: of the operation.
      variants: its kernels.
      reference: what it means, in plain `lax`.
      moved: the parameter that is the dimension of lhs to be gathered or scattered; None if there is none.
      gathers: the rows of all ranks are multiplied, not the rank's own. Then there may be several weights.
      alone: what one rank has nothing to do of.
      slower_transposed: rows -> why XLA is taken for rhs [N, K], or None.
      scaled_rows: up to so many, the kernel for few rows on Hopper is faster than XLA where operands have scales.
    """

    name: str
    variants: Sequence[Variant[Call]]
    reference: Callable[..., Any]
    moved: str | None = None
    gathers: bool = False
    alone: str
    slower_transposed: Callable[[int], str | None] = lambda rows: None
    scaled_rows: int = 0

    def unsupported(
        self,
        lhs: Any,
        rhs: Any,
        *operands: Any,
        precision: Any,
        preferred_element_type: Any,
        epilogue: Epilogue = NONE,
        scaling: Scaling = UNSCALED,
        **_: Any,
    ) -> list[str]:
        """All that keeps every kernel from taking these operands."""
        if scaling:
            _, operands = scaling.split(operands)
            return scaled.unsupported(lhs, rhs, preferred_element_type) + epilogues.unsupported(epilogue, operands)
        reasons = matmul.unsupported(lhs, rhs, precision=precision, preferred_element_type=preferred_element_type)
        return reasons + epilogues.unsupported(epilogue, operands)

    def fused(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        *operands: jax.Array,
        axes: tuple[str, ...],
        config: Sequence[tuple[str, Any]] | None,
        implementation: str | None = None,
        epilogue: Epilogue = NONE,
        scaling: Scaling = UNSCALED,
        **params: Any,
    ) -> Any:
        """The operation by one kernel."""
        params |= {"scaling": scaling}
        if reasons := self.unsupported(lhs, rhs, *operands, epilogue=epilogue, **params):
            raise Unsupported(self.name, reasons)
        scales, operands = scaling.split(operands)
        along_columns = self._along_columns(lhs, params)
        dimension = 0 if along_columns else self._dimension(params)
        rows, lengths = matmul.rows_first(lhs, dimension)
        form = {"epilogue": epilogue, "along_columns": along_columns}
        call = self.call(rows, rhs, *operands, world=lax.axis_size(axes), **form, **params)
        weights, others = epilogue.split(rhs, epilogue.rows_first(operands, dimension))
        arrays = rows, weights if self.gathers else rhs, others
        if scaling:
            arrays += (scaled.of_kernel(call, scaling, scales, dimension),)
        outs = self.launch(call, *arrays, axes=axes, config=config, implementation=implementation)
        return jax.tree.map(lambda out: matmul.rows_back(out, lengths, dimension), outs)

    def launch(
        self,
        call: Call,
        *arrays: Any,
        axes: tuple[str, ...],
        config: Sequence[tuple[str, Any]] | None,
        implementation: str | None,
    ) -> Any:
        """The results of the kernel that takes a call.

        Args:
          *arrays: lhs as rows; rhs, or where there may be several the bundle of them; the bundle of the epilogue.
          config: the settings that the caller makes.
        """
        chosen = choose(self.name, self.variants, call, dict(config or ()))
        if implementation != "simulate":
            chosen.variant.check_compiles(call, chosen.config)
        return shmem_call(
            chosen.variant.kernel,
            *chosen.arrays(*arrays),
            axis_name=axes,
            implementation=implementation,
            **chosen.keywords,
        )

    def slower(
        self,
        lhs: Any,
        rhs: Any,
        *others: Any,
        axes: tuple[str, ...],
        precision: Any,
        preferred_element_type: Any,
        rhs_transposed: bool = False,
        **params: Any,
    ) -> str | None:
        """Why XLA is known to be faster, if it is. Measured on 2 and 4 H200."""
        world = lax.axis_size(axes)
        if world == 1:
            return f"there is one rank, so nothing to {self.alone}"
        types = {"precision": precision, "preferred_element_type": preferred_element_type}
        along_columns = self._along_columns(lhs, params)
        if params.get("scaling"):
            form = {"rhs_transposed": rhs_transposed, "along_columns": along_columns}
            return self._slower_scaled(lhs, rhs, *others, world=world, **form, **types, **params)
        if why := matmul.slower(lhs, rhs, self._rows(lhs, world, along_columns), **types):
            return why
        form = {"rhs_transposed": rhs_transposed, "along_columns": along_columns}
        call = self.call(lhs, rhs, *others, world=world, **form, **types, **params)
        chosen = choose(self.name, self.variants, call, {})
        why = chosen.variant.slower(call, chosen.config)
        return why or (self.slower_transposed(call.rows) if rhs_transposed else None)

    def _slower_scaled(self, lhs: Any, rhs: Any, *others: Any, scaling: Scaling, **params: Any) -> str | None:
        """As `slower`, of operands that have scales."""
        if reasons := self.unsupported(lhs, rhs, *others, scaling=scaling, **params):
            return Lasting("; ".join(reasons))
        call = self.call(lhs, rhs, *scaling.split(others)[1], scaling=scaling, **params)
        try:
            chosen = choose(self.name, self.variants, call, {})
        except Unsupported as refused:
            return "; ".join(refused.reasons)
        few = chosen.variant.name == "hopper_few" and call.rows <= self.scaled_rows
        many = chosen.variant.name == "hopper" and call.rows >= SCALED_MEASURED
        return None if few or many else matmul.UNMEASURED

    def call(
        self,
        lhs: Any,
        rhs: Any,
        *others: Any,
        world: int,
        compute_capability: int,
        precision: Any,
        preferred_element_type: Any,
        epilogue: Epilogue = NONE,
        rhs_transposed: bool = False,
        return_gathered: bool = False,
        along_columns: bool = False,
        widths: tuple[int, ...] = (),
        scaling: Scaling = UNSCALED,
        **_: Any,
    ) -> Call:
        """The call with these operands (arrays or their types), which some kernel has to support.

        Args:
          widths: of several rhs; `rhs` is then all of them side by side.
        """
        k, n = reversed(rhs.shape) if rhs_transposed else rhs.shape
        if along_columns:
            k, n = (k // world, n) if self.gathers else (k, n // world)
        residual = epilogue.split(rhs, others)[1].get("residual") if others else None
        return Call(
            operation=self.name,
            rows=self._rows(lhs, world, along_columns),
            k=k,
            n=n,
            world=world,
            lhs=Operand(dtype=np.dtype(lhs.dtype), scales=scaling.of("lhs")),
            rhs=Operand(dtype=np.dtype(rhs.dtype), transposed=rhs_transposed, scales=scaling.of("rhs")),
            out_dtype=scaled.result_dtype(lhs, rhs, preferred_element_type)
            if scaling
            else np.dtype(preferred_element_type or lhs.dtype),
            target=target_of(compute_capability),
            precision=matmul.triton_precision(precision) or "tf32",
            gate_scales=scaling.of("gate"),
            epilogue=epilogue,
            residual=None if residual is None else np.dtype(residual.dtype),
            return_gathered=return_gathered,
            along_columns=along_columns,
            widths=widths,
        )

    def case(
        self,
        lhs: Any,
        rhs: Any,
        *others: Any,
        team: Team,
        precision: Any,
        preferred_element_type: Any,
        epilogue: Epilogue = NONE,
        rhs_transposed: bool = False,
        return_gathered: bool = False,
        **params: Any,
    ) -> Case | None:
        """What the tables know a product [m, k] by [k, n] of a rank by; None if none of its kind is in them.

        With an epilogue it is of the kind of the product alone, if the same kernel takes it.
        """
        alike = lhs.dtype == rhs.dtype and preferred_element_type in (None, lhs.dtype)
        if params.get("scaling") or not alike or rhs_transposed or matmul.triton_precision(precision) != "tf32":
            return None
        if self._along_columns(lhs, params) or epilogue.gated or return_gathered:
            return None
        form = {"precision": precision, "preferred_element_type": preferred_element_type}
        form |= {"world": team.world, "compute_capability": team.compute_capability}

        def chosen(m: int, settings: Mapping[str, Any], *others: Any, epilogue: Epilogue = NONE) -> Choice:
            rows = jax.ShapeDtypeStruct((m, lhs.shape[-1]), lhs.dtype)
            call = self.call(rows, rhs, *others, epilogue=epilogue, **form)
            return choose(self.name, self.variants, call, settings)

        size = math.prod(lhs.shape[:-1])
        if epilogue:
            plain, chosen = chosen, lambda m, settings: plain(m, settings, *others, epilogue=epilogue)
            if chosen(size, {}).variant is not plain(size, {}).variant:
                return None
        return Case(
            operation=self.name,
            device_kind=team.device_kind,
            same={"world": team.world, "dtype": lhs.dtype.name, "k": rhs.shape[0], "n": rhs.shape[1]},
            along="m",
            size=size,
            choose=chosen,
        )

    def dimensions(
        self,
        lhs: Any,
        rhs: Any,
        *others: Any,
        epilogue: Epilogue = NONE,
        rhs_transposed: bool = False,
        return_gathered: bool = False,
        **params: Any,
    ) -> tuple[Labels, Labels]:
        """The `jaxtaxfree.primitive.Dimensions` of the operation."""
        del rhs
        scaling = params.get("scaling", UNSCALED)
        _, others = scaling.split(others)
        moved = self._dimension(params) if self.moved else None
        rows = [None if i == moved else f"row {i}" for i in range(len(lhs.shape) - 1)]
        column = None if moved == len(rows) and not self.gathers else "column"
        weights, product = [None, column], [*rows, column]
        labels = {"bias": [column], "residual": product}
        labels["gate"] = weights = weights[::-1] if rhs_transposed else weights
        ins = [[*rows, None], weights]
        ins += scaling.labels(rows, column)
        ins += [labels[name] for name, _ in zip(epilogue.operands, others, strict=True)]
        return ins, [product, [*rows, None]] if return_gathered else [product]

    def bilinear(self) -> Any:
        """The primitive without an epilogue."""
        return bilinear(
            self.name,
            reference=self.reference,
            fused=self.fused,
            slower=self.slower,
            dimensions=self.dimensions,
            case=self.case,
            batch=functools.partial(epilogues.batch, moved=self.moved),
        )

    def collective(self, **fixed: Any) -> Any:
        """The primitive of a list of results, with or without an epilogue.

        Args:
          **fixed: parameters that are the same in each call of it.
        """
        return collective(
            self.name,
            reference=lambda *operands, **params: jax.tree.leaves(self.reference(*operands, **params, **fixed)),
            fused=lambda *operands, **params: jax.tree.leaves(self.fused(*operands, **params, **fixed)),
            slower=self.slower,
            dimensions=functools.partial(self.dimensions, **fixed),
            case=functools.partial(self.case, **fixed),
            batch=functools.partial(epilogues.batch, moved=self.moved),
        )

    def _rows(self, lhs: Any, world: int, along_columns: bool) -> int:
        """Of the product that a rank multiplies."""
        return math.prod(lhs.shape[:-1]) * (world if self.gathers and not along_columns else 1)

    def _along_columns(self, lhs: Any, params: Mapping[str, Any]) -> bool:
        """Whether columns are gathered or scattered. (The usual call, which the tables know, says no dimension.)"""
        return self.moved is not None and params.get(self.moved, 0) == lhs.ndim - 1 and lhs.ndim > 1

    def _dimension(self, params: Mapping[str, Any]) -> int:
        """Of lhs, that is gathered or scattered; the first one where there is none such."""
        return params[self.moved] if self.moved else 0
