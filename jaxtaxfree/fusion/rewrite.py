"""Runs a program as its plan says."""

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import source_info_util
from jax._src.util import weakref_lru_cache
from jax.extend.core import Literal

from jaxtaxfree.fusion.graph import Node, Value
from jaxtaxfree.fusion.plan import Plan, plan
from jaxtaxfree.fusion.step import Replacement


def run(planned: Plan, consts: Sequence[Any], args: Sequence[Any], implementation: str | None) -> list[Any]:
    """What the program returns, with the operations in their places."""
    graph = planned.graph
    env: dict[Value, Any] = dict(zip([*graph.consts, *graph.args], [*consts, *args], strict=True))

    def read(value: Any) -> Any:
        return value.val if isinstance(value, Literal) else env[value]

    for step in planned.steps:
        eqn = step.eqn if isinstance(step, Node) else step.nodes[-1].eqn
        ins = list(map(read, step.ins))
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            if isinstance(step, Replacement):
                outs = step.run(ins, implementation)
            else:
                assert isinstance(step, Node)
                outs = _again(step, ins, planned.inner.get(step, {}), implementation)
        env.update(zip(step.outs, outs, strict=True))
    return list(map(read, graph.outs))


def _again(node: Node, ins: Sequence[Any], inner: Any, implementation: str | None) -> Sequence[Any]:
    """What a node makes, with the plans of its jaxprs."""
    primitive, params = node.eqn.primitive, dict(node.params)
    if inner and primitive.name == "shard_map":
        return _shard_map(params, inner["jaxpr"], ins, implementation)
    for name in inner:
        olds = params[name]
        several = isinstance(olds, (tuple, list))
        params[name] = type(olds)(_jaxpr(x, implementation) for x in olds) if several else _jaxpr(olds, implementation)
    outs = primitive.bind(*ins, **primitive.get_bind_params(params))
    return outs if primitive.multiple_results else [outs]


def _shard_map(params: Any, planned: Plan, ins: Sequence[Any], implementation: str | None) -> Sequence[Any]:
    consts = params["jaxpr"].consts
    body = jax.shard_map(
        lambda *parts: tuple(run(planned, consts, parts, implementation)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )
    return body(*ins)


# Kept, so that a function that is called again and again is compiled once: `jax.jit` knows its program by the jaxpr.
@weakref_lru_cache
def _jaxpr(old: Any, implementation: str | None) -> Any:
    """A jaxpr with the operations in their places, of the same type."""
    planned = plan(old)
    new = jax.make_jaxpr(lambda *args: run(planned, old.consts, args, implementation))(*old.in_avals)
    if new.out_avals != old.out_avals:
        raise TypeError(
            f"jaxtaxfree.fuse would change the types {old.out_avals} of a part of the program to {new.out_avals}: "
            "please report it. The program runs without jaxtaxfree.fuse."
        )
    return new
