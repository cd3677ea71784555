"""Which experts a token goes to, and with which weights: the routers of published models, in plain `jax.numpy`.

Each takes the logits [T, E] of a router and gives what `jaxtaxfree.moe` takes. The weights are f32 and differentiable.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxtaxfree.ops.untrusted import as_int32
from jaxtaxfree.primitive import check_whole

# Added to a sum of sigmoids before they are divided by it, as in DeepSeek-V3's `modeling_deepseek.py`.
_LITTLE = 1e-20


def top_k(
    logits: jax.Array,
    k: int,
    *,
    scores: Literal["softmax", "sigmoid", "logits"] = "softmax",
    bias: jax.Array | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    group_score: Literal["max", "top2"] = "max",
    normalise: Literal["none", "sum", "softmax"] = "none",
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The k experts of each token, those of the highest score first, and their weights.

    | model | keywords |
    |---|---|
    | Switch, GShard, Qwen2-MoE, DeepSeekMoE | none |
    | Mixtral | `scores="logits", normalise="softmax"`: softmax over the k |
    | Qwen3-MoE | `normalise="sum"` |
    | DeepSeek-V2 | `groups=8, top_groups=3, scale=16.0` |
    | DeepSeek-V3 | `scores="sigmoid", bias=b, groups=8, top_groups=4, group_score="top2", normalise="sum", scale=2.5` |

    Args:
      logits: [T, E].
      k: how many experts a token has, from 1 to E.
      scores: what the experts are compared by: softmax over all E, a sigmoid of each, or the logits themselves.
      bias: [E], added to the scores for the choice of experts (and groups) alone; weights are without it. It has no
        gradient.
      groups: the experts are in so many groups of equal size, one behind the other.
      top_groups: a token takes experts of so many groups alone; None: of all.
      group_score: what groups are compared by: their highest score, or the sum of their two highest.
      normalise: what becomes of the k scores: "none"; "sum": divided by their sum; "softmax": softmax over them.
      scale: by which weights are multiplied last.

    Returns: experts i32[T, k] and weights f32[T, k]. Of equal scores the expert of the lower number comes first.

    Raises:
      ValueError: if a number or a name is none of these.
      TypeError: if k, groups or top_groups is no whole number.
    """
    logits = jnp.asarray(logits)
    bias = None if bias is None else jnp.asarray(bias)
    k, groups = check_whole("top_k", "k", k), check_whole("top_k", "groups", groups)
    top_groups = None if top_groups is None else check_whole("top_k", "top_groups", top_groups)
    experts = logits.shape[-1] if logits.ndim else 0
    _check(logits, k, groups, top_groups, group_score, {"scores": scores, "normalise": normalise}, bias)
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    found = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "logits": lambda x: x}[scores](wide)
    choice = lax.stop_gradient(found)
    if bias is not None:
        choice = choice + lax.stop_gradient(bias.astype(choice.dtype))
    if top_groups is not None and top_groups < groups:
        by_group = choice.reshape(*choice.shape[:-1], groups, experts // groups)
        highest = jnp.sum(lax.top_k(by_group, 2 if group_score == "top2" else 1)[0], axis=-1)
        _, best = lax.top_k(highest, top_groups)
        allowed = jnp.any(jax.nn.one_hot(best, groups, dtype=bool), axis=-2)
        choice = jnp.where(allowed[..., None], by_group, -jnp.inf).reshape(choice.shape)
    _, chosen = lax.top_k(choice, k)
    weights = jnp.take_along_axis(found, chosen, axis=-1)
    if normalise == "sum":
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + (_LITTLE if scores == "sigmoid" else 0))
    elif normalise == "softmax":
        weights = jax.nn.softmax(weights)
    return chosen.astype(jnp.int32), (scale * weights).astype(jnp.float32)


def _check(
    logits: jax.Array,
    k: int,
    groups: int,
    top_groups: int | None,
    group_score: str,
    names: dict[str, str],
    bias: jax.Array | None,
) -> None:
    experts = logits.shape[-1] if logits.ndim else 0
    known = {"scores": ("softmax", "sigmoid", "logits"), "normalise": ("none", "sum", "softmax")}
    for name, value in (*names.items(), ("group_score", group_score)):
        if value not in (allowed := known.get(name, ("max", "top2"))):
            raise ValueError(f"top_k takes {name} as one of {', '.join(map(repr, allowed))}, not {value!r}.")
    if logits.ndim != 2:
        raise ValueError(f"top_k takes logits [T, E], not {list(logits.shape)}.")
    if groups < 1 or experts % groups:
        raise ValueError(f"top_k takes groups of equal size, and {experts} experts are not in {groups}.")
    if top_groups is not None and not 1 <= top_groups <= groups:
        raise ValueError(f"top_k takes top_groups from 1 to {groups}, not {top_groups}.")
    most = experts // groups * (groups if top_groups is None else top_groups)
    if not 1 <= k <= most:
        raise ValueError(f"top_k takes k from 1 to {most}, the experts that there are to choose from, not {k}.")
    if group_score == "top2" and experts // groups < 2:
        raise ValueError("top_k takes group_score='top2' for groups of two experts or more.")
    if bias is not None and bias.shape != (experts,):
        raise ValueError(f"top_k takes a bias [{experts}], one for each expert, not {list(bias.shape)}.")


def load(experts: jax.Array, count: int) -> jax.Array:
    """How often each of `count` experts was chosen: i32[count]. Numbers outside of 0 <= expert < count are left out."""
    experts = jnp.asarray(experts)
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(f"load takes experts as integers, not {experts.dtype}.")
    experts = as_int32(experts)
    inside = (experts >= 0) & (experts < count)
    return jnp.zeros(count + 1, jnp.int32).at[jnp.where(inside, experts, count)].add(1)[:count]


def balance_loss(logits: jax.Array, experts: jax.Array, axis_name: Any = None) -> jax.Array:
    """The auxiliary loss that keeps the load of experts even, f32[]; 1 where it is.

    E * sum over e of f_e * P_e, where f_e is the share of choices that fell on expert e, and P_e its mean probability
    (Switch Transformers, arXiv:2101.03961, equations 4 to 6, for k choices of a token).

    Args:
      logits: [T, E].
      experts: i32[T, k], from `top_k`.
      axis_name: mesh axes over whose ranks both means are taken; None: those of this rank.
    """
    count = logits.shape[-1]
    share = load(experts, count).astype(jnp.float32) / max(1, experts.size)
    mean = jnp.mean(jax.nn.softmax(logits.astype(jnp.float32)), axis=0)
    if axis_name is not None:
        share, mean = lax.pmean(share, axis_name), lax.pmean(mean, axis_name)
    return count * jnp.sum(share * mean)
