"""What a call of a kernel may be: the checks that `shmem_call` and `simulator.run` share."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.export
import numpy as np
import triton


def check_kernel(kernel: Any, what: str) -> None:
    """Raises unless this is a kernel. `what` takes it."""
    if not isinstance(kernel, triton.JITFunction):
        raise TypeError(f"{what} takes a kernel that is decorated with triton.jit or gluon.jit, not {kernel!r}.")


def constants_of(kernel: Any, params: Mapping[str, Any], world: int) -> dict[str, Any]:
    """The kernel's other parameters: those given, as Python's numbers, and WORLD if it has that.

    Raises:
      ValueError: if WORLD is given and not the number of ranks.
    """
    given = {key: value.item() if isinstance(value, np.generic) else value for key, value in params.items()}
    if (said := given.get("WORLD", world)) != world:
        raise ValueError(
            f"{kernel.fn.__name__} takes as WORLD the number of ranks, which is {world}, not {said!r}: leave it out."
        )
    return {"WORLD": world} | given if "WORLD" in kernel.arg_names else given


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
    **buffers: Any,
) -> None:
    """Raises unless these are what `shmem_call` takes.

    Args:
      inputs, outputs: of one rank: objects with a shape.
      **buffers: scratch, signals, messages and descriptors.
    """
    _check_buffers(name, outputs, **buffers)
    _check_launch(name, grid, num_warps, num_stages, together)
    given = [name for keyword in ("scratch", "signals", "messages") for name in buffers[keyword]]
    _check_names(name, given, params)
    _check_parameters(kernel, name, inputs, outputs, {"team", *given, *params}, buffers["descriptors"])


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
                _check_shape(name, f"{keyword} {key!r}", getattr(of, "shape", of))


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
    descriptors: Mapping[str, tuple[int, ...]],
) -> None:
    parameters = kernel.arg_names
    reasons = []
    if unknown := sorted(named - set(parameters)):
        reasons.append(f"it has no parameter {', '.join(map(repr, unknown))}")
    defaults = {parameter.name for parameter in kernel.params if parameter.has_default}
    pointers = [parameter for parameter in parameters if parameter not in named and parameter not in defaults]
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
    elif unknown := sorted(descriptors.keys() - set(pointers)):
        reasons.append(f"it has no pointer {', '.join(map(repr, unknown))} to be a descriptor")
    for pointer, array in zip(pointers, arrays):
        if len(block := descriptors.get(pointer, array.shape)) != len(array.shape):
            reasons.append(f"{pointer!r} is an array {list(array.shape)}, and its descriptor has blocks {list(block)}")
    if reasons:
        raise TypeError(f"The kernel of {name} does not fit its call: {'; '.join(reasons)}.")
