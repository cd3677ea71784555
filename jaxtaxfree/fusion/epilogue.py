"""Finds what follows a product and is the epilogue of its operation: bias, activation, gate and residual."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.core import Jaxpr
from jax.extend.core import Literal

from jaxtaxfree.fusion.graph import CASTS, SAME, Atom, Node, Value, depends
from jaxtaxfree.fusion.step import Branch, Draft
from jaxtaxfree.primitive import DTYPES

# How programs write the activations that the kernels have.
WRITTEN: dict[str, tuple[Callable[[jax.Array], jax.Array], ...]] = {
    "silu": (jax.nn.silu, lambda x: x * jax.nn.sigmoid(x), lambda x: jax.nn.sigmoid(x) * x),
    "gelu_tanh": (jax.nn.gelu,),
    "gelu_exact": (functools.partial(jax.nn.gelu, approximate=False),),
}
# Parameters that say where an array lies, or how a call is to be compiled.
PLACES = ("sharding", "out_sharding", "in_shardings", "out_shardings", "in_layouts", "out_layouts", "ctx_mesh", "name")


def absorb(drafts: Sequence[Draft]) -> None:
    """Adds to each step of a program what follows it and is its epilogue.

    Each result takes the place of the last value of its epilogue. Values in between must have no other use.
    """
    taken = {node for draft in drafts for node in draft.nodes}
    for draft in drafts:
        if not draft.whole or draft.branches[0].product.dtype.name not in DTYPES:
            continue
        for branch in draft.branches:
            taken.update(_bias(draft, branch, taken))
            taken.update(_activation(draft, branch, taken))
        taken.update(_gate(draft, taken))
        if len(draft.branches) == 1 and draft.gate is None:
            taken.update(_residual(draft, draft.branches[0], taken))


def _follower(value: Value, taken: set[Node]) -> Node | None:
    """The only user of a value, if it gives one value of the same type that no step has."""
    if value.returned or len(value.users) != 1 or (node := value.users[0]) in taken or len(node.outs) != 1:
        return None
    before, after = value.aval, node.outs[0].aval
    return node if (before.shape, before.dtype) == (after.shape, after.dtype) else None


def _other(node: Node, value: Value) -> Atom:
    """The operand of a sum or a product of two that this is not."""
    return node.ins[1] if node.ins[0] is value else node.ins[0]


def _same_on_all_ranks(draft: Draft, value: Atom) -> bool:
    """Whether an operand of the epilogue of `matmul_all_reduce`, whose parts ranks add up for each other, is alike."""
    axes = set(draft.axes)
    mesh = draft.branches[0].dot.outs[0].aval.sharding.mesh
    if draft.operation != "matmul_all_reduce" or not mesh.manual_axes:
        return True
    # With check_vma=False nobody knows.
    known = axes <= draft.branches[0].dot.outs[0].aval.mat.varying
    return known and axes.isdisjoint(value.aval.mat.varying)


def _bias(draft: Draft, branch: Branch, taken: set[Node]) -> list[Node]:
    """Takes what is added to the columns; returns the nodes that this replaces."""
    node, plan = _follower(branch.out, taken), branch.product.plan
    if node is None or node.name != "add" or not branch.plain or plan.moved in plan.columns:
        return []
    wide = _other(node, branch.out)
    maker = wide.maker if isinstance(wide, Value) else None
    if maker is None or maker.name != "broadcast_in_dim" or len(maker.ins) != 1:
        return []
    (bias,) = maker.ins
    places = tuple(plan.out.labels.index(label) for label in plan.columns)
    lengths = tuple(branch.dot.outs[0].aval.shape[i] for i in places)
    if not isinstance(bias, Value) or bias.aval.shape != lengths or bias.aval.dtype != wide.aval.dtype:
        return []
    if tuple(maker.params["broadcast_dimensions"]) != places or not _same_on_all_ranks(draft, bias):
        return []
    if depends(bias, set(draft.nodes)):
        return []
    branch.bias = bias
    return _extended(draft, branch, [node])


def _activation(draft: Draft, branch: Branch, taken: set[Node]) -> list[Node]:
    """Takes an activation; returns the nodes that this replaces."""
    aval = branch.out.aval
    for name, functions in WRITTEN.items():
        for function in functions:
            found = _written(_jaxpr_of(function, aval.dtype), branch.out)
            if found and taken.isdisjoint(found) and found[-1].outs[0].aval.dtype == aval.dtype:
                branch.activation = name
                return _extended(draft, branch, found)
    return []


def _gate(draft: Draft, taken: set[Node]) -> list[Node]:
    """Makes one product of two that are multiplied with each other; returns the nodes that this replaces."""
    if len(draft.branches) != 2 or draft.operation != "all_gather_matmul":
        return []
    node = _follower(draft.branches[0].out, taken)
    if node is None or node.name != "mul" or _follower(draft.branches[1].out, taken) is not node:
        return []
    for gate, branch in (draft.branches, draft.branches[::-1]):
        if gate.bias is None and branch.activation is None and _are_one(gate, branch):
            draft.branches, draft.gate = [branch], gate
            branch.activation = gate.activation
            return _extended(draft, branch, [node])
    return []


def _are_one(gate: Branch, branch: Branch) -> bool:
    """Whether the weights of two products lie alike."""
    one, other = (each.operands.types[1] for each in (gate, branch))
    plans = gate.product.plan, branch.product.plan
    return one.shape == other.shape and plans[0].w == plans[1].w and plans[0].out == plans[1].out


def _residual(draft: Draft, branch: Branch, taken: set[Node]) -> list[Node]:
    """Takes what is added to a sum; returns the nodes that this replaces."""
    node = _follower(branch.out, taken)
    if node is None or node.name != "add" or draft.operation == "all_gather_matmul":
        return []
    residual = _other(node, branch.out)
    if not isinstance(residual, Value) or residual.aval.shape != branch.out.aval.shape:
        return []
    if residual is branch.out or not _same_on_all_ranks(draft, residual) or depends(residual, set(draft.nodes)):
        return []
    draft.residual = residual
    return _extended(draft, branch, [node])


def _extended(draft: Draft, branch: Branch, nodes: list[Node]) -> list[Node]:
    draft.nodes += nodes
    branch.out = nodes[-1].outs[0]
    return nodes


@functools.cache
def _jaxpr_of(function: Callable[[jax.Array], jax.Array], dtype: Any) -> Jaxpr:
    return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((2, 2), dtype))


def _written(pattern: Jaxpr, value: Value) -> list[Node]:
    """The nodes that make of a value what a function of one array does; none if they are not there.

    Values in between have no other users.
    """
    found: dict[Any, Value] = {pattern.invars[0]: value}
    nodes: list[Node] = []
    for eqn in pattern.eqns:
        known = [found[v] for v in eqn.invars if not isinstance(v, Literal)]
        node = next((node for node in known[0].users if _is(node, eqn, found)), None) if known else None
        if node is None:
            return []
        nodes.append(node)
        found[eqn.outvars[0]] = node.outs[0]
    last = found[pattern.outvars[0]]
    inner = [x for x in found.values() if x is not last]
    return nodes if all(not x.returned and set(x.users) <= set(nodes) for x in inner) else []


def _is(node: Node, eqn: Any, found: dict[Any, Value]) -> bool:
    if node.eqn.primitive is not eqn.primitive or len(node.ins) != len(eqn.invars) or len(node.outs) != 1:
        return False
    for x, v in zip(node.ins, eqn.invars, strict=True):
        if isinstance(v, Literal):
            constant = _constant(x)
            if constant is None or np.asarray(constant.val).astype(np.asarray(v.val).dtype) != v.val:
                return False
        elif x is not found[v]:
            return False
    return _same_params(node.params, eqn.params)


def _constant(x: Atom) -> Literal | None:
    """The number that a value is, which may have been made to vary along an axis."""
    while isinstance(x, Value) and x.maker is not None and x.maker.name in (*CASTS, *SAME) and not x.aval.shape:
        x = x.maker.ins[0]
    return x if isinstance(x, Literal) else None


def _same_params(mine: Any, its: Any) -> bool:
    """Whether parameters of two equations mean the same, wherever the arrays lie."""
    if mine.keys() != its.keys():
        return False
    for name, value in its.items():
        if isinstance(value, Jaxpr):
            if not _same_jaxpr(mine[name], value):
                return False
        elif name not in PLACES and mine[name] != value:
            return False
    return True


def _same_jaxpr(mine: Jaxpr, its: Jaxpr) -> bool:
    """Whether two programs compute the same of arrays of any shape."""
    if (len(mine.eqns), len(mine.invars), len(mine.outvars)) != (len(its.eqns), len(its.invars), len(its.outvars)):
        return False
    named = dict(zip(its.invars, mine.invars))

    def same(a: Any, b: Any) -> bool:
        if isinstance(b, Literal):
            return isinstance(a, Literal) and a.val == b.val
        return named.get(b) is a

    for a, b in zip(mine.eqns, its.eqns):
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars) or not all(map(same, a.invars, b.invars)):
            return False
        if not _same_params(a.params, b.params):
            return False
        named.update(zip(b.outvars, a.outvars))
    return all(map(same, mine.outvars, its.outvars))
