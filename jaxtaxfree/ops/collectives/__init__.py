"""`psum`, `all_gather`, `psum_scatter`, `all_to_all`: collectives for small arrays, where only latency counts."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops.collectives.portable import VARIANTS, Call
from jaxtaxfree.ops.matmul import UNMEASURED
from jaxtaxfree.ops.variant import choose, settings_of
from jaxtaxfree.primitive import (
    Labels,
    Lasting,
    Unsupported,
    check_implementation,
    check_whole,
    linear,
    symbolic,
    takes_reference,
)
from jaxtaxfree.settings import Settings
from jaxtaxfree.shmem import shmem_call
from jaxtaxfree.teams import Team, check_axes, vary

# Of all ranks, so that indices of words have 32 bits.
MOST_ELEMENTS = 2**28
DTYPES = ("float32", "bfloat16", "float16", "int32", "int16", "int8", "uint32", "uint16", "uint8")


def psum(
    x: Any,
    axis_name: str | Sequence[str],
    *,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> Any:
    """`lax.psum(x, axis_name)`, as one kernel for each array on GPUs.

    Args:
      x: pytree of this rank's arrays, of any shape.
      axis_name: the mesh axis, or axes, to sum along. If some of them lie inside of hosts and the others span hosts,
        there are kernels inside, and XLA's collective across.
      implementation: "fused": the kernel. "xla": plain `lax`. None: the one that was measured to be faster.
        "simulate": the kernel, run for all ranks on the CPU; see `jaxtaxfree.simulator`.
      config: how the kernel splits its work. The size decides whatever it leaves out.

    Returns: the sums, with the same bits on every rank. The kernel adds up in f32, in the order of the ranks, and
      rounds once; between hosts XLA adds up. Sums of integers wrap around.

    Raises:
      ValueError: if the implementation or setting does not exist.
      TypeError: if the axis or `config` has the wrong type.
      NameError: if `axis_name` is not bound, because the call is not inside `jax.shard_map`.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here. The error gives all reasons.
    """
    axes = check_axes(axis_name, "psum")

    def sum_of(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return lax.psum(leaf, axes)  # of a constant it is a product
        leaf = leaf.astype(jnp.int32) if leaf.dtype == bool else leaf
        return _apply(psum_p, leaf, axes, implementation, config)

    return jax.tree.map(sum_of, x)


def all_gather(
    x: Any,
    axis_name: str | Sequence[str],
    *,
    axis: int = 0,
    tiled: bool = False,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> Any:
    """`lax.all_gather(x, axis_name, axis=axis, tiled=tiled)`, as one kernel for each array on GPUs.

    Args:
      x: pytree of this rank's arrays [..., M, ...].
      axis: the position of the new dimension. If tiled, the dimension along which the arrays are concatenated.
      The other arguments are those of `psum`.

    Returns: [..., world, M, ...], or [..., world * M, ...] if tiled, bit for bit what the ranks have.

    Raises: what `psum` raises, and
      ValueError: if the dimension does not exist, or is concatenated and has size 0.
      TypeError: if `axis` is not an integer.
    """
    axes = check_axes(axis_name, "all_gather")

    def gather(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        dimension = _dimension("all_gather", "axis", axis, leaf.ndim + (not tiled))
        if tiled and not leaf.shape[dimension]:
            raise ValueError(f"all_gather cannot concatenate dimension {dimension} of {list(leaf.shape)}, which is 0.")
        if leaf.dtype == bool:
            return gather(leaf.astype(jnp.uint8)).astype(bool)
        return _apply(all_gather_p, leaf, axes, implementation, config, dimension=dimension, tiled=tiled)

    return jax.tree.map(gather, x)


def psum_scatter(
    x: Any,
    axis_name: str | Sequence[str],
    *,
    scatter_dimension: int = 0,
    tiled: bool = False,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> Any:
    """`lax.psum_scatter(x, axis_name, scatter_dimension=scatter_dimension, tiled=tiled)`, as one kernel for each array.

    Args:
      x: pytree of this rank's arrays [..., world, ...], or [..., world * M, ...] if tiled.
      scatter_dimension: the dimension whose parts go to the ranks.
      The other arguments are those of `psum`.

    Returns: this rank's part of the sum, [...], or [..., M, ...] if tiled. It is computed as in `psum`.

    Raises: what `psum` raises, and
      ValueError: if the dimension does not exist, has size 0, or is not divisible by the number of ranks.
      TypeError: if `scatter_dimension` is not an integer.
    """
    axes = check_axes(axis_name, "psum_scatter")
    world = lax.axis_size(axes)

    def scatter(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        dimension = _dimension("psum_scatter", "scatter_dimension", scatter_dimension, leaf.ndim)
        size = leaf.shape[dimension]
        if size % world or not size if tiled else size != world:
            wanted = f"a {'' if size else 'positive '}multiple of {world}" if tiled else world
            raise ValueError(
                f"psum_scatter cannot scatter dimension {dimension} of {list(leaf.shape)} over {world} ranks: with "
                f"tiled={tiled}, {size} is not {wanted}."
            )
        return _apply(psum_scatter_p, leaf, axes, implementation, config, dimension=dimension, tiled=tiled)

    return jax.tree.map(scatter, x)


def all_to_all(
    x: Any,
    axis_name: str | Sequence[str],
    split_axis: int,
    concat_axis: int,
    *,
    tiled: bool = False,
    implementation: str | None = None,
    config: Settings | Mapping[str, Any] | None = None,
) -> Any:
    """`lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=tiled)`, as one kernel for each array on GPUs.

    Args:
      x: pytree of this rank's arrays, [..., world, ...], or [..., world * M, ...] if tiled.
      split_axis: the dimension whose parts go to the ranks.
      concat_axis: the position of the new dimension of parts that came. If tiled, the dimension along which they are
        concatenated.
      The other arguments are those of `psum`.

    Returns: [..., world, ...], or [..., world * N, ...] if tiled, bit for bit what the ranks have.

    Raises: what `psum` raises, and
      ValueError: if a dimension does not exist, or the split one has size 0 or one that the ranks do not divide.
      TypeError: if a dimension is not an integer.
    """
    axes = check_axes(axis_name, "all_to_all")
    world = lax.axis_size(axes)

    def exchange(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        split = _dimension("all_to_all", "split_axis", split_axis, leaf.ndim)
        concat = _dimension("all_to_all", "concat_axis", concat_axis, leaf.ndim)
        size = leaf.shape[split]
        if size % world or not size if tiled else size != world:
            wanted = f"a {'' if size else 'positive '}multiple of {world}" if tiled else world
            raise ValueError(
                f"all_to_all cannot split dimension {split} of {list(leaf.shape)} over {world} ranks: with "
                f"tiled={tiled}, {size} is not {wanted}."
            )
        if leaf.dtype == bool:
            return exchange(leaf.astype(jnp.uint8)).astype(bool)
        return _apply(all_to_all_p, leaf, axes, implementation, config, split=split, concat=concat, tiled=tiled)

    return jax.tree.map(exchange, x)


def _psum(x: jax.Array, *, axes: tuple[str, ...], config: Any = None) -> jax.Array:
    del config
    return lax.psum(x, axes)


def _all_gather(x: jax.Array, *, axes: tuple[str, ...], dimension: int, tiled: bool, config: Any = None) -> jax.Array:
    del config
    # lax does not lower a gather of symbolic shapes along a new dimension, nor a scatter that removes one.
    x = x if tiled else lax.expand_dims(x, [dimension])
    return lax.all_gather(x, axes, axis=dimension, tiled=True)


def _psum_scatter(x: jax.Array, *, axes: tuple[str, ...], dimension: int, tiled: bool, config: Any = None) -> jax.Array:
    del config
    out = lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
    return out if tiled else lax.squeeze(out, [dimension])


def _all_to_all(
    x: jax.Array, *, axes: tuple[str, ...], split: int, concat: int, tiled: bool, config: Any = None
) -> jax.Array:
    del config
    return lax.all_to_all(x, axes, split, concat, tiled=tiled)


# What each operation means, in plain `lax`.
REFERENCES: dict[str, Callable[..., jax.Array]] = {
    "psum": _psum,
    "all_gather": _all_gather,
    "psum_scatter": _psum_scatter,
    "all_to_all": _all_to_all,
}


def _fused_psum(x: jax.Array, **how: Any) -> jax.Array:
    return _fused("psum", x, x.shape, **how)


def _fused_all_gather(x: jax.Array, *, axes: tuple[str, ...], dimension: int, tiled: bool, **how: Any) -> jax.Array:
    world = lax.axis_size(axes)
    if tiled:
        shape = (*x.shape[:dimension], world * x.shape[dimension], *x.shape[dimension + 1 :])
    else:
        shape = (*x.shape[:dimension], world, *x.shape[dimension:])
    return _fused("all_gather", x, shape, math.prod(x.shape[:dimension]), axes=axes, **how)


def _fused_psum_scatter(x: jax.Array, *, axes: tuple[str, ...], dimension: int, tiled: bool, **how: Any) -> jax.Array:
    own = (x.shape[dimension] // lax.axis_size(axes),) if tiled else ()
    shape = (*x.shape[:dimension], *own, *x.shape[dimension + 1 :])
    return _fused("psum_scatter", x, shape, math.prod(x.shape[:dimension]), axes=axes, **how)


def _fused_all_to_all(
    x: jax.Array, *, axes: tuple[str, ...], split: int, concat: int, tiled: bool, **how: Any
) -> jax.Array:
    world = lax.axis_size(axes)
    own = (x.shape[split] // world,) if tiled else ()
    part = (*x.shape[:split], *own, *x.shape[split + 1 :])
    if tiled:
        shape = (*part[:concat], world * part[concat], *part[concat + 1 :])
    else:
        shape = (*part[:concat], world, *part[concat:])
    outer, out_outer = math.prod(x.shape[:split]), math.prod(part[:concat])
    return _fused("all_to_all", x, shape, outer, out_outer, axes=axes, **how)


def _fused(
    operation: str,
    x: jax.Array,
    shape: tuple[int, ...],
    outer: int = 1,
    out_outer: int = 1,
    *,
    axes: tuple[str, ...],
    config: tuple[tuple[str, Any], ...],
    compute_capability: int,
    implementation: str | None = None,
) -> jax.Array:
    """The kernel on the elements of x in their order.

    Args:
      shape: of the result.
      outer, out_outer: how many pieces a rank's part lies in, in the whole array and in the result of `all_to_all`.
    """
    del compute_capability
    world = lax.axis_size(axes)
    if reasons := _unsupported(operation, x, world):
        raise Unsupported(operation, reasons)
    size = _elements(operation, x, world)
    call = Call(size=size, outer=outer, out_outer=out_outer, world=world, dtype=np.dtype(x.dtype))
    chosen = choose(operation, VARIANTS[operation], call, dict(config))
    kernel, keywords = chosen.variant.kernel, chosen.keywords
    out = shmem_call(kernel, x.reshape(-1), axis_name=axes, implementation=implementation, **keywords)
    return out.reshape(shape)


def _dimension(operation: str, name: str, dimension: int, dimensions: int) -> int:
    """The keyword `name`, a dimension, counted from 0; raises ValueError if there is none such."""
    dimension = check_whole(operation, name, dimension)
    if not -dimensions <= dimension < dimensions:
        raise ValueError(f"{operation} cannot take dimension {dimension} of {dimensions}.")
    return dimension % dimensions


def _apply(
    primitive: Any, x: jax.Array, axes: tuple[str, ...], implementation: str | None, config: Any, **params: Any
) -> jax.Array:
    check_implementation(implementation)
    world = lax.axis_size(axes)
    settings = settings_of(primitive.name, VARIANTS[primitive.name], config)
    reasons = _unsupported(primitive.name, x, world)
    if takes_reference(primitive.name, [x], implementation, reasons):
        return REFERENCES[primitive.name](x, axes=axes, **params)
    return primitive.bind(vary(x, axes), axes=axes, implementation=implementation, config=settings, **params)


def _elements(operation: str, x: Any, world: int) -> int:
    """Of x of `psum`; of a rank's part of the others."""
    return x.size // world if operation in ("psum_scatter", "all_to_all") else x.size


def _unsupported(operation: str, x: Any, world: int) -> list[str]:
    """All that keeps the kernel from taking x."""
    if reasons := symbolic(x):
        return reasons
    if x.dtype.name not in DTYPES:
        reasons.append(Lasting(f"it takes {', '.join(DTYPES)}, not {x.dtype}: cast it"))
    if unreduced := sorted(jax.typeof(x).mat.unreduced):
        reasons.append(
            Lasting(
                f"it takes values of a rank, not terms of a sum that is unreduced along {unreduced}: leave out what "
                "makes them unreduced"
            )
        )
    if x.size == 0:
        reasons.append(f"the operand is empty: {list(x.shape)}")
    if (elements := world * _elements(operation, x, world)) > MOST_ELEMENTS:
        reasons.append(f"it takes at most {MOST_ELEMENTS} elements of all ranks, not {elements}")
    return reasons


# The most bytes for which implementation=None takes the kernel: of a rank's operand; of psum_scatter of its result, of
# all_to_all of a part.
FASTER_UP_TO = {"psum": 4 << 20, "all_gather": 4 << 20, "psum_scatter": 1 << 20, "all_to_all": 4 << 20}


def _slower(operation: str) -> Callable[..., str | None]:
    def why(x: Any, *, axes: tuple[str, ...], **_: Any) -> str | None:
        """Why XLA is taken."""
        world = lax.axis_size(axes)
        if world == 1:
            return "there is one rank, so nothing to send"
        most = FASTER_UP_TO[operation]
        if _elements(operation, x, world) * x.dtype.itemsize > most:
            return f"XLA is faster for more than {most} bytes of a rank" if most else UNMEASURED
        return None

    return why


def case(operation: str, x: Any, *, team: Team, **_: Any) -> Case:
    """What the tables know a call by."""
    size = _elements(operation, x, team.world)
    return Case(
        operation=operation,
        device_kind=team.device_kind,
        same={"world": team.world, "dtype": x.dtype.name},
        along="size",
        size=size,
        choose=lambda size, settings: choose(
            operation, VARIANTS[operation], Call(size=size, world=team.world, dtype=np.dtype(x.dtype)), settings
        ),
    )


def _dimensions_psum(x: Any, **_: Any) -> tuple[Labels, Labels]:
    labels = _labels(x)
    return [labels], [labels]


def _dimensions_all_gather(x: Any, *, dimension: int, tiled: bool, **_: Any) -> tuple[Labels, Labels]:
    labels = _labels(x)
    if tiled:
        labels[dimension] = None
        return [labels], [labels]
    return [labels], [[*labels[:dimension], None, *labels[dimension:]]]


def _dimensions_psum_scatter(x: Any, *, dimension: int, tiled: bool, **_: Any) -> tuple[Labels, Labels]:
    labels = _labels(x)
    labels[dimension] = None
    return [labels], [labels if tiled else [*labels[:dimension], *labels[dimension + 1 :]]]


def _dimensions_all_to_all(x: Any, *, split: int, concat: int, tiled: bool, **_: Any) -> tuple[Labels, Labels]:
    labels = _labels(x)
    labels[split] = None
    if tiled:
        labels[concat] = None
        return [labels], [labels]
    part = [*labels[:split], *labels[split + 1 :]]
    return [labels], [[*part[:concat], None, *part[concat:]]]


def _labels(x: Any) -> list[str | None]:
    return [str(i) for i in range(len(x.shape))]


def _transpose_psum(ct: Any, x: Any, *, axes: tuple[str, ...], **params: Any) -> jax.Array:
    if set(axes) <= x.aval.mat.varying:
        return vary(ct, axes)  # with types that say so, the sum is the same everywhere, and so is its cotangent
    return psum_p.bind(ct, axes=axes, **params)


def _transpose_all_gather(ct: Any, _: Any, **params: Any) -> jax.Array:
    return psum_scatter_p.bind(ct, **params | {"config": ()})


def _transpose_psum_scatter(ct: Any, _: Any, **params: Any) -> jax.Array:
    return all_gather_p.bind(ct, **params | {"config": ()})


def _transpose_all_to_all(ct: Any, _: Any, *, split: int, concat: int, **params: Any) -> jax.Array:
    return all_to_all_p.bind(ct, split=concat, concat=split, **params | {"config": ()})


def _batch_psum(dim: int, **_: Any) -> tuple[int, dict[str, Any]]:
    return dim, {}


def _batch_all_gather(dim: int, *, dimension: int, tiled: bool, **_: Any) -> tuple[int, dict[str, Any]]:
    if dim <= dimension:
        return dim, {"dimension": dimension + 1}
    return dim + (not tiled), {}


def _batch_psum_scatter(dim: int, *, dimension: int, tiled: bool, **_: Any) -> tuple[int, dict[str, Any]]:
    if dim <= dimension:
        return dim, {"dimension": dimension + 1}
    return dim - (not tiled), {}


def _batch_all_to_all(dim: int, *, split: int, concat: int, tiled: bool, **_: Any) -> tuple[int, dict[str, Any]]:
    if tiled:
        return dim, {"split": split + (dim <= split), "concat": concat + (dim <= concat)}
    split += dim <= split
    in_part = dim - (dim > split)  # where it is in a part
    concat += in_part <= concat
    return in_part + (concat <= in_part), {"split": split, "concat": concat}


psum_p = linear(
    "psum",
    reference=_psum,
    fused=_fused_psum,
    slower=_slower("psum"),
    dimensions=_dimensions_psum,
    case=functools.partial(case, "psum"),
    transpose=_transpose_psum,
    batch_dimension=_batch_psum,
)
all_gather_p = linear(
    "all_gather",
    reference=_all_gather,
    fused=_fused_all_gather,
    slower=_slower("all_gather"),
    dimensions=_dimensions_all_gather,
    case=functools.partial(case, "all_gather"),
    transpose=_transpose_all_gather,
    batch_dimension=_batch_all_gather,
)
psum_scatter_p = linear(
    "psum_scatter",
    reference=_psum_scatter,
    fused=_fused_psum_scatter,
    slower=_slower("psum_scatter"),
    dimensions=_dimensions_psum_scatter,
    case=functools.partial(case, "psum_scatter"),
    transpose=_transpose_psum_scatter,
    batch_dimension=_batch_psum_scatter,
)
all_to_all_p = linear(
    "all_to_all",
    reference=_all_to_all,
    fused=_fused_all_to_all,
    slower=_slower("all_to_all"),
    dimensions=_dimensions_all_to_all,
    case=functools.partial(case, "all_to_all"),
    transpose=_transpose_all_to_all,
    batch_dimension=_batch_all_to_all,
)
