"""Kernels around Iris kernels, written as source for Triton to read."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import triton
import triton.language as tl

from jaxtaxfree.iris.arguments import Arguments, Buffer, Out, Symmetric, triton_dtype
from jaxtaxfree.kernels import iris_launch, shmem
from jaxtaxfree.written import compiled_from

BYTES_A_PROGRAM = 1 << 15  # that it is worth another program to fill
# What a kernel around another one, or what launches it, takes by these names.
_TAKEN = (
    *("team", "WORLD", "kernel", "axis_name", "out_type", "out_shape", "grid", "scratch", "signals", "messages"),
    *("descriptors", "name", "num_warps", "num_stages", "num_ctas", "together", "cost_estimate", "implementation"),
    *("compute_capability", "backend_options", "enable_fp_fusion", "has_side_effect", "debug", "serialized_metadata"),
    *("input_output_aliases", "zeroed_outputs"),
)


def own(name: str) -> str:
    """The wrapper's name for a parameter of the kernel."""
    return f"{name}_" if name in _TAKEN else name


def constants(given: Arguments) -> dict[str, Any]:
    """The wrapper's parameters for numbers and other constants."""
    return {own(name): value for name, value in given.constants.items()}


def parts_of(buffers: Iterable[Symmetric], most: int) -> int:
    """How many programs fill these buffers."""
    return max(1, min(most, math.ceil(sum(each.bytes_before for each in buffers) / BYTES_A_PROGRAM)))


def alone(kernel: Any, given: Arguments, parts: int, constant_rank: bool) -> Any:
    """A kernel that opens a call, meets the other ranks, runs an Iris kernel, and closes the call.

    Its parameters: operands, sources of symmetric buffers (name_source), team, iris_table, the buffers
    (name_symmetric), iris_opened, results, constants.
    """
    sources = [f"{name}_source" for name, each in given.symmetric.items() if each.source is not None]
    buffers = [f"{name}_symmetric" for name in given.symmetric]
    parameters = [*map(own, given.operands), *sources, "team", "iris_table", *buffers, "iris_opened"]
    body = [
        "iris_me = shmem.start(team, WORLD=WORLD)",
        "iris_part = shmem._program()",
        "iris_context = around.table(iris_me, iris_table, iris_part, WORLD)",
        "around.write_table(iris_me, iris_context, WORLD)",
        *(_pointer(own(name), f"{name}_symmetric", each.dtype) for name, each in given.symmetric.items()),
        *_filling(given.symmetric, {name: own(name) for name in given.symmetric}, parts),
        f"iris_came = around.meet(iris_me, iris_opened, iris_part, {parts}, WORLD)",
        *_running(kernel, given, "iris_came", {}, constant_rank),
        "shmem.finish(iris_me)",
    ]
    return _define(kernel, parameters, given, body)


def opening(buffers: Mapping[str, Symmetric], parts: int, behind: int = 0) -> Any:
    """A kernel that opens a call of a workspace.

    Its parameters: sources (name_source), as many as `behind` says that nobody reads, iris_before, team, iris_table,
    the buffers (name_symmetric), iris_opened, iris_closed, iris_token.
    """
    sources = [f"{name}_source" for name, each in buffers.items() if each.source is not None]
    symmetric_ = (f"{name}_symmetric" for name in buffers)
    unread = [f"iris_behind_{i}" for i in range(behind)]
    parameters = [*sources, *unread, "iris_before", "team", "iris_table", *symmetric_, "iris_opened"]
    locals_ = {name: f"{name}_" for name in buffers}
    body = [
        "iris_me = shmem.start(team, WORLD=WORLD)",
        "iris_part = shmem._program()",
        *(_pointer(locals_[name], f"{name}_symmetric", each.dtype) for name, each in buffers.items()),
        *_filling(buffers, locals_, parts),
        "around.publish(iris_me, iris_opened, WORLD)",
        # The last one waits, because programs of lower ids run for sure.
        f"if iris_part == {parts - 1}:",
        "    iris_context = around.table(iris_me, iris_table, 0, WORLD)",
        "    around.write_table(iris_me, iris_context, WORLD)",
        f"    shmem.wait_all(iris_me, iris_opened, iris_me.epoch * {parts})",
        "    tl.store(iris_token, iris_me.epoch.to(tl.int32))",
        "shmem.finish(iris_me)",
    ]
    return _define(None, [*parameters, "iris_closed", "iris_token"], Arguments(), body)


def joining(kernel: Any, given: Arguments, buffers: Sequence[Buffer], constant_rank: bool) -> Any:
    """A kernel that takes part in the call that a workspace has opened.

    Its parameters: operands, iris_joined, team, iris_table, all buffers (name_symmetric), iris_opened, iris_closed,
    iris_token, results, constants.
    """
    used = {each.name: f"{each.name}_pointer" for each in given.buffers.values()}
    body = [
        "iris_me = shmem.start(team, WORLD=WORLD, joined=iris_joined)",
        "iris_part = shmem._program()",
        "iris_context = around.table(iris_me, iris_table, 0, WORLD)",
        *(_pointer(used[each.name], f"{each.name}_symmetric", each.dtype) for each in buffers if each.name in used),
        *_running(kernel, given, "iris_me.ready", used, constant_rank),
        *_PASS_ON,
    ]
    return _define(kernel, [*map(own, given.operands), *_shared(buffers)], given, body)


def closing(buffers: Sequence[Buffer], read: Sequence[Buffer], programs: int) -> Any:
    """A kernel that meets all ranks once more, and copies buffers to results.

    Its parameters: iris_joined, team, iris_table, all buffers (name_symmetric), iris_opened, iris_closed, iris_token,
    results (of the buffers' names).
    """
    given = Arguments(outs={each.name: Out(each.shape, each.dtype) for each in read})
    body = [
        "iris_me = shmem.start(team, WORLD=WORLD, joined=iris_joined)",
        "iris_part = shmem._program()",
        *(_pointer(f"{each.name}_pointer", f"{each.name}_symmetric", each.dtype) for each in read),
        "if around.close(iris_me, iris_closed, iris_part, WORLD):",
        *(
            f"    around.copy({own(each.name)}, {each.name}_pointer, {math.prod(each.shape)}, iris_part, {programs})"
            for each in read
        ),
        "else:",
        *(f"    around.spoil({own(each.name)}, {math.prod(each.shape)}, iris_part, {programs})" for each in read),
        *_PASS_ON,
    ]
    return _define(None, _shared(buffers), given, body)


_PASS_ON = ("if iris_part == 0:", "    tl.store(iris_token, tl.load(iris_joined))")


def _shared(buffers: Iterable[Buffer]) -> list[str]:
    """The parameters of launches of a workspace, up to their results."""
    symmetric = (f"{each.name}_symmetric" for each in buffers)
    return ["iris_joined", "team", "iris_table", *symmetric, "iris_opened", "iris_closed", "iris_token"]


def _pointer(name: str, region: str, dtype: Any) -> str:
    return f"{name} = shmem.scratch(iris_me, {region}, tl.{triton_dtype(dtype)})"


def _filling(buffers: Mapping[str, Symmetric], pointers: Mapping[str, str], parts: int) -> list[str]:
    lines = []
    for name, each in buffers.items():
        if each.source is not None:
            lines.append(f"    around.copy({pointers[name]}, {name}_source, {each.size}, iris_part, {parts})")
        elif each.fill is not None:
            number = repr(each.fill) if math.isfinite(each.fill) else f'float("{each.fill}")'
            lines.append(f"    around.fill({pointers[name]}, {each.size}, {number}, iris_part, {parts})")
    return [f"if iris_part < {parts}:", *lines] if lines else []


def _running(
    kernel: Any, given: Arguments, condition: str, pointers: Mapping[str, str], constant_rank: bool
) -> list[str]:
    """Calls the kernel if the condition holds, and spoils its results otherwise."""
    values = {name: own(name) for name in (*given.operands, *given.outs, *given.symmetric, *given.constants)}
    values |= {name: each.text for name, each in given.special.items()}
    values |= {name: pointers[each.name] for name, each in given.buffers.items()}
    call = f"kernel_({', '.join(f'{name}={values[name]}' for name in kernel.arg_names if name in values)})"
    run = ["iris_rank = iris_me.rank", call]
    if constant_rank:
        run = ["for iris_rank in tl.static_range(WORLD):", "    if iris_me.rank == iris_rank:", f"        {call}"]
    spoil = [
        f"    around.spoil({own(name)}, {math.prod(each.shape)}, iris_part, around.programs())"
        for name, each in given.outs.items()
    ]
    return [f"if {condition}:", *(f"    {line}" for line in run), *(["else:", *spoil] if spoil else [])]


def _define(kernel: Any, parameters: Sequence[str], given: Arguments, body: Iterable[str]) -> Any:
    constexpr = {own(each.name) for each in kernel.params if each.is_constexpr} if kernel else set()
    numbers = [f"{name}: tl.constexpr" if name in constexpr else name for name in constants(given)]
    name = kernel.fn.__name__ if kernel else "iris_workspace"
    header = f"def {name}({', '.join([*parameters, *map(own, given.outs), *numbers, 'WORLD: tl.constexpr'])}):"
    return defined(kernel, "\n".join([header, *(f"    {line}" for line in body)]) + "\n", name)


@functools.cache
def defined(kernel: Any, source: str, name: str) -> Any:
    """A Triton kernel from its source, in which `kernel_` is another one. The same source gives the same kernel."""
    space = {"triton": triton, "tl": tl, "shmem": shmem, "around": iris_launch, "kernel_": kernel}
    return compiled_from(source, f"<iris_call {name}>", name, {**space, "__name__": __name__})
