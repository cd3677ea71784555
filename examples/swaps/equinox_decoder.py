"""A decoder of Equinox modules with tensor parallelism, on Auto axes: as it was, and with `jtf.einsum`.

Its dense layers go through one function, in which one line changes. `eqx.nn.Linear` keeps its weight as [out, in].

    python examples/swaps/equinox_decoder.py [folder in which equinox is installed]
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf

sys.path[:0] = sys.argv[1:]
import equinox as eqx  # noqa: E402 (from the folder that the caller names)

V, B, T, D, F, HEADS, LAYERS = 64, 4, 8, 32, 64, 4, 2
X, Q, H = P("data", "model"), P("data", None, "model"), P("data", None, "model")
COLUMNS, ROWS = P("model", "data"), P("data", "model")  # weights [out, in], by the ranks' columns and rows

type Dense = Callable[..., jax.Array]


def original(layer: Any, x: jax.Array, ins: P, weight: P, out: P) -> jax.Array:
    x, layer = constrain(x, ins), eqx.tree_at(lambda layer: layer.weight, layer, constrain(layer.weight, weight))
    return constrain(jax.vmap(jax.vmap(layer))(x), out)


def swapped(layer: Any, x: jax.Array, ins: P, weight: P, out: P, einsum: Any = jtf.einsum) -> jax.Array:
    x, layer = constrain(x, ins), eqx.tree_at(lambda layer: layer.weight, layer, constrain(layer.weight, weight))
    return einsum("bti,oi->bto", x, layer.weight, in_shardings=(ins, weight), out_sharding=out)


class Layer(eqx.Module):
    query: Any
    key: Any
    value: Any
    out: Any
    gate: Any
    up: Any
    down: Any

    def __init__(self, key: jax.Array):
        sizes = [(D, D)] * 4 + [(D, F)] * 2 + [(F, D)]
        made = [eqx.nn.Linear(m, n, use_bias=False, key=k) for (m, n), k in zip(sizes, jax.random.split(key, 7))]
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = made

    def __call__(self, x: jax.Array, dense: Dense) -> jax.Array:
        y = norm(x)
        query, key, value = (
            dense(layer, y, X, COLUMNS, Q).reshape(B, T, HEADS, -1) for layer in (self.query, self.key, self.value)
        )
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + dense(self.out, y.reshape(B, T, D), Q, ROWS, X)
        y = norm(x)
        h = jax.nn.silu(dense(self.gate, y, X, COLUMNS, H)) * dense(self.up, y, X, COLUMNS, H)
        return x + dense(self.down, h, H, ROWS, X)


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


class Decoder(eqx.Module):
    embedding: jax.Array
    layers: list[Layer]

    def __init__(self, key: jax.Array):
        self.embedding = jax.random.normal(key, (V, D)) / D**0.5
        self.layers = [Layer(k) for k in jax.random.split(key, LAYERS)]

    def __call__(self, tokens: jax.Array, dense: Dense) -> jax.Array:
        x = constrain(self.embedding[tokens], X)
        for layer in self.layers:
            x = layer(x, dense)
        return constrain(norm(x), P("data")) @ self.embedding.T


def placed(model: Any, mesh: Mesh) -> Any:
    """The model, its weights sharded along both axes."""
    down = ("out", "down")

    def place(path: Sequence[Any], x: jax.Array) -> jax.Array:
        names = [str(getattr(key, "name", "")) for key in path]
        spec = P() if names[-1] == "embedding" else ROWS if set(names).intersection(down) else COLUMNS
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(place, eqx.filter(model, eqx.is_array))


def loss_and_gradients(dense: Dense) -> Callable[..., Any]:
    def loss(model: Any, tokens: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(model(tokens, dense)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))

    return jax.value_and_grad(loss)


def main() -> int:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_default_matmul_precision", "highest")
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    fused, simulated = (
        functools.partial(swapped, einsum=functools.partial(jtf.einsum, implementation=name))
        for name in ("fused", "simulate")
    )
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, V)
    with jax.set_mesh(mesh):
        model = placed(Decoder(jax.random.key(0)), mesh)
        logits = {
            dense: jax.jit(lambda model, dense=dense: model(tokens, dense))(model) for dense in (original, swapped)
        }
        given = model, tokens
        wanted, found, by_kernels = (
            jax.jit(loss_and_gradients(dense))(*given) for dense in (original, swapped, simulated)
        )
        print("Decoder of Equinox modules, Auto axes (data 2, model 2)")
        report.row(
            "lines changed",
            report.lines_changed(*(inspect.getsource(x).partition("\n")[2] for x in (original, swapped))),
        )
        apart = report.distance(logits[swapped], logits[original])
        report.row("logits: largest difference", f"{apart:.1e}")
        alike = jnp.argmax(logits[swapped], -1) == jnp.argmax(logits[original], -1)
        report.row("greedy tokens alike", f"{int(alike.sum())} of {alike.size}")
        report.row("loss and gradients: largest difference", f"{report.distance(found, wanted):.1e}")
        report.row("the same of simulated kernels", f"{report.distance(by_kernels, wanted):.1e}")
        report.row("kernels forward", report.kernels(lambda model: model(tokens, fused), model))
        report.row("kernels forward and backward", report.kernels(loss_and_gradients(fused), *given))
        report.row("XLA's collectives in the original", report.collectives(loss_and_gradients(original), *given))
        report.row("XLA's collectives left", report.collectives(loss_and_gradients(simulated), *given))
    worst = max(apart, report.distance(found, wanted), report.distance(by_kernels, wanted))
    return int(worst > 1e-4 or not bool(alike.all()))


if __name__ == "__main__":
    raise SystemExit(main())
