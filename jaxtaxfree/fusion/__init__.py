"""`fuse`: puts the operations into programs that say `lax.all_gather`, `lax.psum` and `lax.psum_scatter`."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax

from jaxtaxfree.fusion.plan import plan
from jaxtaxfree.fusion.report import Found, Missed, Report
from jaxtaxfree.fusion.rewrite import run
from jaxtaxfree.primitive import check_implementation

__all__ = ["Found", "Fused", "Missed", "Report", "fuse"]

_log = logging.getLogger("jaxtaxfree")


class Fused:
    """A function in which `fuse` replaces what it finds."""

    def __init__(self, fn: Callable[..., Any], implementation: str | None):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._implementation = implementation
        self._logged: set[str] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, jaxpr, out_tree = self._traced(args, kwargs)
        # Outside of a trace, calls of jax.jit at the top are what is compiled, so they stay.
        planned = plan(jaxpr, open_calls=any(isinstance(x, jax.core.Tracer) for x in flat))
        self._check(planned.report)
        return jax.tree.unflatten(out_tree, run(planned, jaxpr.consts, flat, self._implementation))

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """What is found and what is missed with these arguments, arrays or `jax.ShapeDtypeStruct`; nothing runs."""
        _, jaxpr, _ = self._traced(args, kwargs)
        return plan(jaxpr).report

    def _traced(self, args: Any, kwargs: Any) -> tuple[list[Any], Any, Any]:
        flat, tree = jax.tree.flatten((args, kwargs))
        out_trees = []

        def flat_fn(*flat: Any) -> list[Any]:
            args, kwargs = jax.tree.unflatten(tree, flat)
            leaves, out_tree = jax.tree.flatten(self._fn(*args, **kwargs))
            out_trees.append(out_tree)
            return leaves

        jaxpr = jax.make_jaxpr(flat_fn)(*flat)
        return flat, jaxpr, out_trees[-1]

    def _check(self, report: Report) -> None:
        name = getattr(self._fn, "__name__", repr(self._fn))
        if report.missed and self._implementation in ("fused", "simulate"):
            missed = "\n".join(f"- {each}" for each in report.missed)
            raise NotImplementedError(
                f"jaxtaxfree.fuse({name}, implementation={self._implementation!r}) cannot replace {len(report.missed)} "
                f"of the collectives next to a product:\n{missed}\nimplementation=None leaves them as they are."
            )
        if (text := f"fuse({name}): {report}") not in self._logged:
            self._logged.add(text)
            _log.info("%s", text)


def fuse(fn: Callable[..., Any], *, implementation: str | None = None) -> Fused:
    """The same function, but gathers before products and sums after them are fused with the products.

    Traces `fn`, finds in its jaxpr

      lax.all_gather, then a product           all_gather_matmul
      a product, then lax.psum_scatter         matmul_reduce_scatter
      a product, then lax.psum                 matmul_all_reduce

    and runs the jaxpr with these operations in their places: in bodies of `jax.shard_map`, and in programs of global
    arrays on Explicit axes, whose types say the same (`jax.reshard` before a product, `out_sharding` of one). It looks
    through casts, reshapes and transposes between the two, takes along several products of one gather, and bias,
    activation, gate and residual behind a product, and looks into `jax.jit`, `lax.scan`, `lax.while_loop`,
    `lax.cond` and `jax.checkpoint`. docs/fuse.md has the rules. What does not fit stays as it is.

    The result is traced as often as it is called: put `jax.jit` around it. It can be differentiated and mapped. Fuse
    first, then differentiate, `jax.grad(jaxtaxfree.fuse(f))`: the operations bring derivatives of their own, which
    `fuse(jax.grad(f))` would have to find one by one.

    Args:
      fn: a function of pytrees of arrays. What is no array has to be bound before, by `functools.partial` or a closure.
      implementation: of the operations. None: the kernel where it can run and is not known to be slower. "fused" (and
        "simulate") insist on it, and on every collective next to a product.

    Returns: a function with the signature of `fn`. Its method `report(*args)` takes the same arguments, or
      `jax.ShapeDtypeStruct` in their places, and returns the `Report` of what was found, and of what was missed and
      why. It runs nothing, and can be printed. A call logs its report once, at INFO level by the logger "jaxtaxfree".

    Raises:
      ValueError: if there is no such implementation.

    The function raises what `fn` and the operations raise, and
      NotImplementedError: if implementation="fused" (or "simulate") and something was missed. The error gives it all.
    """
    check_implementation(implementation)
    return Fused(fn, implementation)
