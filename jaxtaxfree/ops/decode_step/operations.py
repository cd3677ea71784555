"""A decode step by operations: the products, sums and attention of each layer are kernels of their own.

It takes what the kernel for all layers does not: any number of sequences, norms behind the blocks of many, and a cache
along the sequence, of 8 bits or in pages. Layers are not scanned, because each has its own window, and because XLA
hands a slice at a known place to a kernel without a copy.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtaxfree.ops.all_gather_matmul import all_gather_matmul
from jaxtaxfree.ops.decode_attention import decode_attention
from jaxtaxfree.ops.decode_step.hopper import Call, refusals_of_form
from jaxtaxfree.ops.decode_step.reference import (
    LAYER_FREE,
    Params,
    Parts,
    added,
    appended,
    as_heads,
    capped,
    gated,
    over_the_sequence,
    rms_norm,
    scaled_embedding,
    scales_of,
)
from jaxtaxfree.ops.decode_step.spec import DecoderSpec
from jaxtaxfree.ops.kv_cache import Placement
from jaxtaxfree.ops.matmul_all_reduce import matmul_all_reduce
from jaxtaxfree.ops.quantize import BLOCK
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.primitive import Lasting
from jaxtaxfree.settings import Settings
from jaxtaxfree.teams import vary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """There is nothing to set: each operation decides by its shape."""


class Operations(Variant[Call]):
    """Five kernels a layer, and XLA's for norms, rotations and the new keys and values."""

    name, Config, kernel = "operations", Config, None

    def refuses(self, call: Call, config: Config) -> list[str]:
        del config
        reasons = refusals_of_form(call)
        if call.cache_dtype.name == "float8_e4m3fn" and call.target.compute_capability < 89:
            reasons.append(Lasting(f"GPUs of compute capability {call.target} have no float8_e4m3fn: take int8"))
        columns = {"o_proj": call.heads * call.model.head_dim, "down_proj": call.d_mlp}
        for each in call.eight if call.world > 1 else ():
            own = columns.get(each.name, 0)
            if each.scales == "block" and own > BLOCK and own % BLOCK:
                of = f"each rank has a multiple of {BLOCK} of its columns, not {own}"
                reasons.append(f"it takes scales of blocks of {each.name} where {of}")
        return reasons

    def by_shape(self, call: Call, asked: Mapping[str, Any]) -> Config:
        del call, asked
        return Config()

    def cost(self, call: Call, config: Config) -> float:
        """Next to that of one launch, which is 0: it was faster wherever it was measured."""
        del call, config
        return 1

    def launch(self, call: Call, config: Config) -> dict[str, Any]:
        raise NotImplementedError("This is no single launch.")


def run(
    params: Params, x: jax.Array, cache: Parts, lengths: jax.Array, cos: jax.Array, sin: jax.Array, *,
    axes: tuple[str, ...], model: DecoderSpec, placement: Placement | None, implementation: str,
    block_tables: jax.Array | None = None,
) -> tuple[jax.Array, Parts]:  # fmt: skip
    """As `reference.run`, of one new token of each sequence, x [B, D]."""
    step = _Step(axes, model, placement, lengths, implementation, block_tables)
    x = scaled_embedding(x, model)
    row = jnp.clip(lengths[:, None], 0, cos.shape[1] - 1)
    by_layer = {name: w for name, w in params.items() if name not in LAYER_FREE}
    cache = tuple(vary(part, axes) for part in cache)
    for i in range(model.layers):
        w = {name: of[i] for name, of in by_layer.items()}
        table = model.table_by_layer[i]
        rotation = cos[table][row][:, :, None], sin[table][row][:, :, None]
        y, cache = step.attention(i, w, rms_norm(x, w["attn_norm"], model), cache, rotation)
        x = step.added(x, y, w, "o_proj", w.get("post_attn_norm"))
        y = step.gated(rms_norm(x, w["mlp_norm"], model), w)
        x = step.added(x, y, w, "down_proj", w.get("post_mlp_norm"))
    unembed = "embed" if model.tied else "unembed"
    y = rms_norm(x, params["final_norm"], model)
    logits = step.times(y, params, unembed, preferred_element_type=jnp.float32)
    return capped(logits * model.logit_scale, model.logit_soft_cap), cache


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is alike in all layers."""

    axes: tuple[str, ...]
    model: DecoderSpec
    placement: Placement | None
    lengths: jax.Array
    implementation: str
    block_tables: jax.Array | None

    def times(self, y: jax.Array, w: Params, name: str | tuple[str, ...], **epilogue: Any) -> Any:
        """y [B, in] times this rank's weight of this name [out, in], or a tuple of products by several."""
        if isinstance(name, tuple):
            weights = tuple(w[each] for each in name)
            scales = tuple(w.get(f"{each}_scale") for each in name)
            scale = None if all(each is None for each in scales) else scales
        else:
            weights, scale = w[name], w.get(f"{name}_scale")
        how: dict[str, Any] = {"rhs_transposed": True, "rhs_scale": scale, "implementation": self.implementation}
        return all_gather_matmul(y, weights, (), **how, **epilogue)

    def gated(self, y: jax.Array, w: Params) -> jax.Array:
        """The inner part of the MLP, of y [B, D]: [B, F / W]."""
        names = "gate_proj", "up_proj"
        if all(f"{name}_scale" not in w for name in names):
            return self.times(y, w, "up_proj", gate=w["gate_proj"], activation=self.model.gate_activation)
        # No kernel for few rows has a gate of 8 bits.
        gate, up = self.times(y, w, names, preferred_element_type=jnp.float32)
        return gated(gate, up, self.model).astype(y.dtype)

    def added(self, x: jax.Array, y: jax.Array, w: Params, name: str, norm: jax.Array | None) -> jax.Array:
        """The residual stream x [B, D] and a block's result, y [B, in / W] times weight [D, in / W], of all ranks."""
        how: dict[str, Any] = {"rhs_transposed": True, "implementation": self.implementation}
        how["rhs_scale"] = w.get(f"{name}_scale")
        return added(x, functools.partial(matmul_all_reduce, y, w[name], self.axes, **how), norm, self.model)

    def attention(
        self, layer: int, w: Params, y: jax.Array, cache: Parts, rotation: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, Parts]:
        """Of normalised y [B, D] what this rank's heads find, [B, heads * H], and the cache with the new token."""
        model, names = self.model, ("q", "k", "v")
        bias = {"bias": tuple(w[f"{name}_bias"] for name in names)} if model.qkv_bias else {}
        made = self.times(y, w, tuple(f"{name}_proj" for name in names), **bias)
        q, k, v = (as_heads(name, of[:, None], w, rotation, model) for name, of in zip(names, made))
        window = model.window_by_layer[layer]
        at, counts = self.lengths[:, None], jnp.ones_like(self.lengths)
        cache = appended(cache, layer, k, v, at, counts, self.placement, self.axes, self.block_tables)
        past = tuple(part[layer] for part in cache)
        if self.placement is None:
            y = decode_attention(
                q, past[0], past[1], (), **scales_of(past[2:]), scale=model.score_factor, local_window_size=window,
                key_value_seq_lengths=self.lengths + 1, logits_soft_cap=model.score_soft_cap, kv_layout="BKSH",
                block_tables=self.block_tables, implementation=self.implementation,
            )  # fmt: skip
        else:
            where = self.placement, self.axes, model, self.implementation
            y = over_the_sequence(q, past, self.lengths, window, *where, self.block_tables)
        return y.reshape(len(y), -1), cache
