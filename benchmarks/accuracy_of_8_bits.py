"""How exact a product of 8-bit floating-point numbers is on Hopper, with and without sums that are promoted to f32.

    python benchmarks/accuracy_of_8_bits.py                    # a model of the tensor cores, in NumPy
    python benchmarks/accuracy_of_8_bits.py --depths 4096 --gpu  # and our kernel and XLA's product on a GPU

Hopper's tensor cores shift the products of an instruction (32 of K) and the sum so far to the largest exponent among
them, and keep 14 bits ("DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.3.2). The model does just that. A
kernel that promotes adds such sums up in f32 every 128 of K.

An error is the root mean square of the difference from f64, over the root mean square of the result: of normal numbers,
and of numbers of one sign, whose sums grow with K.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

DEPTHS = (1024, 4096, 8192, 14336, 28672)
INSTRUCTION = 32  # of K
FRACTION = 13  # bits
PROMOTED = (None, 512, 128)  # of K, after which sums are added up in f32
ROWS = 32


def tensor_core(sums: np.ndarray, products: np.ndarray) -> np.ndarray:
    """What an instruction makes of sums [M, N] and products [M, N, 32]: cut off below 13 bits of the largest."""
    terms = np.concatenate([sums[..., None], products], axis=-1)
    exponent = np.frexp(np.max(np.abs(terms), axis=-1))[1] - 1  # of 1.f
    unit = np.ldexp(1.0, exponent - FRACTION)
    return (np.trunc(terms / unit[..., None]).sum(-1) * unit).astype(np.float32).astype(np.float64)


def product(x: np.ndarray, w: np.ndarray, promoted: int | None) -> np.ndarray:
    """x [M, K] by w [N, K]: sums are f32 after every so many of K, or never."""
    total = np.zeros((len(x), len(w)), np.float32)
    sums = np.zeros(total.shape)
    for first in range(0, x.shape[1], INSTRUCTION):
        step = slice(first, first + INSTRUCTION)
        sums = tensor_core(sums, x[:, None, step] * w[None, :, step])
        if promoted and (first + INSTRUCTION) % promoted == 0:
            total, sums = total + sums.astype(np.float32), np.zeros(total.shape)
    return total + sums


def error_of(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)))


def operands(k: int, one_sign: bool, dtype: str = "float8_e4m3fn") -> tuple[np.ndarray, np.ndarray]:
    """[ROWS, K] each, in 8 bits, with the largest number at the largest of the dtype."""
    draw = np.random.default_rng(k)
    found = []
    for _ in range(2):
        x = draw.standard_normal((ROWS, k))
        x = np.abs(x) if one_sign else x
        largest = float(ml_dtypes.finfo(dtype).max)
        found.append((x * (largest / np.abs(x).max(1, keepdims=True))).astype(dtype))
    return found[0], found[1]


def on_gpu(x: Any, w: Any) -> dict[str, np.ndarray]:
    """Our kernel on one rank, which promotes, and XLA's product, in f32. Rows are repeated to fill tiles."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import jaxtaxfree as jtf

    mesh = Mesh(np.array(jax.devices()), ("tp",))
    x, w = np.tile(x, (256 * mesh.size // ROWS, 1)), np.tile(w, (256 * mesh.size // ROWS, 1))
    one = jnp.float32(1)

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        how: Any = {"implementation": "fused", "config": {"kernel": "hopper"}, "rhs_transposed": True}
        how |= {"preferred_element_type": jnp.float32, "lhs_scale": one, "rhs_scale": one}
        return jtf.all_gather_matmul(x, w, "tp", **how)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    specs = {"in_specs": (P("tp"), P("tp")), "out_specs": P(None, "tp"), "check_vma": False}
    found = {"kernel": jax.jit(jax.shard_map(ours, mesh=mesh, **specs))(x, w), "XLA": jax.jit(plain)(x, w)}
    return {name: np.asarray(out)[:ROWS, :ROWS].astype(np.float64) for name, out in found.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", nargs="+", type=int, default=DEPTHS, metavar="K")
    parser.add_argument("--gpu", action="store_true", help="run our kernel and XLA's product, too")
    options = parser.parse_args(arguments)
    for one_sign in (False, True):
        for k in options.depths:
            x, w = operands(k, one_sign)
            left, right = x.astype(np.float64), w.astype(np.float64)
            wanted = left @ right.T
            errors = {f"every {each}" if each else "never": product(left, right, each) for each in PROMOTED}
            errors |= on_gpu(x, w) if options.gpu else {}
            line = ", ".join(f"{name} {error_of(found, wanted):.1e}" for name, found in errors.items())
            print(f"{'one sign' if one_sign else 'normal'}, K {k}: promoted {line}", flush=True)


if __name__ == "__main__":
    main()
