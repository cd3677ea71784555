"""`moe`: a layer of experts whose weights are divided among ranks, for tokens that come with their choice of experts.

It is composed: choices find their places, rows are dispatched, multiplied by `ragged_dot`, and combined. So every step
is a kernel where its kernel is taken, and plain `lax` elsewhere, and its derivatives are theirs. Sizes are read on the
devices alone.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtaxfree.ops.collectives import all_gather, psum, psum_scatter
from jaxtaxfree.ops.epilogue import ACTIVATIONS, activation_name, wide_type
from jaxtaxfree.ops.moe.exchange import combine, dispatch
from jaxtaxfree.ops.moe.places import places
from jaxtaxfree.ops.moe.rows import collect, spread
from jaxtaxfree.ops.narrow import LHS_BLOCKS, straight_through
from jaxtaxfree.ops.quantize import DTYPES, is_eight_bits, quantize
from jaxtaxfree.ops.ragged_all_to_all import ragged_all_to_all
from jaxtaxfree.ops.ragged_dot import ragged_dot
from jaxtaxfree.ops.untrusted import as_int32
from jaxtaxfree.primitive import check_implementation, check_whole
from jaxtaxfree.teams import check_axes, vary, varying

PARALLEL = ("expert", "tensor")
MATRICES = ("w_gate", "w_up", "w_down")


class _Kind(NamedTuple):
    """How a layer is divided.

    Attributes:
      expert, tensor: the axes along which ranks have experts of their own, and parts of every expert; () for none.
      replicated: all ranks have all tokens.
    """

    expert: tuple[str, ...]
    tensor: tuple[str, ...]
    replicated: bool

    def gathers(self, choices: int) -> bool:
        """Whether each rank takes all rows of all ranks along the expert axes, and picks those of its own experts.

        A row then crosses once to each other rank, and comes back as one sum. Of k choices (world - 1) / world cross on
        average when each travels by itself, which is more from k = world on.
        """
        return bool(self.expert) and (self.replicated or choices >= lax.axis_size(self.expert))


def moe(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    axis_name: str | Sequence[str],
    *,
    parallel: str | Sequence[str] = "expert",
    activation: Any = "silu",
    tokens: str = "sharded",
    capacity: int | None = None,
    shared: Sequence[jax.Array | None] | None = None,
    w_gate_scale: jax.Array | None = None,
    w_up_scale: jax.Array | None = None,
    w_down_scale: jax.Array | None = None,
    weights_transposed: bool = False,
    quantize_rows: str | None = None,
    return_dropped: bool = False,
    precision: Any = None,
    implementation: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """A mixture of experts: the sum over a token's k experts of `weights * (act(x @ w_gate) * (x @ w_up)) @ w_down`.

    Call it inside `jax.shard_map`. `jaxtaxfree.routing` has routers that choose the experts.

    Args:
      x: [T, D], this rank's tokens; with tokens="replicated" all tokens.
      experts: i32[T, k], the experts of each token, numbered over all ranks. A token may have an expert twice. A number
        below 0 or above the last expert is none: this choice is dropped.
      weights: [T, k], by which the experts' results are multiplied.
      w_gate, w_up: [E / W, D, F], this rank's experts, in the order of the ranks; with parallel="tensor"
        [E, D, F / W]. w_gate may be None: then the activation is that of `x @ w_up`.
      w_down: [E / W, F, D]; with parallel="tensor" [E, F / W, D].
      axis_name: the mesh axis, or axes; with parallel=("expert", "tensor") a pair, one of each: (ep, tp). Weights are
        then [E / ep, D, F / tp] and [E / ep, F / tp, D].
      parallel: "expert", "tensor", or both.
      activation: as of `ragged_dot`.
      tokens: "sharded": each rank has tokens of its own, and gets their results. "replicated": each rank has all
        tokens, and gets all results.
      capacity: the most rows, one for each choice of a token, that a rank multiplies with its experts. None: as many as
        there can be, so that none is ever dropped. Rows count in the order of the ranks that send them, those of a rank
        by expert, those of an expert by token; what comes behind `capacity` is dropped, and adds nothing to its token.
      shared: (w_gate, w_up, w_down) of an expert that every token has, with weight 1: [D, F'] and [F', D], the same on
        all ranks; along a tensor axis [D, F' / W] and [F' / W, D].
      w_gate_scale, w_up_scale, w_down_scale: by what weights of 8 bits (see `quantize`) are multiplied, f32, of this
        rank's experts, as `rhs_scale` of `ragged_dot`: [], [E / W, 1, columns], or of blocks [E / W, ceil(rows / 128),
        ceil(columns / 128)], turned over with weights_transposed. A block must not lie on two ranks of a tensor axis.
      weights_transposed: of 8 bits only: w_gate and w_up are [E / W, F, D], and w_down [E / W, D, F], as the kernel for
        8 bits reads them.
      quantize_rows: "row" or "block" (1 x 128): the rows of both products become 8 bits as well, of the dtype of the
        weights; tokens before they travel, so 8 bits cross. Gradients are those of the layer whose rows stay, as with
        `quantize_lhs` of the products. None: they stay.
      return_dropped: return also how many choices were dropped on all ranks, i32[], the same on each.
      precision: as of `ragged_dot`, of all products.
      implementation: as of `ragged_dot`, of all kernels.
      config: of `ragged_dot`.

    Returns: [T, D] of the dtype of x. A token's results on a rank are added in f32 in the order of its choices, and the
      sums of the ranks in f32 in their order. Of more than 512 KB of tokens a rank each of these sums is rounded to the
      dtype of x on its way, unless shared experts lie along a tensor axis: their results are added before. With fewer
      choices than ranks all results of a token are added by its owner, in the order of its choices.

    Raises:
      ValueError: if the arrays do not fit together, or a keyword is none of these.
      TypeError: if an axis has the wrong type.
      NameError: if an axis is not bound.
      NotImplementedError: if implementation="fused" (or "simulate") cannot run here.
    """
    kind = _kind(axis_name, parallel, tokens)
    x, experts, weights = jnp.asarray(x), jnp.asarray(experts), jnp.asarray(weights)
    w_up, w_down = jnp.asarray(w_up), jnp.asarray(w_down)
    check_implementation(implementation)
    activation_name("moe", activation)
    scales = {"w_gate": w_gate_scale, "w_up": w_up_scale, "w_down": w_down_scale}
    matrices = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    _check_narrow(matrices, scales, weights_transposed, quantize_rows)
    _check_operands(x, experts, weights, w_gate, w_up, w_down, weights_transposed)
    if shared is not None:
        _check_shared(shared, x.shape[1])
    if capacity is not None and (capacity := check_whole("moe", "capacity", capacity)) < 1:
        raise ValueError(f"moe takes a capacity of at least 1, or None, not {capacity}.")
    if not x.shape[0]:
        return (x, jnp.int32(0)) if return_dropped else x
    how: dict[str, Any] = {"precision": precision, "implementation": implementation, "config": config}
    how["rhs_transposed"] = weights_transposed
    operands = {"x": x, "experts": as_int32(experts), "weights": weights, "shared": shared, "scales": scales}
    operands |= matrices
    run = functools.partial(
        _run, kind=kind, capacity=capacity, activation=activation, return_dropped=return_dropped, how=how
    )
    if quantize_rows is None:
        return run(operands)
    return straight_through(functools.partial(run, quantize_rows=quantize_rows), run)(operands)


def _run(
    operands: Mapping[str, Any],
    *,
    kind: _Kind,
    capacity: int | None,
    activation: Any,
    return_dropped: bool,
    how: Mapping[str, Any],
    quantize_rows: str | None = None,
) -> Any:
    """The layer, of operands that have been checked."""
    x, experts, weights, shared = (operands[name] for name in ("x", "experts", "weights", "shared"))
    w_up, implementation = operands["w_up"], how["implementation"]
    gather = functools.partial(all_gather, tiled=True, implementation=implementation)
    multiply = functools.partial(
        _multiply, matrices={name: operands[name] for name in MATRICES}, scales=operands["scales"],
        dtype=x.dtype, quantize_rows=quantize_rows, activation=activation, how=how,
    )  # fmt: skip
    layer = _Layer(kind, w_up.shape[0], capacity, multiply, x.dtype, implementation)
    inside = (experts >= 0) & (experts < layer.here * lax.axis_size(kind.expert))
    experts = jnp.where(inside, experts, -1)
    gathers = kind.gathers(experts.shape[1])
    # Along these axes all ranks have all tokens; and of these, along `axes` they get them.
    along = (*(kind.expert if gathers else ()), *kind.tensor)
    axes = () if kind.replicated else along
    all_experts, all_weights = _gathered(experts, weights, axes, implementation)
    # Tokens are gathered along the tensor axes first where rows are exchanged behind, or shared experts take them too.
    is_first = shared is not None or (kind.expert and not gathers)
    first = kind.tensor if is_first and not kind.replicated else ()
    # Shared experts take them as they are, so then they are quantised where all of them are.
    all_x = gather(x, first) if first and shared is not None else x
    tokens = _as_rows(all_x, w_up.dtype, quantize_rows)
    if first and shared is None:
        tokens = tuple(gather(each, first) for each in tokens)
    if gathers or not kind.expert:
        # What is still to be added up is not rounded before.
        dtype = wide_type(x.dtype) if kind.replicated or first else x.dtype
        rest = tuple(axis for axis in axes if axis not in first)
        out, kept = layer.own(tokens, all_experts, all_weights, rest, dtype)
    else:
        out, kept = layer.exchanged(tokens, all_experts, all_weights)
    left = along if kind.replicated else first  # the axes along which it is still to be added up
    if shared is not None:
        # Ranks along an expert axis have the same shared experts, each for its own tokens.
        out = _summed(out, tuple(axis for axis in left if axis not in kind.tensor), True, implementation)
        out, left = out + _shared(all_x, shared, activation, how["precision"]), kind.tensor
    out = _summed(out, left, kind.replicated, implementation).astype(x.dtype)
    return (out, _dropped(all_experts.size, kept, kind, gathers)) if return_dropped else out


def _kind(axis_name: Any, parallel: Any, tokens: str) -> _Kind:
    if tokens not in ("sharded", "replicated"):
        raise ValueError(f"moe takes tokens as 'sharded' or 'replicated', not {tokens!r}.")
    both = isinstance(parallel, tuple | list)
    names = tuple(parallel) if both else (parallel,)
    if names not in (("expert",), ("tensor",), PARALLEL):
        raise ValueError(f"moe takes parallel as 'expert', 'tensor' or {PARALLEL}, not {parallel!r}.")
    if both and len(names) == 2:
        if not isinstance(axis_name, tuple | list) or len(axis_name) != 2:
            raise ValueError(f"moe with parallel={PARALLEL} takes axis_name as a pair, one of each, not {axis_name!r}.")
        expert, tensor = (check_axes(each, "moe") for each in axis_name)
        check_axes((*expert, *tensor), "moe")  # none twice
    else:
        axes = check_axes(axis_name, "moe")
        expert, tensor = (axes, ()) if names == ("expert",) else ((), axes)
    return _Kind(expert, tensor, tokens == "replicated")


def _check_narrow(
    weights: Mapping[str, Any], scales: Mapping[str, Any], transposed: bool, quantize_rows: str | None
) -> None:
    """Raises ValueError unless weights of 8 bits have scales, and what is only for them comes with them."""
    narrow = {name: w is not None and is_eight_bits(jnp.asarray(w)) for name, w in weights.items()}
    for name, scale in scales.items():
        if narrow[name] != (scale is not None):
            found = "none" if weights[name] is None else jnp.asarray(weights[name]).dtype
            raise ValueError(
                f"moe takes {name}_scale with a {name} of {', '.join(DTYPES)}, and with no other, not with {found}: "
                f"{'give' if narrow[name] else 'leave out'} {name}_scale."
            )
    all_narrow = all(narrow[name] for name, w in weights.items() if w is not None)
    if quantize_rows not in (None, *LHS_BLOCKS):
        raise ValueError(f"moe takes quantize_rows as None, 'row' or 'block', not {quantize_rows!r}.")
    for name, given in (("weights_transposed", transposed), ("quantize_rows", quantize_rows)):
        if given and not all_narrow:
            raise ValueError(f"moe takes {name} with weights of {', '.join(DTYPES)} only: quantize all of them.")


def _check_operands(x: Any, experts: Any, weights: Any, w_gate: Any, w_up: Any, w_down: Any, transposed: bool) -> None:
    if x.ndim != 2 or experts.ndim != 2 or experts.shape[0] != x.shape[0] or weights.shape != experts.shape:
        raise ValueError(
            f"moe takes x [T, D], experts [T, k] and weights [T, k], not {list(x.shape)}, {list(experts.shape)} and "
            f"{list(weights.shape)}."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"moe takes x of floating-point numbers, not {x.dtype}: cast it, or dequantize it.")
    if not jnp.issubdtype(experts.dtype, jnp.integer) or experts.shape[1] == 0:
        raise ValueError(
            f"moe takes experts as integers [T, k], k at least 1, not {experts.dtype}{list(experts.shape)}."
        )
    e, *extents = w_up.shape if w_up.ndim == 3 else (0, 0, 0)
    d = extents[-1 if transposed else 0]
    if w_up.ndim != 3 or d != x.shape[1] or w_down.shape != (e, *reversed(extents)):
        up, down = ("[E, F, D]", "[E, D, F]") if transposed else ("[E, D, F]", "[E, F, D]")
        raise ValueError(
            f"moe takes w_up {up} and w_down {down} for x [T, D], of this rank, not {list(w_up.shape)} and "
            f"{list(w_down.shape)} for {list(x.shape)}."
        )
    if not e:
        raise ValueError(f"moe takes at least one expert of each rank, and w_up is {list(w_up.shape)}.")
    if w_gate is not None and jnp.shape(w_gate) != w_up.shape:
        raise ValueError(f"moe takes w_gate like w_up, {list(w_up.shape)}, not {list(jnp.shape(w_gate))}.")


def _check_shared(shared: Any, d: int) -> None:
    """Raises ValueError unless these are the arrays of an expert that every token has."""
    if not isinstance(shared, tuple | list) or len(shared) != 3:
        raise ValueError("moe takes shared as (w_gate, w_up, w_down), of which w_gate may be None.")
    shapes = [None if w is None else list(jnp.shape(w)) for w in shared]
    gate, up, down = shapes
    if up is None or len(up) != 2 or up[0] != d or down != up[::-1] or gate not in (None, up):
        raise ValueError(
            f"moe takes shared as w_gate [{d}, F'] or None, w_up [{d}, F'] and w_down [F', {d}] of this rank, not "
            f"{', '.join(map(str, shapes))}."
        )


def _gathered(
    experts: jax.Array, weights: jax.Array, axes: tuple[str, ...], implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    """Both [T, k], of all ranks, in one message: floats, which hold the number of every expert. Weights are f32."""
    wide = jnp.promote_types(weights.dtype, jnp.float32)
    if not axes:
        return experts, weights.astype(wide)
    both = jnp.concatenate([weights.astype(wide), experts.astype(wide)], axis=1)
    weights, found = jnp.split(all_gather(both, axes, tiled=True, implementation=implementation), 2, axis=1)
    return lax.stop_gradient(found).astype(jnp.int32), weights


def _summed(out: jax.Array, axes: tuple[str, ...], replicated: bool, implementation: str | None) -> jax.Array:
    """The sum of all ranks' parts: of this rank's tokens, or of all tokens on each."""
    if not axes:
        return out
    add = psum if replicated else functools.partial(psum_scatter, tiled=True)
    return add(vary(out, axes), axes, implementation=implementation)


# What travels to the experts: rows; or values of 8 bits, as int8, which every kernel moves, and their scales.
Rows = tuple[jax.Array, ...]


def _as_rows(x: jax.Array, dtype: Any, quantize_rows: str | None) -> Rows:
    """Tokens [T, D] as they travel, and are multiplied with weights of a dtype."""
    if quantize_rows is None:
        return (x,)
    values, scale = quantize(x, dtype, block=LHS_BLOCKS[quantize_rows])
    return lax.bitcast_convert_type(values, jnp.int8), scale


def _multiply(
    rows: Rows,
    sizes: jax.Array,
    *,
    matrices: Mapping[str, Any],
    scales: Mapping[str, Any],
    dtype: Any,
    quantize_rows: str | None,
    activation: Any,
    how: Mapping[str, Any],
) -> jax.Array:
    """The experts' results of rows that are in groups, one for each expert of this rank: [M, D].

    Args:
      matrices, scales: of the experts, by their names; None for what there is not.
      dtype: of the results, and of what is between the products.
    """
    w_gate, w_up, w_down = (matrices[name] for name in MATRICES)
    # One operand decides how all vary, and none may be left behind.
    along = set().union(*map(varying, (*rows, sizes, w_up, w_down)))
    sizes, w_up, w_down = (vary(each, along) for each in (sizes, w_up, w_down))
    gate = None if w_gate is None else vary(jnp.asarray(w_gate), along)
    found = {name: vary(jnp.asarray(scale), along) for name, scale in scales.items() if scale is not None}
    gate_scale, up_scale, down_scale = (found.get(name) for name in MATRICES)
    more = {"preferred_element_type": dtype} if found else {}

    def multiply(rows: Rows, w: jax.Array, scale: Any, **others: Any) -> jax.Array:
        values, *of_rows = (vary(each, along) for each in rows)
        if of_rows:
            values, others["lhs_scale"] = lax.bitcast_convert_type(values, w.dtype), of_rows[0]
        # Nobody reads rows that no choice has.
        return ragged_dot(values, w, sizes, rhs_scale=scale, fill=False, **others, **more, **how)

    hidden = multiply(rows, w_up, up_scale, gate=gate, gate_scale=gate_scale, activation=activation)
    return multiply(_as_rows(hidden, w_down.dtype, quantize_rows), w_down, down_scale)


class _Layer(NamedTuple):
    """What a rank does with rows, wherever they are.

    Attributes:
      kind: how the layer is divided.
      here: experts of a rank.
      capacity: as of `moe`.
      multiply: (rows, sizes of their groups) -> the experts' results.
      dtype: of these.
      implementation: of all kernels.
    """

    kind: _Kind
    here: int
    capacity: int | None
    multiply: Callable[[Rows, jax.Array], jax.Array]
    dtype: Any
    implementation: str | None

    def most(self, rows: int) -> int:
        return rows if self.capacity is None else min(self.capacity, rows)

    def own(
        self, tokens: Rows, experts: jax.Array, weights: jax.Array | None, axes: tuple[str, ...], dtype: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """What this rank's experts, or those of all ranks, add to tokens; and how many choices that are.

        Args:
          tokens: [T, D]; of each rank along `axes`, which all get all tokens and add up the results.
          experts, weights: [T, k] of all these tokens.
          dtype: of the result, by default that of the experts' results.

        Returns: ([T, D], i32[]).
        """
        expert = self.kind.expert
        if expert and weights is not None:  # else they are numbered by rank already
            experts = experts - lax.axis_index(expert) * self.here
        sources = lax.axis_size(tuple(axis for axis in axes if axis in expert))
        most = self.most(experts.size)
        place, sizes = places(experts, self.here, sources, most, implementation=self.implementation)
        rows = tuple(dispatch(each, place, most, axes, implementation=self.implementation) for each in tokens)
        out = self.multiply(rows, sizes)
        out = combine(out, place, axes, weights, dtype or self.dtype, implementation=self.implementation)
        return out, jnp.sum(sizes)

    def exchanged(self, tokens: Rows, experts: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sum of the results of all ranks' experts for this rank's tokens, [T, D]; and how many choices came."""
        axes, here = self.kind.expert, self.here
        world, me = lax.axis_size(axes), lax.axis_index(axes)
        chosen = functools.partial(places, implementation=self.implementation)
        place, counts = chosen(experts, world * here, 1, experts.size)
        most = self.most(world * experts.size)
        # [source, receiver, expert of the receiver]
        wanted = all_gather(counts, axes, implementation=self.implementation).reshape(world, world, here)
        # In the order of a receiver's rows, [receiver, source, expert], where each part ends.
        ends = jnp.cumsum(wanted.swapaxes(0, 1).reshape(world, world * here), axis=1)
        taken = jnp.diff(jnp.minimum(ends, most), axis=1, prepend=0).reshape(world, world, here)
        sizes = jnp.sum(taken, 2)  # [receiver, source]
        there = jnp.cumsum(sizes, 1) - sizes  # where a source's rows begin at a receiver
        by_receiver = jnp.sum(wanted, 2)  # [source, receiver]
        first = jnp.cumsum(by_receiver, 1) - by_receiver  # where they begin at their source
        to_experts = first[me], sizes[:, me], there[:, me], sizes[me]
        back = there[me], sizes[me], first[:, me], sizes[:, me]

        def exchange(rows: jax.Array, most: int, *parts: jax.Array) -> jax.Array:
            empty = jnp.zeros((most, rows.shape[1]), rows.dtype)
            return ragged_all_to_all(rows, empty, *parts, axis_name=axes, implementation=self.implementation)

        rows = (spread(each, place, experts.size, implementation=self.implementation) for each in tokens)
        came = tuple(exchange(each, most, *to_experts) for each in rows)
        # Each row that came is a token with one choice. What is behind the last one has none.
        end = jnp.cumsum(taken[me].reshape(-1))
        part = jnp.sum(jnp.arange(most, dtype=jnp.int32)[:, None] >= end, axis=1, dtype=jnp.int32)
        expert = jnp.where(part < world * here, part % here, here)
        out, kept = self.own(came, expert[:, None], None, ())
        found = exchange(out, experts.size, *back)
        return collect(found, place, weights, implementation=self.implementation), kept


def _shared(x: jax.Array, shared: Sequence[Any], activation: Any, precision: Any) -> jax.Array:
    """The result of the expert that every token has, f32."""
    gate, up, down = shared
    name = activation_name("moe", activation)
    activate = ACTIVATIONS[name] if name else lambda each: each
    multiply = functools.partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)
    hidden = multiply(x, up)
    hidden = activate(hidden) if gate is None else activate(multiply(x, gate)) * hidden
    return multiply(hidden.astype(x.dtype), down)


def _dropped(choices: int, kept: jax.Array, kind: _Kind, gathers: bool) -> jax.Array:
    """Choices that added nothing, of all ranks' tokens."""
    if not kind.expert:
        dropped = choices - kept
    else:
        kept = lax.psum(vary(kept, kind.expert), kind.expert)
        dropped = (choices if gathers else choices * lax.axis_size(kind.expert)) - kept
    # All ranks along a tensor axis count the same.
    return lax.pmax(vary(dropped, kind.tensor), kind.tensor) if kind.tensor else dropped
