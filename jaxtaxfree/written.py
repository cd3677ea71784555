"""Triton kernels around other ones, from source that this library writes."""

import functools
import hashlib
import linecache
from collections.abc import Iterable, Mapping
from typing import Any

import triton


def compiled_from(source: str, place: str, name: str, space: dict[str, Any]) -> Any:
    """`triton.jit` of a function that is in no file: Triton finds its source where Python's tracebacks do.

    Args:
      place: stands for the file in reports, such as "<iris_call pull>".
      name: of the function.
      space: its globals, to which it is added.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    place = f"{place[:-1]} {digest}>"
    linecache.cache[place] = (len(source), None, source.splitlines(True), place)
    exec(compile(source, place, "exec"), space)
    return triton.jit(space[name])


def multiples_of_16(kernel: Any, params: Mapping[str, Any]) -> tuple[str, ...]:
    """The parameters of a kernel that are given whole numbers which 16 divides, but for constants.

    Triton compiles a kernel for these, so that rows with such strides are loaded 16 bytes at a time. It leaves out what
    `do_not_specialize` names; so does this.
    """
    own = {each.name for each in kernel.params if not (each.is_constexpr or each.do_not_specialize)}
    own -= {each.name for each in kernel.params if each.do_not_specialize_on_alignment}
    return tuple(
        name
        for name, value in params.items()
        if name in own and type(value) is int and value % 16 == 0 and abs(value) < 2**31
    )


def telling(
    kernel: Any, named: Mapping[str, Any], pointers: Iterable[str], multiples: Iterable[str], same: Mapping[str, str]
) -> tuple[Any, dict[str, Any]]:
    """A kernel that calls another one and multiplies some of its numbers by 16, and what takes the place of `named`.

    jax-triton tells the compiler of pointers only that they are multiples of 16, and passes none for a result that is
    an operand.

    Args:
      named: what the kernel is given by name.
      pointers: its other parameters.
      multiples: of `named`, the numbers that 16 divides.
      same: by pointers that are not passed, expressions for what they are.
    """
    factors = {name: _factor(name, kernel.arg_names) for name in multiples}
    # jax-triton makes a constant of 1, which is another type.
    values = {factors[name]: named[name] // 16 + (named[name] == 16) for name in factors}
    texts = {name: f"{factors[name]} * 16{' - 16' if named[name] == 16 else ''}" for name in factors}
    given = {*pointers, *named}
    parameters = tuple((each.name, each.is_constexpr) for each in kernel.params if each.name in given)
    others = {key: value for key, value in named.items() if key not in factors}
    texts |= same
    return _around(kernel, parameters, tuple(factors.items()), tuple(texts.items())), others | values


def _factor(name: str, taken: Iterable[str]) -> str:
    factor = f"{name}_by_16"
    while factor in taken:
        factor += "_"
    return factor


@functools.cache
def _around(kernel: Any, parameters: tuple, factors: tuple, texts: tuple) -> Any:
    names, values = dict(factors), dict(texts)
    taken = [(name, constant) for name, constant in parameters if name in names or name not in values]
    takes = ", ".join(f"{names.get(name, name)}{': tl.constexpr' * constant}" for name, constant in taken)
    gives = ", ".join(f"{name}={values.get(name, name)}" for name, _ in parameters)
    name = kernel.fn.__name__
    source = f"def {name}({takes}):\n    the_kernel_itself({gives})\n"
    space = {"tl": triton.language, "the_kernel_itself": kernel, "__name__": __name__}
    return compiled_from(source, f"<launch of {name}>", name, space)
