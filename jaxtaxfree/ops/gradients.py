"""The derivatives of the fused matmuls. Two are each other's transpose, so they stay fused forward and backward.

With x sharded on rows, G = all_gather(x), and S for the sum over the ranks of which each keeps its own rows:

| result | gradient of the first operand, from that of the result ct | of the second |
|---|---|---|
| `all_gather_matmul` G w | S(ct w^T) | G^T ct |
| `matmul_reduce_scatter` S(y w) | all_gather(ct) w^T | y^T all_gather(ct) |
| `matmul_all_reduce` psum(y w) | ct w^T | y^T ct |

Nothing is gathered twice: the kernel that gathers, G w forward or all_gather(ct) w^T backward, gives the gathered rows
as well, and the gradient of the second operand is a plain product with them. Only where the first operand of
`matmul_reduce_scatter` is not differentiated there is no such kernel, and XLA gathers.

The operands of the products are never transposed in memory: the kernels read them as they lie.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxtaxfree.ops import all_gather_matmul, matmul, matmul_all_reduce, matmul_reduce_scatter
from jaxtaxfree.ops.all_gather_matmul import all_gather_matmul_p, gathered_too_p, several
from jaxtaxfree.ops.all_gather_matmul.several import several_p
from jaxtaxfree.ops.collectives import psum_scatter
from jaxtaxfree.ops.epilogue import Epilogue
from jaxtaxfree.ops.matmul_all_reduce import matmul_all_reduce_p
from jaxtaxfree.ops.matmul_all_reduce import reference as matmul_then_psum
from jaxtaxfree.ops.matmul_reduce_scatter import matmul_reduce_scatter_p
from jaxtaxfree.ops.scaled import UNSCALED, Scaling
from jaxtaxfree.primitive import composed, jvp_of
from jaxtaxfree.teams import explicit_sharding, resharded, whole


def _gather(
    x: Any,
    w: Any,
    axis: int,
    transposed: bool,
    like: Any,
    params: dict[str, Any],
    primitive: Any = all_gather_matmul_p,
) -> Any:
    """G @ w, or G @ w^T; by `gathered_too_p` G as well."""
    return _bind(primitive, x, w, like, params, axis=axis, rhs_transposed=transposed)


def _scatter(y: Any, w: Any, dimension: int, transposed: bool, like: Any, params: dict[str, Any]) -> jax.Array:
    """S(y @ w), or S(y @ w^T)."""
    return _bind(matmul_reduce_scatter_p, y, w, like, params, scatter_dimension=dimension, rhs_transposed=transposed)


def _contract(x: Any, y: Any, swapped: bool, weights: Any, params: dict[str, Any]) -> jax.Array:
    """x^T @ y, or y^T @ x, over all dimensions but the last: the gradient of weights of this type."""
    left, right = (y, x) if swapped else (x, y)
    rows = tuple(range(left.ndim - 1))
    return lax.dot_general(
        left,
        right,
        ((rows, rows), ((), ())),
        precision=params["precision"],
        preferred_element_type=weights.dtype,
        out_sharding=explicit_sharding(weights),
    )


def _bind(
    primitive: Any, lhs: Any, rhs: Any, like: Any, params: dict[str, Any], *, rhs_transposed: bool, **own: Any
) -> Any:
    """A product that is the gradient of an operand of the type `like`."""
    # In a gradient these are columns of the weights, which may be sharded along an Explicit axis.
    lhs, rhs = whole(lhs, lhs.ndim - 1), whole(rhs, 1 if rhs_transposed else 0)
    axes, precision, implementation = (params[name] for name in ("axes", "precision", "implementation"))
    if isinstance(precision, tuple) and not isinstance(precision, lax.DotAlgorithm):
        precision = precision[0] if precision[0] == precision[1] else None
    if lhs.dtype != rhs.dtype:
        implementation = None  # the kernels take one dtype, and who insisted on them gave one
    spec = like.sharding.spec
    outs = matmul.bind(
        primitive,
        lhs,
        rhs,
        axes=axes,
        precision=precision,
        preferred_element_type=like.dtype,
        implementation=implementation,
        config=None,  # is of another kernel
        rhs_transposed=rhs_transposed,
        **own,
    )
    if primitive.multiple_results:
        return [resharded(outs[0], spec), *outs[1:]]
    return resharded(outs, spec)


def _gather_lhs(ct: Any, lhs: Any, rhs: Any, *, axis: int, rhs_transposed: bool, **params: Any) -> jax.Array:
    return _scatter(ct, rhs, axis, not rhs_transposed, lhs.aval, params)


def _gather_rhs(ct: Any, lhs: Any, rhs: Any, *, axis: int, rhs_transposed: bool, **params: Any) -> jax.Array:
    gathered = lax.all_gather(lhs, params["axes"], axis=axis, tiled=True)
    return _contract(gathered, ct, rhs_transposed, rhs.aval, params)


def _scatter_lhs(
    ct: Any, lhs: Any, rhs: Any, *, scatter_dimension: int, rhs_transposed: bool, **params: Any
) -> jax.Array:
    return _gather(ct, rhs, scatter_dimension, not rhs_transposed, lhs.aval, params)


def _scatter_rhs(
    ct: Any, lhs: Any, rhs: Any, *, scatter_dimension: int, rhs_transposed: bool, **params: Any
) -> jax.Array:
    gathered = lax.all_gather(ct, params["axes"], axis=scatter_dimension, tiled=True)
    return _contract(lhs, gathered, rhs_transposed, rhs.aval, params)


ad.defbilinear(all_gather_matmul_p, _gather_lhs, _gather_rhs)
ad.defbilinear(matmul_reduce_scatter_p, _scatter_lhs, _scatter_rhs)


def _gather_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, Any]:
    (lhs, rhs), (lhs_dot, rhs_dot) = primals, tangents
    if type(rhs_dot) is ad.Zero:
        return all_gather_matmul_p.bind(lhs, rhs, **params), all_gather_matmul_p.bind(lhs_dot, rhs, **params)
    out, gathered = gathered_too_p.bind(lhs, rhs, **params)
    out_dot = _times_gathered(gathered, rhs_dot, out.dtype, **params)
    if type(lhs_dot) is not ad.Zero:
        out_dot = ad.add_tangents(all_gather_matmul_p.bind(lhs_dot, rhs, **params), out_dot)
    return out, out_dot


def _times_gathered(
    gathered: jax.Array, rhs: jax.Array, dtype: Any, *, rhs_transposed: bool, precision: Any, **_: Any
) -> jax.Array:
    rhs = rhs.T if rhs_transposed else rhs
    return jnp.matmul(gathered, rhs, precision=precision, preferred_element_type=dtype)


ad.primitive_jvps[all_gather_matmul_p] = _gather_jvp


def _scatter_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[jax.Array, Any]:
    (lhs, rhs), (lhs_dot, rhs_dot) = primals, tangents
    scatter = functools.partial(matmul_reduce_scatter_p.bind, **params)
    if type(rhs_dot) is ad.Zero:
        out_dot = scatter(lhs_dot, rhs)
    elif type(lhs_dot) is ad.Zero:
        out_dot = scatter(lhs, rhs_dot)
    else:
        out_dot = _scatter_tangent_p.bind(lhs_dot, rhs_dot, lhs, rhs, **params)
    return scatter(lhs, rhs), out_dot


def _scatter_tangent(
    lhs_dot: jax.Array, rhs_dot: jax.Array, lhs: jax.Array, rhs: jax.Array, **params: Any
) -> jax.Array:
    """S(lhs_dot @ rhs) + S(lhs @ rhs_dot)."""
    scatter = functools.partial(matmul_reduce_scatter_p.bind, **params)
    return ad.add_tangents(scatter(lhs_dot, rhs), scatter(lhs, rhs_dot))


def _scatter_tangent_transpose(
    ct: Any,
    lhs_dot: Any,
    rhs_dot: Any,
    lhs: Any,
    rhs: Any,
    *,
    scatter_dimension: int,
    rhs_transposed: bool,
    **params: Any,
) -> list[Any]:
    own = {"scatter_dimension": scatter_dimension, "rhs_transposed": rhs_transposed}
    if not ad.is_undefined_primal(rhs_dot):
        return [_scatter_lhs(ct, lhs_dot, rhs, **own, **params), None, None, None]
    if not ad.is_undefined_primal(lhs_dot):
        return [None, _scatter_rhs(ct, lhs, rhs_dot, **own, **params), None, None]
    lhs_bar, gathered = _gather(ct, rhs, scatter_dimension, not rhs_transposed, lhs_dot.aval, params, gathered_too_p)
    return [lhs_bar, _contract(lhs, gathered, rhs_transposed, rhs_dot.aval, params), None, None]


# One linear function of both tangents, so that its transpose gathers once.
_scatter_tangent_p = composed("matmul_reduce_scatter_tangent", _scatter_tangent, _scatter_tangent_transpose)
ad.primitive_jvps[matmul_reduce_scatter_p] = _scatter_jvp


def _reduce_lhs(ct: Any, lhs: Any, rhs: Any, *, implementation: str | None, **params: Any) -> jax.Array:
    del implementation
    return jax.linear_transpose(lambda lhs: matmul_then_psum(lhs, rhs, **params), lhs.aval.to_ct_aval())(ct)[0]


def _reduce_rhs(ct: Any, lhs: Any, rhs: Any, *, implementation: str | None, **params: Any) -> jax.Array:
    del implementation
    return jax.linear_transpose(lambda rhs: matmul_then_psum(lhs, rhs, **params), rhs.aval.to_ct_aval())(ct)[0]


# Through the reference: with check_vma=True the result counts as the same on all ranks, so its gradient is there on all
# of them, and nothing is exchanged; with check_vma=False the transpose of a psum is a psum.
ad.defbilinear(matmul_all_reduce_p, _reduce_lhs, _reduce_rhs)


def _gathered_too_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    (lhs, rhs), (lhs_dot, rhs_dot) = primals, tangents
    out, gathered = gathered_too_p.bind(lhs, rhs, **params)
    out_dot, gathered_dot = (ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (out, gathered))
    if type(lhs_dot) is not ad.Zero:
        out_dot, gathered_dot = gathered_too_p.bind(lhs_dot, rhs, **params)
    if type(rhs_dot) is not ad.Zero:
        out_dot = ad.add_tangents(out_dot, _times_gathered(gathered, rhs_dot, out.dtype, **params))
    return [out, gathered], [out_dot, gathered_dot]


def _gathered_too_transpose(
    cts: Any, lhs: Any, rhs: Any, *, axis: int, rhs_transposed: bool, **params: Any
) -> list[Any]:
    """Of `gathered_too_p` as a linear function of one operand; the rule above leaves it as one of lhs."""
    ct, gathered_ct = cts
    if ad.is_undefined_primal(rhs):
        return [None, _gather_rhs(ct, lhs, rhs, axis=axis, rhs_transposed=rhs_transposed, **params)]
    parts = []
    if type(ct) is not ad.Zero:
        parts.append(_scatter(ct, rhs, axis, not rhs_transposed, lhs.aval, params))
    if type(gathered_ct) is not ad.Zero:
        parts.append(psum_scatter(gathered_ct, params["axes"], scatter_dimension=axis, tiled=True))
    return [functools.reduce(ad.add_tangents, parts), None]


ad.primitive_jvps[gathered_too_p] = _gathered_too_jvp
ad.primitive_transposes[gathered_too_p] = _gathered_too_transpose


def _several_jvp(
    primals: Any, tangents: Any, *, epilogue: tuple[Epilogue, ...], return_gathered: bool, **params: Any
) -> tuple[list[Any], list[Any]]:
    """Of products by several rhs. With epilogues they are an operation by itself, as in `_separate`."""
    if any(epilogue):
        return jvp_of(
            functools.partial(_several_separate, epilogue=epilogue, return_gathered=return_gathered, **params),
            primals,
            tangents,
        )
    (lhs, *rhs), (lhs_dot, *rhs_dots) = primals, tangents
    linear = functools.partial(several_p.bind, epilogue=epilogue, **params)
    of_rhs = any(type(dot) is not ad.Zero for dot in rhs_dots)
    outs = linear(lhs, *rhs, return_gathered=return_gathered or of_rhs)
    dots: list[Any] = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs]
    if type(lhs_dot) is not ad.Zero:
        found = linear(lhs_dot, *rhs, return_gathered=return_gathered)
        dots[: len(found)] = found
    for i, rhs_dot in enumerate(rhs_dots):
        if type(rhs_dot) is not ad.Zero:
            more = _times_gathered(
                outs[-1],
                rhs_dot,
                outs[i].dtype,
                rhs_transposed=params["rhs_transposed"],
                precision=params["precision"],
            )
            dots[i] = ad.add_tangents(dots[i], more)
    count = len(rhs) + return_gathered
    return outs[:count], dots[:count]


def _several_separate(
    lhs: jax.Array, *operands: jax.Array, epilogue: tuple[Epilogue, ...], **params: Any
) -> list[jax.Array]:
    rhs, others, _ = several.split(operands, epilogue)
    outs = several.linear(lhs, *rhs, **params)
    applied = [each.apply([out], own, out.dtype) for each, out, own in zip(epilogue, outs, others)]
    return [*applied, *outs[len(rhs) :]]


def _several_transpose(
    cts: Any, lhs: Any, *rhs: Any, axis: int, epilogue: tuple[Epilogue, ...], return_gathered: bool,
    rhs_transposed: bool, **params: Any,
) -> list[Any]:  # fmt: skip
    """Of products by several rhs as a linear function of one operand; the rule above leaves them as one of lhs."""
    del epilogue, return_gathered
    pairs = [(ct, each) for ct, each in zip(cts, rhs) if type(ct) is not ad.Zero]
    if not ad.is_undefined_primal(lhs):
        gathered = lax.all_gather(lhs, params["axes"], axis=axis, tiled=True)
        return [
            None,
            *(
                _contract(gathered, ct, rhs_transposed, each.aval, params)
                if ad.is_undefined_primal(each) and type(ct) is not ad.Zero
                else None
                for ct, each in zip(cts, rhs)
            ),
        ]
    parts = []
    if pairs:
        # One product for all, so that the sum is scattered once.
        ct, weights = (jnp.concatenate(each, axis=along) for each, along in zip(zip(*pairs), (-1, -1 - rhs_transposed)))
        parts.append(_scatter(ct, weights, axis, not rhs_transposed, lhs.aval, params))
    if len(cts) > len(rhs) and type(cts[-1]) is not ad.Zero:
        parts.append(psum_scatter(cts[-1], params["axes"], scatter_dimension=axis, tiled=True))
    return [functools.reduce(ad.add_tangents, parts), *(None for _ in rhs)]


ad.primitive_jvps[several_p] = _several_jvp
ad.primitive_transposes[several_p] = _several_transpose


def _separate(
    lhs: jax.Array,
    rhs: jax.Array,
    *operands: jax.Array,
    linear: Callable[..., Any],
    epilogue: Epilogue,
    **params: Any,
) -> list[jax.Array]:
    """A product with an epilogue as an operation by itself and then its epilogue, so that its gradients stay fused.

    Args:
      linear: (lhs, rhs, **params) -> the product, and whatever else the operation gives.
    """
    weights, others = epilogue.split(rhs, operands)
    if epilogue.gated:
        params["config"] = None  # is of another kernel
    # One product with a gate, too, so that lhs is gathered once.
    columns = 0 if params["rhs_transposed"] else 1
    product, *rest = linear(lhs, jnp.concatenate(list(weights.values()), axis=columns), **params)
    return [epilogue.apply(jnp.split(product, len(weights), axis=-1), others, product.dtype), *rest]


def _gather_linear(lhs: jax.Array, rhs: jax.Array, *, return_gathered: bool, **params: Any) -> list[jax.Array]:
    if return_gathered:
        return matmul.bind(gathered_too_p, lhs, rhs, **params)
    return [matmul.bind(all_gather_matmul_p, lhs, rhs, **params)]


def _scatter_linear(lhs: jax.Array, rhs: jax.Array, **params: Any) -> list[jax.Array]:
    return [matmul.bind(matmul_reduce_scatter_p, lhs, rhs, **params)]


def _reduce_linear(lhs: jax.Array, rhs: jax.Array, **params: Any) -> list[jax.Array]:
    return [matmul_all_reduce_p.bind(lhs, rhs, **params)]


def _define_jvp(module: Any, linear: Callable[..., Any]) -> None:
    """Of the operation of a module: with scales it is differentiated as its reference."""

    def scaled(*operands: jax.Array, implementation: str | None, **params: Any) -> list[jax.Array]:
        del implementation
        return jax.tree.leaves(module.reference(*operands, **params))

    def jvp(primals: Any, tangents: Any, *, scaling: Scaling = UNSCALED, **params: Any) -> Any:
        if scaling:
            function = functools.partial(scaled, scaling=scaling, **params)
        else:
            function = functools.partial(_separate, linear=linear, **params)
        return jvp_of(function, primals, tangents)

    ad.primitive_jvps[module.with_epilogue_p] = jvp


_define_jvp(all_gather_matmul, _gather_linear)
_define_jvp(matmul_reduce_scatter, _scatter_linear)
_define_jvp(matmul_all_reduce, _reduce_linear)
