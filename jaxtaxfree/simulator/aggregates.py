"""Aggregates of Triton's language (`triton.language.core._aggregate`) in an interpreted kernel: values with methods."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime.jit import ConstexprFunction, JITFunction


def is_one(value: Any) -> bool:
    """Whether this is a class that Triton has made an aggregate."""
    return isinstance(value, type) and getattr(value, "__triton_aggregate__", False)


@functools.cache
def convert(aggregate: Any, interpreted: Callable[[JITFunction], Callable]) -> type:
    """The class that stands for an aggregate: the same fields, and its methods interpreted.

    A compiler keeps the fields in registers and checks their types; here they are attributes.

    Args:
      interpreted: what makes a function of Python of a kernel's.
    """
    # Triton keeps the class's own __init__ here, or the one that it has made of the fields.
    init = aggregate.hash_attrs[0]
    init = init.fn if isinstance(init, ConstexprFunction) else init
    fields = aggregate.__aggregate_fields__

    class Aggregate:
        __triton_aggregate__ = True  # for tl.core.aggregate_replace
        __aggregate_fields__ = fields
        __aggregate_defaults__ = aggregate.__aggregate_defaults__

        def __init__(self, *args: Any, **kwargs: Any):
            init(self, *args, **kwargs)
            for name in fields:
                if not hasattr(self, name):
                    raise AttributeError(f"The constructor of {aggregate.__name__} does not set its field {name!r}.")
                if isinstance(value := getattr(self, name), tl.constexpr):
                    setattr(self, name, value.value)  # what is constant is a number in an interpreted kernel

    for name in dir(aggregate):
        member = inspect.getattr_static(aggregate, name)
        if isinstance(member, ConstexprFunction):
            setattr(Aggregate, name, member.fn)
        elif isinstance(member, JITFunction):
            setattr(Aggregate, name, _method(interpreted(member)))
    Aggregate.__name__ = aggregate.__name__
    Aggregate.__qualname__ = aggregate.__qualname__
    Aggregate.__module__ = aggregate.__module__
    return Aggregate


def _method(function: Callable) -> Callable:
    # A function of Python, which an instance binds and the class does not, as Triton does with static ones.
    return lambda *args, **kwargs: function(*args, **kwargs)
