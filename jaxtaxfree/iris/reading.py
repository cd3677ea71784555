"""What the source of an Iris kernel says: waits that do not last, loads that do not assemble, ranks that are constants.

A compiler may take a load that nothing orders for the same in every turn of a loop. Triton's deletes a loop that only
waits for one: the kernel goes on before its data is there. AMD's and NVIDIA's code for it is alike.
"""

import ast
import copy
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator, Sequence
from typing import Any

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from jaxtaxfree.written import compiled_from

# Iris's functions have branches for copy engines, which kernels without them do not take.
_LIBRARIES = ("triton.", "jaxtaxfree.", "iris.mem.", "iris.device.")
_ORDERING = ("atomic", "debug_barrier", "store", "inline_asm")  # what keeps a loop


def problems(kernel: JITFunction) -> list[str]:
    """Why a kernel, with all that it calls, does not do on a GPU what it says."""
    found = []
    for function in reachable(kernel):
        for node in ast.walk(_tree(function)):
            if isinstance(node, ast.While) and (load := _awaited(function, node)) is not None:
                found.append(
                    f"{_place(function, node)} waits by `{ast.unparse(load)}`, which nothing orders, so the compiler "
                    "deletes the wait: wait by tl.atomic_load(..., sem='acquire', scope='sys'), or pass "
                    "jaxtaxfree.iris.acquiring(kernel), which does so"
                )
            if isinstance(node, ast.Call) and _is_load(function, node) and _volatile_and_cv(function, node):
                found.append(
                    f"{_place(function, node)} loads with volatile=True and '.cv', which NVIDIA's assembler does not "
                    "take: leave the modifier out, or load by jaxtaxfree.iris, which does so"
                )
    return list(dict.fromkeys(found))


def acquiring(kernel: JITFunction) -> JITFunction:
    """A copy of a kernel whose waits last: in `while` loops over a plain `tl.load`, the load is an acquire.

    `tl.load(flag, ...) == 0` becomes `tl.atomic_load(flag, sem="acquire", scope="sys") == 0`, of this kernel alone and
    not of functions that it calls. Lines of errors are those of the file.

    Raises:
      ValueError: if no wait has to change.
    """
    tree = copy.deepcopy(_tree(kernel))
    loads = [load for node in ast.walk(tree) if isinstance(node, ast.While) and (load := _awaited(kernel, node))]
    if not loads:
        raise ValueError(f"{kernel.fn.__name__} has no wait for a plain tl.load.")
    for load in loads:
        pointer = load.args[0] if load.args else next(each.value for each in load.keywords if each.arg == "pointer")
        load.func = ast.Attribute(ast.Name("tl", ast.Load()), "atomic_load", ast.Load())
        load.args = [pointer]
        load.keywords = [
            ast.keyword("sem", ast.Constant("acquire")),
            ast.keyword("scope", ast.Constant("sys")),
        ]
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    function.decorator_list = []
    source = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    space = {**_names(kernel), "tl": tl, "triton": triton}
    return compiled_from(source, f"<acquiring {kernel.fn.__name__}>", kernel.fn.__name__, space)


def wants_constant_rank(kernel: JITFunction, special: Sequence[str]) -> bool:
    """Whether a kernel asks for the rank as a constant: for Iris's own Context, or for Python's `int(rank)`.

    Args:
      special: the parameters that are given numbers of the rank.
    """
    for function in reachable(kernel):
        for node in ast.walk(_tree(function)):
            if isinstance(node, ast.Call):
                called = _value(function, node.func)
                of = _value(function, node.func.value) if isinstance(node.func, ast.Attribute) else None
                if any(_has_constant_rank(each) for each in (called, of)):
                    return True
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                if name in ("int", "static_range", "static_assert", "constexpr") and any(
                    isinstance(each, ast.Name) and each.id in special and "rank" in each.id for each in ast.walk(node)
                ):
                    return True
    return False


def _has_constant_rank(of: Any) -> bool:
    return _is_aggregate(of) and inspect.get_annotations(of).get("rank") is tl.constexpr


def _is_aggregate(of: Any) -> bool:
    return isinstance(of, type) and getattr(of, "__triton_aggregate__", False) is True


def reachable(kernel: JITFunction) -> list[JITFunction]:
    """A kernel and the functions that it may call, but for those of Triton, of Iris itself, and of this library."""
    found, queue = [kernel], [kernel]
    while queue:
        function = queue.pop()
        for called in _called(function):
            if called not in found and not called.fn.__module__.startswith(_LIBRARIES):
                found.append(called)
                queue.append(called)
    return found


def _called(function: JITFunction) -> Iterator[JITFunction]:
    methods = {node.attr for node in ast.walk(_tree(function)) if isinstance(node, ast.Attribute)}
    for node in ast.walk(_tree(function)):
        if isinstance(node, ast.Name | ast.Attribute):
            value = _value(function, node)
            if isinstance(value, JITFunction):
                yield value
            elif _is_aggregate(value):
                yield from (member for name in methods if isinstance(member := getattr(value, name, None), JITFunction))


@functools.cache
def _tree(function: JITFunction) -> ast.Module:
    return ast.parse(textwrap.dedent(function.src))


def _names(function: JITFunction) -> dict[str, Any]:
    return {**function.fn.__globals__, **inspect.getclosurevars(function.fn).nonlocals}


def _value(function: JITFunction, node: ast.AST) -> Any:
    """What a name, or a name of a module or class, stands for; None if it is of the kernel."""
    if isinstance(node, ast.Name):
        return _names(function).get(node.id)
    if isinstance(node, ast.Attribute):
        of = _value(function, node.value)
        if isinstance(of, types.ModuleType | type):
            return getattr(of, node.attr, None)
    return None


def _place(function: JITFunction, node: Any) -> str:
    return f"{function.file_name}:{function.def_file_line_number + node.lineno - _offset(function)}"


def _offset(function: JITFunction) -> int:
    """The line of `def` in the source that was read."""
    return next(node.lineno for node in ast.walk(_tree(function)) if isinstance(node, ast.FunctionDef))


def _is_load(function: JITFunction, node: ast.Call) -> bool:
    """Whether a call is a load: Triton's, or one of Iris's device functions, which is named load, too."""
    value = _value(function, node.func)
    if value is tl.load:
        return True
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    ours = isinstance(value, JITFunction) and value.fn.__module__.startswith("jaxtaxfree.")
    return name == "load" and not ours and (value is None or isinstance(value, JITFunction))


def _keyword(function: JITFunction, node: ast.Call, name: str) -> Any:
    for each in node.keywords:
        if each.arg == name:
            value = each.value.value if isinstance(each.value, ast.Constant) else _value(function, each.value)
            return getattr(value, "value", value)
    return None


def _volatile_and_cv(function: JITFunction, node: ast.Call) -> bool:
    return bool(_keyword(function, node, "volatile")) and _keyword(function, node, "cache_modifier") == ".cv"


def _awaited(function: JITFunction, loop: ast.While) -> ast.Call | None:
    """The load that a loop waits for, if nothing makes it load again."""
    inside = [node for part in (loop.test, *loop.body) for node in ast.walk(part)]
    calls = [node for node in inside if isinstance(node, ast.Call)]
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if any(word in name for word in _ORDERING) or _keyword(function, call, "volatile"):
            return None
    assigned = {
        node.id for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Name) and _is_stored(node)
    }
    tested = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
    loads = [call for call in calls if _is_load(function, call)]
    in_test = [call for call in loads if call in list(ast.walk(loop.test))]
    if in_test and not assigned & tested:
        return in_test[0]
    # value = tl.load(flag); while value == 0: value = tl.load(flag)
    for part in loop.body:
        if isinstance(part, ast.Assign) and part.value in loads and all(isinstance(x, ast.Name) for x in part.targets):
            names = {node.id for node in ast.walk(part.value) if isinstance(node, ast.Name)}
            targets = {target.id for target in part.targets if isinstance(target, ast.Name)}
            if targets & tested and assigned == targets and not names & assigned:
                return part.value
    return None


def _is_stored(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)
