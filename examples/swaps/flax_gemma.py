"""Flax's NNX Gemma on Explicit axes: as it is, and with the products of jaxtaxfree.

`nnx.Einsum` and `nnx.Linear` keep the product that they call. So it is exchanged in a model that was made, and no line
of the model changes.

    python examples/swaps/flax_gemma.py CHECKOUT [folder of further packages]

CHECKOUT is one of github.com/google/flax. It needs the packages flax and jaxtyping.
"""

import dataclasses
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf

B, T = 4, 8


def swap(model: Any, nnx: Any, einsum: Callable[..., Any], dot_general: Callable[..., Any]) -> None:
    for _, module in nnx.iter_modules(model):
        if isinstance(module, (nnx.Einsum, nnx.Linear)):
            module.einsum_op, module.dot_general = einsum, dot_general


def rules_of(cfg: Any) -> dict[str, Any]:
    """Its own, and those for training with the residual stream along the sequence, not along its last dimension."""
    training = cfg.ShardingConfig.fsdp_tp_sharding()
    return {
        "its rules for sampling": cfg.ShardingConfig.fsdp_tp_sharding(is_sampling=True),
        "its rules for training": training,
        "for training, along the sequence": dataclasses.replace(
            training, act_btd=P("fsdp", "tp", None), rms_norm_weight=P(None)
        ),
    }


def compare(transformer: Any, nnx: Any, config: Any) -> float:
    """The original and the swapped model in numbers; the largest difference."""
    tokens = jax.random.randint(jax.random.key(1), (B, T), 1, 64)
    positions, mask = jnp.tile(jnp.arange(T), (B, 1)), jnp.tile(jnp.tril(jnp.ones((T, T), bool)), (B, 1, 1))

    def made(implementation: str | None, swapped: bool = True) -> tuple[Callable[..., jax.Array], Any]:
        """Logits as a function of weights and tokens, and the weights."""
        model = transformer.Transformer(config, rngs=nnx.Rngs(0))
        if swapped:
            products = (report.lenient(product, implementation) for product in (jtf.einsum, jtf.dot_general))
            swap(model, nnx, *products)
        graph, weights, rest = nnx.split(model, nnx.Param, ...)
        return lambda weights, tokens: nnx.merge(graph, weights, rest)(tokens, positions, None, mask)[0], weights

    def gradients(logits: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.grad(lambda *given: jnp.mean(logits(*given) ** 2))

    original, weights = made(None, swapped=False)
    given = weights, jax.reshard(tokens, P(config.shd_config.act_btd[0]))
    wanted = jax.jit(original)(*given), jax.jit(gradients(original))(*given)
    worst = 0.0
    for name in (None, "simulate"):
        program, _ = made(name)
        found = jax.jit(program)(*given), jax.jit(gradients(program))(*given)
        apart = [report.distance(x, y) for x, y in zip(found, wanted)]
        worst = max(worst, *apart)
        report.row(f"logits, gradients: differences ({name or 'by XLA'})", f"{apart[0]:.1e}, {apart[1]:.1e}")
    fused, simulated = made("fused")[0], made("simulate")[0]
    counts = report.kernels(fused, *given), report.kernels(gradients(fused), *given)
    report.row("kernels forward, and with the gradient", f"{counts[0]}, {counts[1]}")
    report.row("XLA's collectives in the original, forward", report.collectives(original, *given))
    report.row("XLA's collectives left, forward", report.collectives(simulated, *given))
    return worst


def main() -> int:
    checkout = Path(sys.argv[1])
    sys.path[:0] = sys.argv[2:]
    from flax import nnx

    # The example imports it to read checkpoints, of which there is none here.
    for name in ("orbax", "orbax.checkpoint"):
        sys.modules.setdefault(name, types.ModuleType(name))
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_default_matmul_precision", "highest")
    (cfg, transformer), _ = report.load(checkout / "examples" / "gemma", ["transformer_cfg", "transformer"])
    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    worst = 0.0
    print("Flax's NNX Gemma, Explicit axes (fsdp 2, tp 2)")
    report.row("lines of the swap", len(inspect.getsource(swap).splitlines()) - 1)
    for title, rules in rules_of(cfg).items():
        config = cfg.TransformerConfig(
            num_layers=2,
            num_embed=64,
            embed_dim=32,
            hidden_dim=64,
            num_heads=4,
            head_dim=8,
            num_kv_heads=2,
            final_logit_softcap=None,
            use_post_attn_norm=False,
            use_post_ffw_norm=False,
            attention_types=[cfg.AttentionType.GLOBAL] * 2,
            shd_config=rules,
        )
        print(f" {title}")
        with jax.set_mesh(mesh):
            worst = max(worst, compare(transformer, nnx, config))
    return int(worst > 1e-4)


if __name__ == "__main__":
    raise SystemExit(main())
