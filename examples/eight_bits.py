"""Trains a layer whose products have operands of 8 bits, with scales of the current values.

    python examples/eight_bits.py              # on GPUs, or on two virtual CPU devices

The forward pass multiplies float8_e4m3fn. The backward pass takes the operands as they were before ("straight
through"), and its two products are fused ones of the operands' own dtype. Beside it the same layer trains without 8
bits. The losses of both are printed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf

AXIS = "tp"
ROWS, K, N = 64, 256, 128  # of all ranks together


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def product(x: jax.Array, w: jax.Array, axis_name: str) -> jax.Array:
    """all_gather(x) @ w^T, in 8 bits: x [M, K] of this rank, w [N, K] of this rank."""
    return _forward(x, w, axis_name)[0]


def _forward(x: jax.Array, w: jax.Array, axis_name: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    (x8, x_scale), (w8, w_scale) = (jtf.quantize(each, jnp.float8_e4m3fn, block=(1, -1)) for each in (x, w))
    scales = {"lhs_scale": x_scale, "rhs_scale": w_scale}
    y = jtf.all_gather_matmul(x8, w8, axis_name, rhs_transposed=True, preferred_element_type=x.dtype, **scales)
    return y, (x, w)


def _backward(axis_name: str, operands: tuple[jax.Array, jax.Array], ct: jax.Array) -> Any:
    _, back = jax.vjp(lambda x, w: jtf.all_gather_matmul(x, w.T, axis_name), *operands)
    return back(ct)


product.defvjp(_forward, _backward)


def exact(x: jax.Array, w: jax.Array, axis_name: str) -> jax.Array:
    return jtf.all_gather_matmul(x, w.T, axis_name)


def train(multiply: Any, mesh: jax.sharding.Mesh, steps: int = 60) -> list[float]:
    """The losses of a layer that learns another one's results by gradient descent."""
    draw = np.random.default_rng(0)
    x, target = (draw.normal(size=shape).astype(np.float32) for shape in ((ROWS, K), (N, K)))

    def step(w: jax.Array, x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean((multiply(x, w, AXIS) - exact(x, target, AXIS)) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 3.0 * gradient, lax.pmean(value, AXIS)

    rows = P(AXIS)
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(rows, rows, rows), out_specs=(rows, P())))
    w, losses = jnp.zeros_like(target), []
    for _ in range(steps):
        w, loss = run(w, x, target)
        losses.append(float(loss))
    return losses


def main() -> None:
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        devices = jax.devices("cpu")
    mesh = jax.sharding.Mesh(np.array(devices[:2]), (AXIS,))
    eight, sixteen = train(product, mesh), train(exact, mesh)
    for step in range(0, len(eight), 10):
        print(f"step {step:3}: loss {eight[step]:8.3f} in 8 bits, {sixteen[step]:8.3f} without")
    print(f"step {len(eight) - 1:3}: loss {eight[-1]:8.3f} in 8 bits, {sixteen[-1]:8.3f} without")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main()
