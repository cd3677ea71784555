"""A training step with FSDP and tensor parallelism under `jax.jit`: as it was, and with `jtf.einsum`.

On Auto axes lines say how the operands lie. On Explicit axes the types say it, and what changes is an import.

Layers are scanned and rematerialised; the residual stream is sharded along the sequence.

    python examples/swaps/train_step.py
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf

X, H = P("data", "model"), P("data", None, "model")  # the residual stream [B, T, D], and between the products [B, T, F]
UP, DOWN = P("data", "model"), P("model", "data")  # weights [D, F] and [F, D]
LAYERS, B, T, D, F = 2, 4, 16, 32, 64


def original(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    h = x @ w_up
    h = jax.lax.with_sharding_constraint(jax.nn.silu(h), H)
    y = h @ w_down
    return jax.lax.with_sharding_constraint(x + y, X)


def swapped(x: jax.Array, w_up: jax.Array, w_down: jax.Array, **how: Any) -> jax.Array:
    h = jtf.einsum("btd,df->btf", x, w_up, in_shardings=(X, UP), out_sharding=H, **how)
    h = jax.nn.silu(h)
    y = jtf.einsum("btf,fd->btd", h, w_down, in_shardings=(H, DOWN), out_sharding=X, **how)
    return x + y


EXPLICIT = """
from jax.numpy import einsum
def layer(x, w_up, w_down):
    h = jax.nn.silu(einsum("btd,df->btf", x, w_up, out_sharding=H))
    return x + einsum("btf,fd->btd", h, w_down, out_sharding=X)
"""
IMPORT = (r"^from jax\.numpy import einsum$", "from jaxtaxfree import einsum")


def made(source: str, implementation: str | None = None) -> Callable[..., jax.Array]:
    """The layer of a source."""
    names = dict(globals())
    exec(source, names)
    if implementation:
        names["einsum"] = functools.partial(names["einsum"], implementation=implementation)
    return names["layer"]


def step_of(layer: Callable[..., jax.Array]) -> Callable[..., Any]:
    """(weights, x, target) -> (loss, gradients, weights after a step)."""

    def loss(weights: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda x, w: (layer(x, *w), None))
        y, _ = jax.lax.scan(body, x, weights)
        return jnp.mean((y - target) ** 2)

    def step(weights: Any, x: jax.Array, target: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x, target)
        return value, gradients, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    return step


def compare(kind: str, plain: Any, swap: Any, fused: Any, simulated: Any, changed: int) -> float:
    """The original layer and those of the swap in numbers; the largest difference."""
    types = (getattr(AxisType, kind),) * 2
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "model"), axis_types=types)
    rng = np.random.default_rng(0)

    def array(spec: P, *shape: int) -> jax.Array:
        return jax.device_put((rng.normal(size=shape) / 4).astype(np.float32), NamedSharding(mesh, spec))

    weights = array(P(None, *UP), LAYERS, D, F), array(P(None, *DOWN), LAYERS, F, D)
    given = weights, array(X, B, T, D), array(X, B, T, D)
    print(f"Training step with FSDP and tensor parallelism, {kind} axes (data 2, model 2)")
    with jax.set_mesh(mesh):
        wanted, *others = (jax.jit(step_of(layer))(*given) for layer in (plain, swap, simulated))
        apart = [report.distance(each, wanted) for each in others]
        report.row("lines changed", changed)
        report.row("loss, gradients, weights: largest difference", f"{apart[0]:.1e}")
        report.row("the same of simulated kernels", f"{apart[1]:.1e}")
        report.row("kernels, forward and backward", report.kernels(step_of(fused), *given))
        report.row("XLA's collectives in the original", report.collectives(step_of(plain), *given))
        report.row("XLA's collectives left", report.collectives(step_of(simulated), *given))
    return max(apart)


def main() -> int:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_default_matmul_precision", "highest")
    fused, simulated = (functools.partial(swapped, implementation=name) for name in ("fused", "simulate"))
    bodies = [inspect.getsource(layer).partition("\n")[2] for layer in (original, swapped)]
    worst = compare("Auto", original, swapped, fused, simulated, report.lines_changed(*bodies))
    source = report.patched(EXPLICIT, [IMPORT])
    changed = report.lines_changed(EXPLICIT, source)
    fused, simulated = made(source, "fused"), made(source, "simulate")
    worst = max(worst, compare("Explicit", made(EXPLICIT), made(source), fused, simulated, changed))
    return int(worst > 1e-5)


if __name__ == "__main__":
    raise SystemExit(main())
