"""What the three products check alike: scales, and what follows a product."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxtaxfree.ops import epilogue as epilogues
from jaxtaxfree.ops import scaled


def check(
    operation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    shape: Sequence[int],
    activation: Any,
    *,
    rhs_transposed: bool,
    scales: Mapping[str, Any],
    parts: int = 1,
    **given: Any,
) -> tuple[dict[str, Any], list[jax.Array], list[jax.Array]]:
    """The parameters of a primitive that say what operands there are, the scales, and the epilogue's operands.

    Args:
      shape: of the result.
      scales: "lhs_scale" and so on; None for one that there is not.
      parts: of K, which ranks have.
      **given: what the epilogue takes; None for what there is not.

    Raises:
      ValueError: if a scale, or an operand of the epilogue, does not fit.
    """
    scaling, found = scaled.check(
        operation, lhs, rhs, parts=parts, rhs_transposed=rhs_transposed, gate=given.get("gate"), **scales
    )
    epilogue, operands = epilogues.check(operation, lhs, rhs, shape, activation, of_integers=bool(scaling), **given)
    return {"scaling": scaling, "epilogue": epilogue, "rhs_transposed": rhs_transposed}, found, operands
