"""A jaxpr as a graph of nodes: calls of `jax.jit` are opened, equal casts and gathers are one, steps have an order."""

import dataclasses
import heapq
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax._src import source_info_util
from jax._src.core import NamedAxisEffect, jaxprs_in_params
from jax._src.sharding_impls import UnspecifiedValue
from jax.extend.core import DropVar, Literal

CALLS = ("jit", "pjit")
# Of lax, by name: primitives of this library of the same names have a parameter `implementation`.
GATHERS = ("all_gather", "all_gather_invariant", "all_gather_reduced")
SUMS = ("psum", "psum_invariant", "reduce_scatter", "unreduced_psum", "unreduced_reduce_scatter")
# What keeps the elements of an array, in another order, shape or dtype.
CASTS, SHAPES = ("convert_element_type",), ("reshape", "transpose", "squeeze", "broadcast_in_dim")
SAME = ("pvary", "pcast", "copy", "copy_p")
MERGED = (*CASTS, *SHAPES, *SAME, *GATHERS, "reshard")


@dataclasses.dataclass(eq=False)
class Value:
    """What a node makes, or takes; compared by identity.

    Attributes:
      aval: its type.
      maker: the node that makes it; None for arguments and constants.
      users: the nodes that take it, once for each operand.
      returned: whether the program returns it.
    """

    aval: Any
    maker: "Node | None" = None
    users: "list[Node]" = dataclasses.field(default_factory=list)
    returned: bool = False


Atom = Any  # a Value, or a Literal of the jaxpr


@dataclasses.dataclass(eq=False)
class Node:
    """An equation of a jaxpr.

    Attributes:
      eqn: the equation, for its primitive, context and place in the source.
      ins, outs: what it takes, and makes.
      index: its place in the order of the program.
    """

    eqn: Any
    ins: tuple[Atom, ...]
    outs: tuple[Value, ...]
    index: int

    @property
    def name(self) -> str:
        """Of the primitive; of this library's own ones another than that of lax."""
        name = self.eqn.primitive.name
        return f"jaxtaxfree {name}" if "implementation" in self.params else name

    @property
    def params(self) -> Mapping[str, Any]:
        return self.eqn.params

    @property
    def source(self) -> str:
        """The line of the program."""
        return source_info_util.summarize(self.eqn.source_info)

    @property
    def in_order(self) -> bool:
        """Whether it has effects that other nodes may see."""
        return any(not isinstance(effect, NamedAxisEffect) for effect in self.eqn.effects)


@dataclasses.dataclass
class Graph:
    """A jaxpr.

    Attributes:
      consts, args: its constants and arguments.
      nodes: in an order in which they can run.
      outs: what it returns.
    """

    consts: list[Value]
    args: list[Value]
    nodes: list[Node]
    outs: list[Atom]


def graph_of(jaxpr: Any, open_calls: bool) -> Graph:
    """The graph of a jaxpr.

    Args:
      open_calls: whether calls of `jax.jit` that hold a product or a collective are replaced by what is in them. Those
        that say how their operands or results are sharded stay.
    """
    consts, args = ([Value(v.aval) for v in some] for some in (jaxpr.constvars, jaxpr.invars))
    nodes: list[Node] = []
    env: dict[Any, Atom] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    outs = _walk(jaxpr, env, nodes, {}, open_calls)
    for node in nodes:
        for value in node.ins:
            if isinstance(value, Value):
                value.users.append(node)
    for value in outs:
        if isinstance(value, Value):
            value.returned = True
    return Graph(consts, args, nodes, outs)


def _walk(jaxpr: Any, env: dict[Any, Atom], nodes: list[Node], known: dict[Any, Value], open_calls: bool) -> list[Atom]:
    """Appends the nodes of a jaxpr, whose arguments are in `env`, and returns what it returns."""

    def read(v: Any) -> Atom:
        return v if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        ins = tuple(map(read, eqn.invars))
        inner = eqn.params.get("jaxpr")
        if open_calls and eqn.primitive.name in CALLS and _opens(eqn, inner):
            env.update(zip(eqn.outvars, _walk(inner, dict(zip(inner.invars, ins)), nodes, known, open_calls)))
            continue
        if (key := _key(eqn, ins)) in known:
            env[eqn.outvars[0]] = known[key]
            continue
        outs = tuple(Value(v.aval) for v in eqn.outvars)
        # A sum of several arrays is one of each.
        each = eqn.primitive.name in SUMS and len(ins) == len(outs) > 1
        for some_ins, some_outs in zip([(x,) for x in ins], [(x,) for x in outs]) if each else [(ins, outs)]:
            node = Node(eqn, some_ins, some_outs, len(nodes))
            for value in some_outs:
                value.maker = node
            nodes.append(node)
        if key is not None:
            known[key] = outs[0]
        env.update((v, x) for v, x in zip(eqn.outvars, outs) if not isinstance(v, DropVar))
    return list(map(read, jaxpr.outvars))


def _opens(eqn: Any, inner: Any) -> bool:
    """Whether a call means the same as what is in it."""
    says = (eqn.params.get(name, ()) for name in ("in_shardings", "out_shardings", "in_layouts", "out_layouts"))
    free = all(x is None or isinstance(x, UnspecifiedValue) for some in says for x in some)
    return free and not inner.constvars and holds(inner, (*GATHERS, *SUMS, "dot_general", "reshard"))


def holds(jaxpr: Any, names: Sequence[str]) -> bool:
    """Whether a primitive of these names is in a jaxpr, or in one that is in it."""
    return any(
        eqn.primitive.name in names or any(holds(inner, names) for inner in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def _key(eqn: Any, ins: tuple[Atom, ...]) -> Any:
    """Equal for equations of equal results; None for those that are not compared."""
    if eqn.primitive.name not in MERGED or "implementation" in eqn.params or len(ins) != 1:
        return None
    if not isinstance(ins[0], Value):
        return None
    key = (eqn.primitive.name, ins[0], tuple(sorted(eqn.params.items())), eqn.ctx)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def made_by(value: Atom, through: Sequence[str]) -> tuple[Node | None, list[Node]]:
    """The node behind those of these names that make a value, and these, in the order of the program."""
    chain: list[Node] = []
    while isinstance(value, Value) and value.maker is not None:
        if value.maker.name not in through or len(value.maker.ins) != 1:
            return value.maker, chain[::-1]
        chain.append(value.maker)
        value = value.maker.ins[0]
    return None, chain[::-1]


def untransposed(value: Atom) -> tuple[Atom, tuple[int, ...]]:
    """What a value is a transpose of, and the dimension of that which each of its own is; itself if it is none."""
    permutation = tuple(range(value.aval.ndim))
    while isinstance(value, Value) and value.maker is not None and value.maker.name in ("transpose", *SAME):
        if value.maker.name == "transpose":
            permutation = tuple(value.maker.params["permutation"][i] for i in permutation)
        value = value.maker.ins[0]
    return value, permutation


def depends(value: Atom, on: set[Node]) -> bool:
    """Whether one of these nodes is needed for a value."""
    left, seen = [value], set()
    while left:
        maker = value.maker if isinstance(value := left.pop(), Value) else None
        if maker in on:
            return True
        if maker is not None and maker not in seen:
            seen.add(maker)
            left += maker.ins
    return False


@dataclasses.dataclass(eq=False)
class Step:
    """What runs in place of some nodes.

    Attributes:
      nodes: that no longer run.
      ins, outs: what it takes, and gives.
      index: where it stands.
    """

    nodes: list[Node]
    ins: tuple[Atom, ...]
    outs: tuple[Value, ...]
    index: int

    @property
    def in_order(self) -> bool:
        return False


def ordered(nodes: Sequence[Node], steps: Sequence[Step]) -> list[Node | Step] | Step:
    """Nodes, and steps in place of some, each behind what makes its operands, and otherwise as they stood.

    Returns: a step, if there is no such order because its operands depend on its results.
    """
    gone = {node for step in steps for node in step.nodes}
    left: list[Node | Step] = [*(node for node in nodes if node not in gone), *steps]
    makers = {value: each for each in left for value in each.outs}
    before: dict[Any, list[Any]] = {each: [] for each in left}
    after: dict[Any, list[Any]] = {each: [] for each in left}
    waits = dict.fromkeys(left, 0)

    def wait(each: Any, maker: Any) -> None:
        before[each].append(maker)
        after[maker].append(each)
        waits[each] += 1

    for each in left:
        for value in {value for value in each.ins if isinstance(value, Value)}:
            if value in makers:
                wait(each, makers[value])
    in_order = [each for each in left if each.in_order]
    for maker, each in itertools.pairwise(in_order):
        wait(each, maker)

    tie = {each: place for place, each in enumerate(left)}
    ready = [(each.index, tie[each], each) for each in left if not waits[each]]
    heapq.heapify(ready)
    order = []
    while ready:
        each = heapq.heappop(ready)[2]
        order.append(each)
        for later in after[each]:
            waits[later] -= 1
            if not waits[later]:
                heapq.heappush(ready, (later.index, tie[later], later))
    if len(order) == len(left):
        return order
    path = [next(each for each in left if waits[each])]
    while (stuck := next(each for each in before[path[-1]] if waits[each])) not in path:
        path.append(stuck)
    return next(each for each in path[path.index(stuck) :] if isinstance(each, Step))
