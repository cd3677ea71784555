"""Runs a program as its plan says."""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import source_info_util
from jax.extend.core import Literal

from jaxtaxfree.fusion.find import Replacement
from jaxtaxfree.fusion.graph import Node, Value
from jaxtaxfree.fusion.plan import Plan


def run(plan: Plan, consts: Sequence[Any], args: Sequence[Any], implementation: str | None) -> list[Any]:
    """What the program returns, with the operations in their places."""
    graph = plan.graph
    env: dict[Value, Any] = dict(zip([*graph.consts, *graph.args], [*consts, *args], strict=True))

    def read(value: Any) -> Any:
        return value.val if isinstance(value, Literal) else env[value]

    for step in plan.steps:
        eqn = step.eqn if isinstance(step, Node) else step.nodes[-1].eqn
        ins = list(map(read, step.ins))
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            if isinstance(step, Replacement):
                outs = step.run(ins, implementation)
            else:
                assert isinstance(step, Node)
                outs = _again(step, ins, plan.inner.get(step, {}), implementation)
        env.update(zip(step.outs, outs, strict=True))
    return list(map(read, graph.outs))


def _again(node: Node, ins: Sequence[Any], inner: Any, implementation: str | None) -> Sequence[Any]:
    """What a node makes, with the plans of its jaxprs."""
    primitive, params = node.eqn.primitive, dict(node.params)
    if inner and primitive.name == "shard_map":
        return _shard_map(params, inner["jaxpr"], ins, implementation)
    for name, plans in inner.items():
        olds = params[name]
        if isinstance(plans, list):
            params[name] = type(olds)(_jaxpr(old, each, implementation) for old, each in zip(olds, plans))
        else:
            params[name] = _jaxpr(olds, plans, implementation)
    outs = primitive.bind(*ins, **primitive.get_bind_params(params))
    return outs if primitive.multiple_results else [outs]


def _shard_map(params: Any, plan: Plan, ins: Sequence[Any], implementation: str | None) -> Sequence[Any]:
    consts = params["jaxpr"].consts
    body = jax.shard_map(
        lambda *parts: tuple(run(plan, consts, parts, implementation)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return body(*ins)


def _jaxpr(old: Any, plan: Plan, implementation: str | None) -> Any:
    """The jaxpr of a plan, of the types of the one that it replaces."""
    new = jax.make_jaxpr(lambda *args: run(plan, old.consts, args, implementation))(*old.in_avals)
    if [str(x) for x in new.out_avals] != [str(x) for x in old.out_avals]:
        raise TypeError(
            f"jaxtaxfree.fuse made {new.out_avals} of {old.out_avals}; please report the program. Without fuse it runs."
        )
    return new
