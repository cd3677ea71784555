"""What to do with each equation of a program: run it, replace it, or look into it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax._src.core import jaxprs_in_params
from jax.extend.core import Jaxpr

from jaxtaxfree.fusion.epilogue import absorb
from jaxtaxfree.fusion.find import find_gathers, find_sums, place
from jaxtaxfree.fusion.graph import GATHERS, SUMS, Graph, Node, Step, graph_of, holds, ordered
from jaxtaxfree.fusion.report import Missed, Report, joined
from jaxtaxfree.fusion.step import Replacement
from jaxtaxfree.fusion.typed import find_typed

# Whose jaxprs are rewritten.
ENTERED = ("shard_map", "jit", "pjit", "scan", "while", "cond", "remat", "remat2", "checkpoint")


@dataclasses.dataclass
class Plan:
    """How a jaxpr is run.

    Attributes:
      graph: the jaxpr.
      steps: nodes and replacements, in the order in which they run.
      inner: by node and name of the parameter, the plans of its jaxprs; those without a replacement are left out.
      report: of this jaxpr and of those in it.
    """

    graph: Graph
    steps: list[Node | Step]
    inner: dict[Node, Mapping[str, Any]]
    report: Report


def plan(jaxpr: Any, path: str = "", open_calls: bool = True) -> Plan:
    """The plan of a jaxpr.

    Args:
      path: the transformations around it, for the report.
      open_calls: whether to open its calls of `jax.jit`; those inside of other transformations are in any case.
    """
    graph = graph_of(jaxpr, open_calls)
    drafts, missed = find_sums(graph, path)
    typed, untyped = find_typed(graph, path)
    drafts, missed = [*drafts, *typed], [*missed, *untyped]
    gathers, others = find_gathers(graph, {node for draft in drafts for node in draft.nodes}, path)
    drafts, missed = [*drafts, *gathers], [*missed, *others]
    absorb(drafts)
    steps = [draft.sealed() for draft in drafts]
    while isinstance(order := ordered(graph.nodes, steps), Step):
        assert isinstance(order, Replacement)
        steps.remove(order)
        found = order.found
        missed.append(Missed(order.collective, found.axes, found.where, "the weights depend on the gathered rows"))
    at = [(step.index, Report((step.found,), ())) for step in steps]
    reports = [*(report for _, report in sorted(at, key=lambda each: each[0])), Report((), tuple(missed))]
    inner: dict[Node, Mapping[str, Any]] = {}
    for node in graph.nodes:
        below, of_node = _inner(node, path)
        reports.append(of_node)
        if below:
            inner[node] = below
    return Plan(graph, order, inner, joined(reports))


def _inner(node: Node, path: str) -> tuple[dict[str, Any], Report]:
    """The plans of a node's jaxprs by parameter, where there is something to replace, and their report."""
    if not any(holds(each, (*GATHERS, *SUMS, "dot_general")) for each in jaxprs_in_params(node.params)):
        return {}, Report()
    name = node.eqn.primitive.name
    if name not in ENTERED:
        reports = [plan(each).report for each in jaxprs_in_params(node.params)]
        why = f"it is inside of {name}, which has derivatives or an order of its own and is left as it is"
        missed = [Missed(x.operation, x.axes, place(node, path), why) for each in reports for x in each.found]
        return {}, Report((), tuple(missed))
    path = f"{path} > {name}" if path else name
    plans: dict[str, Any] = {}
    for key, value in node.params.items():
        if isinstance(value, Jaxpr):
            plans[key] = plan(value, path)
        elif isinstance(value, (tuple, list)) and value and all(isinstance(each, Jaxpr) for each in value):
            plans[key] = [plan(each, path) for each in value]
    report = joined(each.report for each in _flat(plans))
    useful = {key: value for key, value in plans.items() if any(each.report.found for each in _flat({key: value}))}
    return useful, report


def _flat(plans: Mapping[str, Any]) -> list[Plan]:
    return [each for value in plans.values() for each in (value if isinstance(value, list) else [value])]
