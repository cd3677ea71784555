"""What a call of a kernel may be: the checks that `shmem_call` and `simulator.run` share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.export
import numpy as np
import triton
from jax import lax
from jax._src.lib import version as jaxlib_version


def check_kernel(kernel: Any, what: str) -> None:
    """Raises unless this is a kernel. `what` takes it."""
    if not isinstance(kernel, triton.JITFunction):
        raise TypeError(f"{what} takes a kernel that is decorated with triton.jit or gluon.jit, not {kernel!r}.")


# Of each argument for arrays the names of those that it bundles, in their order; None for a single array.
Bundles = tuple[tuple[str, ...] | None, ...]


def unbundled(name: str, args: Sequence[Any]) -> tuple[list[Any], Bundles]:
    """The arrays of a call's arguments, one after the other, and what makes them arguments again by `bundled`."""
    arrays: list[Any] = []
    for arg in args:
        if not isinstance(arg, Mapping):
            arrays.append(arg)
            continue
        for key, value in arg.items():
            # Triton takes no None within a tuple.
            if not isinstance(key, str) or value is None:
                raise TypeError(
                    f"{name} takes a bundle of arrays as a mapping from their names to those that there are, not "
                    f"{key!r}: {value!r}."
                )
        arrays += arg.values()
    return arrays, tuple(tuple(arg) if isinstance(arg, Mapping) else None for arg in args)


def bundled(arrays: Iterable[Any], bundles: Bundles) -> list[Any]:
    """An array for each argument, or the arrays of a bundle by their names."""
    left = iter(arrays)
    return [next(left) if names is None else {name: next(left) for name in names} for names in bundles]


def members(parameter: str, value: Any) -> list[tuple[str, Any]]:
    """What a parameter takes, by the name that it has in `descriptors`: "scales.lhs" in a bundle "scales"."""
    if isinstance(value, dict):
        return [(f"{parameter}.{key}", each) for key, each in value.items()]
    return [(parameter, value)]


# What `descriptors` says of an array: the shape of a block, or that and the shape in which the array is read.
Descriptor = Sequence[Any]


def block_of(described: Descriptor, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(The shape of a block, that in which an array of this shape is read)."""
    block, read = described if _is_pair(described) else (described, shape)
    return tuple(block), tuple(read)


def frozen(descriptors: Mapping[str, Descriptor]) -> tuple[tuple[str, Any], ...]:
    """`descriptors` as something that can be hashed, in the order of the names."""
    pairs = ((name, tuple(map(tuple, of)) if _is_pair(of) else tuple(of)) for name, of in descriptors.items())
    return tuple(sorted(pairs))


def _is_pair(described: Any) -> bool:
    is_sequence = lambda of: isinstance(of, Sequence) and not isinstance(of, str)  # noqa: E731
    return is_sequence(described) and len(described) == 2 and all(map(is_sequence, described))


def is_alone(kernel: Any) -> bool:
    """Whether a kernel reaches nobody: it does not ask for its team."""
    return "team" not in kernel.arg_names


# XLA makes one instruction of a call and the slices of arrays that it takes, so that they need no copy. In jaxlib 0.11
# it leaves the call in the program as well, if it has side effects and several results: the kernel runs twice.
RUNS_TWICE_WITH_SLICES = jaxlib_version < (0, 12)


def runs_once[T](operands: T, results: Sequence[Any], has_side_effect: bool) -> T:
    """The arrays that a launch takes, any pytree, such that XLA does not launch it a second time."""
    if RUNS_TWICE_WITH_SLICES and has_side_effect and len(results) > 1:
        return lax.optimization_barrier(operands)
    return operands


def pointers_of(kernel: Any, named: Iterable[str]) -> list[str]:
    """The parameters that take operands and results, in their order, where a call names these others."""
    return [each.name for each in kernel.params if each.name not in named and not each.has_default]


def places_of(kernel: Any, args: Iterable[Any], named: Mapping[str, Any], numbers: bool = False) -> list[int]:
    """The place of each operand among all arrays that a launch passes, of which some are the team's.

    Args:
      args: operands; of a bundle those by their names.
      named: what the kernel is given by name.
      numbers: count those that are no constants, too, as jax-triton does.
    """
    left, places, count = iter(args), [], 0
    for each in kernel.params:
        if each.name in named:
            parts = [] if each.is_constexpr else jax.tree.leaves(named[each.name])
            count += sum(numbers or isinstance(part, jax.Array) for part in parts)
        elif not each.has_default and (value := next(left, None)) is not None:
            places += range(count, count := count + len(members(each.name, value)))
    return places


def constexprs_of(kernel: Any) -> set[str]:
    """The names of the parameters that are `tl.constexpr`."""
    return {each.name for each in kernel.params if each.is_constexpr}


def constants_of(
    kernel: Any, params: Mapping[str, Any], world: int, bundles: Bundles, buffers: Iterable[str]
) -> dict[str, Any]:
    """The kernel's other parameters: those given, as Python's numbers; WORLD, and the names of bundles, if it has them.

    Args:
      buffers: names of scratch, messages and signals.

    Raises:
      ValueError: if WORLD is given and not the number of ranks.
    """
    given = {key: value.item() if isinstance(value, np.generic) else value for key, value in params.items()}
    # The names of the bundle that parameter `scales` takes are the constant SCALES.
    pointers = pointers_of(kernel, {"team", *buffers, *given, *constexprs_of(kernel)})
    names = {pointer.upper(): names for pointer, names in zip(pointers, bundles) if names is not None}
    given = {key: value for key, value in names.items() if key in constexprs_of(kernel)} | given
    if (said := given.get("WORLD", world)) != world:
        raise ValueError(
            f"{kernel.fn.__name__} takes as WORLD the number of ranks, which is {world}, not {said!r}: leave it out."
        )
    return {"WORLD": world} | given if "WORLD" in kernel.arg_names else given


# Where the rows of a ragged descriptor end. `to_ragged` of jaxtaxfree/kernels/blocks/ragged.py counts on it.
_END = 1 << 30
_STRIDE = 1 << 34  # times _END, and the bytes of an element, nothing in 64 bits


def is_ragged(shape: Sequence[int], block: Sequence[int]) -> bool:
    """Whether a descriptor of such blocks is of slices of an array, which end where the kernel says."""
    return len(shape) >= 2 and len(block) == len(shape) + 2 and tuple(block[:2]) == (1, 1)


def is_grouped(shape: Sequence[int], block: Sequence[int]) -> bool:
    """Whether a descriptor of such blocks is of groups of columns, one of which is in front of the rows."""
    return len(shape) == 2 and len(block) == 3


def described_as(shape: Sequence[int], block: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides, in elements, of the TMA descriptor of an array [rows, ...] that is read in such blocks.

    With blocks [1, 1, rows, ...] it is ragged: two dimensions in front, whose indices move the end of the rows to where
    a slice ends. Addresses wrap around at 64 bits, so that what the first index adds is 0. The idea is that of
    `triton.tools.ragged_tma`.

    With blocks [groups, rows, width] an array [rows, columns] is [columns / width, rows, width].
    """
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    if is_grouped(shape, block):
        (rows, columns), width = shape, block[2]
        return (max(1, columns // width), rows, width), (width, columns, 1)
    if not is_ragged(shape, block):
        return tuple(shape), strides
    return (0x7FFF0000, 0x7FFF0000, _END, *shape[1:]), (_STRIDE - strides[0], strides[0], *strides)


def sizes_of(grid: Any) -> tuple[int, ...]:
    """A grid, or the one size of it, as Python's numbers."""
    return tuple(map(int, grid if isinstance(grid, tuple | list) else (grid,)))


def check_call(
    kernel: Any,
    name: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    grid: Any,
    params: Mapping[str, Any],
    *,
    num_warps: Any,
    num_stages: Any,
    together: Any,
    input_output_aliases: Any = None,
    **buffers: Any,
) -> None:
    """Raises unless these are what `shmem_call` takes.

    Args:
      inputs, outputs: of one rank: objects with a shape; of a bundle such objects by their names.
      **buffers: scratch, signals, messages and descriptors.
    """
    _check_buffers(name, outputs, **buffers)
    _check_launch(name, grid, num_warps, num_stages, together)
    given = [name for keyword in ("scratch", "signals", "messages") for name in buffers[keyword]]
    _check_names(name, given, params)
    team = () if is_alone(kernel) else ("team",)
    if given and not team:
        raise TypeError(
            f"{name} takes {', '.join(map(repr, given))} of the heap, but its kernel has no parameter 'team' to find "
            "them."
        )
    _check_parameters(kernel, name, inputs, outputs, {*team, *given, *params}, buffers["descriptors"])
    _check_aliases(name, [each for array in inputs for _, each in members("", array)], outputs, input_output_aliases)


def _check_aliases(name: str, inputs: Sequence[Any], outputs: Sequence[Any], aliases: Any) -> None:
    """Raises unless each of these numbers is of an operand or of a result, which can be one array."""
    if aliases is None:
        return
    pairs = list(aliases.items()) if isinstance(aliases, Mapping) else [()]
    known = all(
        len(pair) == 2
        and _is_count(pair[0])
        and pair[0] < len(inputs)
        and _is_count(pair[1])
        and pair[1] < len(outputs)
        for pair in pairs
    )
    if not known or len({result for _, result in pairs}) < len(pairs):
        raise ValueError(
            f"{name} takes input_output_aliases as a mapping from numbers of its {len(inputs)} operands to numbers of "
            f"its {len(outputs)} results, each of them once, not {aliases!r}."
        )
    for operand, result in pairs:
        texts = [f"{np.dtype(of.dtype)}{list(of.shape)}" for of in (inputs[operand], outputs[result])]
        if texts[0] != texts[1]:
            raise ValueError(
                f"{name} takes input_output_aliases of operands and results of the same shape and dtype, and operand "
                f"{operand} is {texts[0]} and result {result} is {texts[1]}."
            )


def _check_buffers(name: str, out_leaves: Sequence[Any], **given: Any) -> None:
    """Raises unless results, scratch, signals, messages and descriptors are what `shmem_call` takes."""
    for keyword, mapping in given.items():
        if not isinstance(mapping, Mapping):
            raise TypeError(f"{name} takes {keyword} as a mapping from parameters of the kernel, not {mapping!r}.")
    arrays = [("out_type", leaf) for leaf in out_leaves]
    arrays += [(f"scratch {key!r}", of) for key, of in given["scratch"].items()]
    for what, of in arrays:
        if not (hasattr(of, "shape") and hasattr(of, "dtype")):
            raise TypeError(f"{name} takes for {what} an object with shape and dtype, not {of!r}.")
        _check_shape(name, what, of.shape)
    for keyword in ("signals", "messages", "descriptors"):
        for key, of in given[keyword].items():
            if keyword == "descriptors" or not _is_count(of):
                for shape in of if _is_pair(of) else (getattr(of, "shape", of),):
                    _check_shape(name, f"{keyword} {key!r}", shape)


def _check_shape(name: str, what: str, shape: Any) -> None:
    if not (isinstance(shape, Sequence) and all(map(_is_count, shape))):
        raise ValueError(f"{name} takes for {what} sizes that are whole numbers and not negative, not {shape!r}.")


def _check_launch(name: str, grid: Any, num_warps: Any, num_stages: Any, together: Any) -> None:
    sizes = grid if isinstance(grid, tuple | list) else [grid]
    if not (1 <= len(sizes) <= 3 and all(_is_count(size, 1) for size in sizes)):
        raise ValueError(f"{name} takes a grid of one to three positive whole numbers, not {grid!r}.")
    if not _is_count(num_warps) or num_warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"{name} takes num_warps of 1, 2, 4, 8, 16 or 32, not {num_warps!r}.")
    for keyword, number, least in (("num_stages", num_stages, 0), ("together", together, 1)):
        if not _is_count(number, least):
            raise ValueError(f"{name} takes {keyword} of at least {least}, a whole number, not {number!r}.")


def _check_names(name: str, buffers: Sequence[str], params: Mapping[str, Any]) -> None:
    names = ["team", *buffers, *params]
    if twice := [one for one in names if names.count(one) > 1]:
        raise ValueError(
            f"{name} takes each parameter of the kernel from one of team, scratch, signals, messages and constants, "
            f"and {twice[0]!r} is in two."
        )
    for key, value in params.items():
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"{name} takes constants that can be hashed, such as a tuple in place of a list, not {key}={value!r}."
            ) from None
        if jax.export.is_symbolic_dim(value):
            raise TypeError(
                f"{name} takes constants that are known when it is traced, not the symbolic size {key}={value}."
            )


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def _check_parameters(
    kernel: Any,
    name: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    named: set[str],
    descriptors: Mapping[str, Descriptor],
) -> None:
    parameters = kernel.arg_names
    reasons = []
    if unknown := sorted(named - set(parameters)):
        reasons.append(f"it has no parameter {', '.join(map(repr, unknown))}")
    pointers = pointers_of(kernel, named)
    arrays = [*inputs, *outputs]
    if len(pointers) != len(arrays):
        reasons.append(
            f"{len(inputs)} operands and {len(outputs)} results make {len(arrays)} pointers, but it has "
            f"{len(pointers)} parameters for them ({', '.join(pointers)}): is one of these a constant, or a scratch, "
            "signals or messages, that the call does not name?"
        )
    elif outputs and "team" in parameters[parameters.index(pointers[len(inputs)]) :]:
        reasons.append("its results do not stand behind 'team'")
    if descriptors and not kernel.is_gluon():
        reasons.append("descriptors are for Gluon kernels")
    described = dict(each for pointer, array in zip(pointers, arrays) for each in members(pointer, array))
    if kernel.is_gluon() and (unknown := sorted(descriptors.keys() - described.keys())):
        reasons.append(f"it has no pointer {', '.join(map(repr, unknown))} to be a descriptor")
    for pointer, array in described.items():
        block, shape = block_of(descriptors.get(pointer, array.shape), array.shape)
        if math.prod(shape) != math.prod(array.shape):
            reasons.append(f"{pointer!r} is an array {list(array.shape)}, and its descriptor reads it as {list(shape)}")
        elif not (len(block) == len(shape) or is_ragged(shape, block) or is_grouped(shape, block)):
            reasons.append(f"{pointer!r} is an array {list(shape)}, and its descriptor has blocks {list(block)}")
    if reasons:
        raise TypeError(f"The kernel of {name} does not fit its call: {'; '.join(reasons)}.")
