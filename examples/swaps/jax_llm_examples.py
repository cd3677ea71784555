"""Models of jax-llm-examples, on Explicit axes: as they are, and with the products of jaxtaxfree.

The dense layers of llama3 and gpt_oss call one function that calls `jnp.einsum`: one line changes there. In the mixture
of experts of gpt_oss, which is inside of `jax.shard_map`, collectives become jaxtaxfree's by name.

    python examples/swaps/jax_llm_examples.py CHECKOUT llama3|gpt_oss [folder of further packages]

CHECKOUT is one of github.com/jax-ml/jax-llm-examples. Empty modules stand for packages that its checkpoints alone
need, where these are not installed. gpt_oss needs the package tqdm.
"""

import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from jax.sharding import AxisType, Mesh

import jaxtaxfree as jtf

DENSE = [
    (r"^import jax$", "import jax\nimport jaxtaxfree as jtf"),
    (r"return jnp\.einsum\(subscripts, lhs, rhs, ", "return jtf.einsum(subscripts, lhs, rhs, "),
]
MIXTURE = [(r"\bjax\.lax\.(psum|psum_scatter|all_gather)\(", r"jtf.\1(")]
PATCHES = {"llama3": DENSE, "gpt_oss": DENSE + MIXTURE}
NAMES = ("einsum", "psum", "psum_scatter", "all_gather")
SIZES: dict[str, dict[str, Any]] = {
    "llama3": {
        "ffw_size": 128,
        "use_prefill_attn_kernel": False,
        "use_decode_attn_kernel": False,
        "quant_layer": False,
    },
    "gpt_oss": {
        "sliding_attention_map": ["sliding_attention", "full_attention"],
        "sliding_window_size": 8,
        "q_heads": 16,  # there is a sink for each place of a head, so these are equal, as in the published model
        "moe_ffw_size": 128,
        "moe_experts_per_tok": 4,
        "moe_num_experts": 4,  # all of them, so that no router decides by a rounding
        "sample_topk": 1,
    },
}
STEPS = 3


def config_of(model: Any, name: str, mesh: Mesh, dtype: Any) -> Any:
    sizes: dict[str, Any] = {"embed": 64, "q_heads": 8, "kv_heads": 4, "num_layers": 2, "head_dim": 16}
    sizes |= {"vocab_size": 128, "max_seq_len": 32, "causal": True, "quant_cache": False}
    return model.Config(dtype=dtype, mesh=mesh, **sizes | SIZES[name])


def arrays_of(model: Any, cfg: Any, tokens: jax.Array) -> tuple[Any, Any]:
    key = jax.random.key(0)
    sizes = (tokens.shape[0], *([cfg.max_seq_len] if "gpt_oss" in model.__name__ else []))
    return model.Weights.init(key, cfg), model.KVCache.init(key, cfg, *sizes)


def generated(model: Any, cfg: Any, tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """The logits of a prompt, and the tokens that follow."""
    weights, cache = arrays_of(model, cfg, tokens)
    first, logits, cache = model.prefill(tokens, weights, cache, cfg)
    found = [first[:, -1:]]
    for _ in range(STEPS):
        token, cache = model.decode_step(found[-1], weights, cache, cfg)
        found.append(token)
    return logits, found


def gradients(model: Any, cfg: Any, tokens: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        logits, _ = model.forward(tokens, jnp.ones_like(tokens), weights, cfg, None)
        return jnp.mean(logits.astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss))(arrays_of(model, cfg, tokens)[0])


def main() -> int:
    checkout, name = Path(sys.argv[1]), sys.argv[2]
    sys.path[:0] = sys.argv[3:]
    report.stand_in_for_missing()
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_default_matmul_precision", "highest")
    module = f"{name}_jax.model"
    (original,), _ = report.load(checkout / name, [module])
    (swapped,), lines = report.load(checkout / name, [module], {f"{name}_jax/model.py": PATCHES[name]})

    def take(implementation: str | None) -> None:
        functions = {each: report.lenient(getattr(jtf, each), implementation) for each in NAMES}
        vars(swapped)["jtf"] = types.SimpleNamespace(**functions) if implementation else jtf

    mesh = Mesh(np.array(jax.devices("cpu")[:4]).reshape(1, 2, 2), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 1, 128)
    worst = 0.0
    print(f"{name} of jax-llm-examples, Explicit axes (x 1, y 2, z 2)")
    report.row("lines changed", lines)
    for dtype, allowed, ways in ((jnp.float32, 1e-5, (None, "simulate")), (jnp.bfloat16, 3e-2, ("simulate",))):
        configs = [config_of(model, name, mesh, dtype) for model in (original, swapped)]
        with jax.set_mesh(mesh):
            wanted, tokens_wanted = generated(original, configs[0], tokens)
            for implementation in ways:
                take(implementation)
                jax.clear_caches()
                found, tokens_found = generated(swapped, configs[1], tokens)
                by = f"{jnp.dtype(dtype).name}, {implementation or 'by XLA'}"
                apart = report.distance(found, wanted)
                worst = max(worst, apart / allowed)
                report.row(f"logits: difference ({by})", f"{apart:.1e}")
                alike = np.concatenate(tokens_found, 1) == np.concatenate(tokens_wanted, 1)
                report.row(f"greedy tokens alike ({by})", f"{alike.sum()} of {alike.size}")
    configs = [config_of(model, name, mesh, jnp.float32) for model in (original, swapped)]
    with jax.set_mesh(mesh):
        try:
            take(None)
            apart = report.distance(*(gradients(m, cfg, tokens) for m, cfg in zip((swapped, original), configs)))
            worst = max(worst, apart / 1e-4)
            report.row("gradients: largest difference (float32)", f"{apart:.1e}")
        except Exception as error:  # some of its layers are for inference alone
            report.row("gradients", f"none: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
        configs[1] = config_of(swapped, name, mesh, jnp.bfloat16)
        weights, cache = arrays_of(swapped, configs[1], tokens)
        take("fused")

        def step(token: jax.Array, weights: Any, cache: Any) -> Any:
            return swapped.decode_step.__wrapped__(token, weights, cache, configs[1])

        report.row("kernels in a decode step", report.kernels(step, tokens[:, :1], weights, cache))
        take("simulate")
        report.row("XLA's collectives left in it", report.collectives(step, tokens[:, :1], weights, cache))

        def plain(token: jax.Array, weights: Any, cache: Any) -> Any:
            return original.decode_step.__wrapped__(
                token, weights, cache, config_of(original, name, mesh, jnp.bfloat16)
            )

        own = arrays_of(original, config_of(original, name, mesh, jnp.bfloat16), tokens)
        report.row("XLA's collectives in the original", report.collectives(plain, tokens[:, :1], *own))
    return int(worst > 1)


if __name__ == "__main__":
    raise SystemExit(main())
