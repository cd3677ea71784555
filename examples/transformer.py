"""A byte-level decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU or experts of it.

It comes in two forms that share their mathematics and their parameters. `forward` takes whole sequences on one
device and is plain JAX; train.py uses it. `prefill` and `decode` are the tensor-parallel form, called inside
`jax.shard_map` over one mesh axis; decode_loop.py uses them.

In the tensor-parallel form the residual stream is sharded over tokens: each of the W ranks owns B / W of the
sequences. Norms and residual additions are therefore local, and every block is

    all_gather_matmul(norm(x), column-parallel weight)   all tokens, this rank's heads, or columns after SwiGLU
    attention, in a block that has it                    see below
    matmul_reduce_scatter(y, row-parallel weight)        this rank's tokens, summed over the ranks, plus x

With `n_experts` the second block of a layer is a mixture of experts, of which each rank has E / W:

    routing.top_k(norm(x) @ router)                      this rank's tokens choose
    moe(norm(x), experts, weights, ...)                  they go to the experts' ranks, and come back summed, plus x

Prefill attends by heads: each rank has all keys of its own heads, so attention is local. Decode attends by sequence:
the cache is sharded along the sequence, in blocks that the ranks take in turn, so that a context may be as long as
the memory of all GPUs allows, also for a model with fewer key/value heads than there are GPUs, and every GPU reads its
part of every sequence. Between the two, one all-to-all per layer turns the prompts' keys and values over. A decode
step then is

    all_gather(qkv)                          one token's queries, keys and values of all heads are a few KB
    append_kv                                the rank whose turn it is keeps the new key and value
    decode_attention(..., output="heads")    over all ranks' keys; the result of this rank's heads, as w_o wants them

A third form is `read_whole` and `decode_whole`: `jaxtaxfree.decode_step` is a whole step, and `stack` makes its
parameters of these. Every rank has the residual stream, and the keys and values of its own heads.

Letters of shapes, those of jax.nn where it has them:

    B sequences, T new tokens, S cached tokens, N query heads, K key/value heads, G = N / K, H head size,
    D model, F mlp, V vocabulary (the 256 bytes), L layers, E experts, W ranks

Parameters. A plain P(None, "tp") or P("tp", None) has to hand each rank whole heads, so columns are ordered by owner
and not by kind, which works for every W that divides K, F and V:

    embed      [V, D]               replicated
    w_qkv      [D, K * (G + 2) * H] columns; per key/value head: its G query heads, then its key, then its value
    w_o        [N * H, D]           rows; heads in the order of w_qkv
    w_gate     [D, F]               columns
    w_up       [D, F]               columns
    w_down     [F, D]               rows
    unembed    [D, V]               columns
    *_norm     [D]                  replicated

and of a mixture of experts w_gate, w_up [E, D, F] and w_down [E, F, D] by experts, and router [D, E] replicated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf

Params = dict[str, Any]
KeysAndValues = tuple[jax.Array, jax.Array]  # one layer's, [B, S / W, K, H] of this rank
Cache = list[KeysAndValues]
Attention = Callable[[int, jax.Array], tuple[jax.Array, KeysAndValues]]
DecodeState = tuple[jax.Array, jax.Array, Cache, jax.Array]  # tokens done, last token, cache, all tokens

# Positions that a rank keeps before those of the next rank follow; short, since the demo's texts are.
BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Config:
    d_model: int = 128
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 16
    d_mlp: int = 384
    vocab: int = 256
    context: int = 256
    rope_theta: float = 10_000.0
    n_experts: int = 0  # none: every token has the one MLP
    n_chosen: int = 2

    @property
    def group(self) -> int:
        return self.n_heads // self.n_kv_heads

    def divides(self, world: int) -> bool:
        """Whether every sharded axis splits evenly over `world` ranks."""
        parts = self.n_kv_heads, self.n_experts or self.d_mlp, self.vocab
        return all(size % world == 0 for size in parts)


def init(key: jax.Array, cfg: Config) -> Params:
    """Random parameters in float32."""
    keys = iter(jax.random.split(key, 2 + (6 if cfg.n_experts else 5) * cfg.n_layers))

    def normal(rows: int, cols: int, scale: float = 1.0, each: tuple[int, ...] = ()) -> jax.Array:
        return scale / math.sqrt(rows) * jax.random.normal(next(keys), (*each, rows, cols))

    # The two matmuls of a layer that write to the residual stream start smaller, so that its size does not grow with L.
    out = 1 / math.sqrt(2 * cfg.n_layers)
    q_dim, d, f = cfg.n_heads * cfg.head_dim, cfg.d_model, cfg.d_mlp
    each = (cfg.n_experts,) if cfg.n_experts else ()
    return {
        "embed": normal(cfg.vocab, d, scale=math.sqrt(cfg.vocab / d)),
        "layers": [
            {
                "attn_norm": jnp.ones(d),
                "w_qkv": normal(d, cfg.n_kv_heads * (cfg.group + 2) * cfg.head_dim),
                "w_o": normal(q_dim, d, scale=out),
                "mlp_norm": jnp.ones(d),
                **({"router": normal(d, cfg.n_experts)} if cfg.n_experts else {}),
                "w_gate": normal(d, f, each=each),
                "w_up": normal(d, f, each=each),
                "w_down": normal(f, d, scale=out, each=each),
            }
            for _ in range(cfg.n_layers)
        ],
        "final_norm": jnp.ones(d),
        "unembed": normal(d, cfg.vocab),
    }


def param_specs(cfg: Config, axis_name: str = "tp") -> Params:
    """The PartitionSpec of each parameter, in the tree of `init`."""
    layer = {
        "attn_norm": P(),
        "w_qkv": P(None, axis_name),
        "w_o": P(axis_name, None),
        "mlp_norm": P(),
        "w_gate": P(None, axis_name),
        "w_up": P(None, axis_name),
        "w_down": P(axis_name, None),
    }
    if cfg.n_experts:
        layer |= {"router": P(), **dict.fromkeys(("w_gate", "w_up", "w_down"), P(axis_name))}
    return {
        "embed": P(),
        "layers": [dict(layer) for _ in range(cfg.n_layers)],
        "final_norm": P(),
        "unembed": P(None, axis_name),
    }


def cache_specs(cfg: Config, axis_name: str = "tp") -> list[tuple[P, P]]:
    """The PartitionSpec of each array of the cache: all sequences and heads, the rank's own positions."""
    return [(P(None, axis_name), P(None, axis_name)) for _ in range(cfg.n_layers)]


def cache_length(needed: int, world: int) -> int:
    """The shortest cache with room for so many positions of which all ranks keep equally many."""
    return needed + -needed % (world * BLOCK)


# The mathematics that both forms share.


def precision_of(x: jax.Array) -> lax.Precision | None:
    """float32 means float32: by default a GPU rounds the operands of a float32 matmul to TF32, which flips tokens."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.matmul(x, w, precision=precision_of(x))


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """x [..., D] -> [..., D]. The statistics are those of one token, so tokens may live on any rank."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)
    return (x32 * scale).astype(x.dtype) * gain


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates x [B, T, heads, H] by its positions [B, T]."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, :, None, None] * frequency  # [B, T, 1, H/2]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def split_qkv(qkv: jax.Array, positions: jax.Array, cfg: Config) -> tuple[jax.Array, jax.Array, jax.Array]:
    """qkv [B, T, K * (G + 2) * H] -> q [B, T, K, G, H], k and v [B, T, K, H]; K is all heads or one rank's."""
    b, t, _ = qkv.shape
    qkv = qkv.reshape(b, t, -1, cfg.group + 2, cfg.head_dim)
    q, k, v = qkv[..., : cfg.group, :], qkv[..., cfg.group, :], qkv[..., cfg.group + 1, :]
    q = rope(q.reshape(b, t, -1, cfg.head_dim), positions, cfg.rope_theta).reshape(q.shape)
    return q, rope(k, positions, cfg.rope_theta), v


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q [B, T, K, G, H], k and v [B, S, K, H], mask [B or 1, T, S] (True attends) -> [B, T, K * G * H]."""
    precision = precision_of(q)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores / math.sqrt(q.shape[-1]), jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision=precision)
    return out.reshape(*out.shape[:2], -1)


def choose(x: jax.Array, layer: Params, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """x [T, D] -> the experts of each token, i32 [T, n_chosen], and their weights, f32, which add up to 1."""
    logits = matmul(x, layer["router"]).astype(jnp.float32)
    return jtf.routing.top_k(logits, cfg.n_chosen, normalise="sum")


# Whole sequences on one device.


def mlp(x: jax.Array, layer: Params, cfg: Config) -> jax.Array:
    """x [B, T, D] -> [B, T, D]: SwiGLU; of a mixture every expert takes all tokens, and their choices are weighed."""
    if not cfg.n_experts:
        return matmul(jax.nn.silu(matmul(x, layer["w_gate"])) * matmul(x, layer["w_up"]), layer["w_down"])
    rows = x.reshape(-1, cfg.d_model)
    experts, weights = choose(rows, layer, cfg)
    hidden = jax.nn.silu(matmul(rows, layer["w_gate"])) * matmul(rows, layer["w_up"])  # [E, B * T, F]
    share = jnp.sum(jax.nn.one_hot(experts, cfg.n_experts, axis=0) * weights, axis=-1)  # [E, B * T]
    return jnp.sum(share[..., None] * matmul(hidden, layer["w_down"]), axis=0).astype(x.dtype).reshape(x.shape)


def forward(params: Params, tokens: jax.Array, cfg: Config) -> jax.Array:
    """tokens [B, T] -> logits [B, T, V] of the tokens that follow."""
    b, t = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), (b, t))
    causal = jnp.tril(jnp.ones((1, t, t), bool))
    x = params["embed"][tokens]  # [B, T, D]
    for layer in params["layers"]:
        with jax.named_scope("attention"):
            qkv = matmul(rms_norm(x, layer["attn_norm"]), layer["w_qkv"])
            q, k, v = split_qkv(qkv, positions, cfg)
            # Queries in blocks: a block reads only the keys that it may attend to, which saves near half the work.
            blocks = [(slice(i, i + 32), slice(0, i + 32)) for i in range(0, t, 32)]
            y = [attend(q[:, new], k[:, seen], v[:, seen], causal[:, new, seen]) for new, seen in blocks]
            x = x + matmul(jnp.concatenate(y, axis=1), layer["w_o"])
        with jax.named_scope("mlp"):
            x = x + mlp(rms_norm(x, layer["mlp_norm"]), layer, cfg)
    with jax.named_scope("unembed"):
        return matmul(rms_norm(x, params["final_norm"]), params["unembed"]).astype(jnp.float32)


# Tensor parallel, inside shard_map: every function below runs once per rank, on that rank's shards.


def gather_matmul(x: jax.Array, w: jax.Array, axis_name: str, implementation: str | None, **kwargs: Any) -> jax.Array:
    """x [tokens / W, D] of this rank, w [D, C / W] its columns -> [tokens, C / W]."""
    return jtf.all_gather_matmul(x, w, axis_name, precision=precision_of(x), implementation=implementation, **kwargs)


def scatter_matmul(
    y: jax.Array, w: jax.Array, residual: jax.Array, axis_name: str, implementation: str | None
) -> jax.Array:
    """y [tokens, C / W], w [C / W, D] this rank's rows -> [tokens / W, D] of this rank: residual + sum over ranks."""
    return jtf.matmul_reduce_scatter(
        y, w, axis_name, precision=precision_of(y), residual=residual, implementation=implementation
    )


def sharded_mlp(x: jax.Array, layer: Params, cfg: Config, axis_name: str, implementation: str | None) -> jax.Array:
    """x [tokens / W, D] of this rank -> x and what the MLP, or the experts of the tokens, add to it."""
    y = rms_norm(x, layer["mlp_norm"])
    if cfg.n_experts:
        experts = layer["w_gate"], layer["w_up"], layer["w_down"]
        how = {"precision": precision_of(x), "implementation": implementation}
        return x + jtf.moe(y, *choose(y, layer, cfg), *experts, axis_name, **how)
    gate = {"gate": layer["w_gate"], "activation": jax.nn.silu}
    y = gather_matmul(y, layer["w_up"], axis_name, implementation, **gate)
    return scatter_matmul(y, layer["w_down"], x, axis_name, implementation)


def by_sequence(x: jax.Array, length: int, axis_name: str) -> jax.Array:
    """x [B, T, K / W, H], this rank's heads at all positions -> [B, length / W, K, H], all heads at its positions."""
    b, t, k, h = x.shape
    world = lax.axis_size(axis_name)
    x = jnp.pad(x, ((0, 0), (0, length - t), (0, 0), (0, 0)))
    x = x.reshape(b, -1, world, BLOCK, k, h)
    x = lax.all_to_all(x, axis_name, split_axis=2, concat_axis=4, tiled=True)  # [B, blocks, 1, BLOCK, K, H]
    return x.reshape(b, length // world, world * k, h)


def attend_to_prompts(
    qkv: jax.Array, positions: jax.Array, length: int, cfg: Config, axis_name: str
) -> tuple[jax.Array, KeysAndValues]:
    """Causal attention among prompts: qkv [B, T, (this rank's heads)] -> [B, T, N / W * H] and the layer's cache."""
    q, k, v = split_qkv(qkv, positions, cfg)
    mask = positions[:, None, :] <= positions[:, :, None]  # [B, T, T]
    return attend(q, k, v, mask), (by_sequence(k, length, axis_name), by_sequence(v, length, axis_name))


def attend_to_cache(
    past: KeysAndValues, qkv: jax.Array, lengths: jax.Array, cfg: Config, axis_name: str, implementation: str | None
) -> tuple[jax.Array, KeysAndValues]:
    """Attention of one new token: qkv [B, 1, (this rank's heads)] -> [B, 1, N / W * H] and the cache with the token.

    Slots past the length of a sequence are empty or hold the padding of a short prompt. Nothing attends to them.
    """
    b = len(lengths)
    qkv = jtf.all_gather(qkv, axis_name, axis=2, tiled=True, implementation=implementation)
    q, k, v = split_qkv(qkv, lengths[:, None], cfg)  # the token's position is the length so far
    placement = {"placement": "round_robin", "block_size": BLOCK}
    keys, values = jtf.append_kv(past, k, v, lengths, axis_name, **placement)
    y = jtf.decode_attention(
        q.reshape(b, 1, cfg.n_heads, cfg.head_dim),
        keys,
        values,
        axis_name,
        key_value_seq_lengths=lengths + 1,
        output="heads",
        implementation=implementation,
        **placement,
    )
    return y.reshape(b, 1, -1), (keys, values)


def step(
    params: Params,
    tokens: jax.Array,
    batch: int,
    attention: Attention,
    cfg: Config,
    axis_name: str = "tp",
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """Takes T new tokens of every sequence: the whole prompt in prefill, T = 1 in decode.

    Args:
      params: this rank's shards.
      tokens: this rank's sequences, [B / W, T].
      batch: B.
      attention: (layer, qkv [B, T, K / W * (G + 2) * H]) -> (this rank's heads [B, T, N / W * H], the layer's cache).

    Returns:
      This rank's residual stream [B / W, T, D], and the cache.
    """
    t = tokens.shape[1]
    x = params["embed"][tokens].reshape(-1, cfg.d_model)  # [B/W * T, D]
    cache = []
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope("attention"):
            qkv = gather_matmul(rms_norm(x, layer["attn_norm"]), layer["w_qkv"], axis_name, implementation)
            y, keys_and_values = attention(i, qkv.reshape(batch, t, -1))
            cache.append(keys_and_values)
            x = scatter_matmul(y.reshape(batch * t, -1), layer["w_o"], x, axis_name, implementation)
        with jax.named_scope("mlp"):
            x = sharded_mlp(x, layer, cfg, axis_name, implementation)
    return x.reshape(-1, t, cfg.d_model), cache


def read_prompts(
    params: Params,
    prompts: jax.Array,
    batch: int,
    length: int,
    cfg: Config,
    axis_name: str = "tp",
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """prompts [B / W, T] of this rank -> its residual stream [B / W, T, D], and a cache of `length` positions."""
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1]), (batch, prompts.shape[1]))

    def attention(layer: int, qkv: jax.Array) -> tuple[jax.Array, KeysAndValues]:
        del layer
        return attend_to_prompts(qkv, positions, length, cfg, axis_name)

    return step(params, prompts, batch, attention, cfg, axis_name, implementation)


def next_token(
    params: Params,
    cache: Cache,
    token: jax.Array,
    lengths: jax.Array,
    cfg: Config,
    axis_name: str = "tp",
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """token [B / W] of this rank, lengths [B] before it -> the residual stream [B / W, D], and the cache."""

    def attention(layer: int, qkv: jax.Array) -> tuple[jax.Array, KeysAndValues]:
        return attend_to_cache(cache[layer], qkv, lengths, cfg, axis_name, implementation)

    x, cache = step(params, token[:, None], len(lengths), attention, cfg, axis_name, implementation)
    return x[:, 0], cache


def logits_shard(params: Params, x: jax.Array, axis_name: str = "tp", implementation: str | None = None) -> jax.Array:
    """x [B / W, D] -> float32 logits [B, V / W]: all sequences, this rank's part of the vocabulary."""
    with jax.named_scope("unembed"):
        x = rms_norm(x, params["final_norm"])
        return gather_matmul(x, params["unembed"], axis_name, implementation, preferred_element_type=jnp.float32)


def greedy(logits: jax.Array, axis_name: str = "tp", implementation: str | None = None) -> jax.Array:
    """logits [B, V / W] -> the likeliest token of each of this rank's sequences, [B / W]."""
    with jax.named_scope("greedy"):
        own = logits.shape[0] // lax.axis_size(axis_name)
        token = jtf.sample_greedy(logits, axis_name, implementation=implementation)
        return lax.dynamic_slice_in_dim(token, lax.axis_index(axis_name) * own, own)


def prefill(
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    length: int,
    cfg: Config,
    axis_name: str = "tp",
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """Reads the prompts.

    Args:
      prompts: this rank's sequences, [B / W, T], padded on the right.
      lengths: of all prompts, [B], the same on every rank.
      length: positions of the cache, over all ranks: a `cache_length`.

    Returns:
      The first generated token of this rank's sequences [B / W], and the cache.
    """
    b_local = prompts.shape[0]
    x, cache = read_prompts(params, prompts, len(lengths), length, cfg, axis_name, implementation)
    last = lax.dynamic_slice_in_dim(lengths, lax.axis_index(axis_name) * b_local, b_local) - 1
    x = x[jnp.arange(b_local), last]  # [B/W, D]
    return greedy(logits_shard(params, x, axis_name, implementation), axis_name, implementation), cache


def decode(
    params: Params,
    cache: Cache,
    first: jax.Array,
    lengths: jax.Array,
    n_tokens: int,
    cfg: Config,
    axis_name: str = "tp",
    implementation: str | None = None,
) -> jax.Array:
    """Greedy decoding after `prefill`: n_tokens of each of this rank's sequences, [B / W, n_tokens].

    `first` [B / W] is the first of them; `lengths` [B] are the lengths of all prompts.
    """

    def one_token(state: DecodeState) -> DecodeState:
        i, token, cache, out = state
        x, cache = next_token(params, cache, token, lengths + i, cfg, axis_name, implementation)
        token = greedy(logits_shard(params, x, axis_name, implementation), axis_name, implementation)
        return i + 1, token, cache, out.at[:, i + 1].set(token)

    out = jnp.zeros((first.shape[0], n_tokens), jnp.int32).at[:, 0].set(first)
    state = (jnp.int32(0), first, cache, out)
    return lax.while_loop(lambda state: state[0] < n_tokens - 1, one_token, state)[3]


# The whole step as one operation, inside shard_map as well.

# The kernel of decode_step takes heads of 64, 128 and 256 and a multiple of 64 of F for each rank. Zeros fill up what
# lacks, and change nothing: they are not rotated, and add nothing to any sum.
HEAD, COLUMNS = 64, 64


def whole_spec(cfg: Config, world: int) -> jtf.DecoderSpec:
    """The model as `decode_step` knows it, of all ranks together."""
    if cfg.n_experts:
        raise ValueError("decode_step takes no mixture of experts: prefill and decode do.")
    return jtf.DecoderSpec(
        layers=cfg.n_layers,
        d_model=cfg.d_model,
        heads=cfg.n_heads,
        kv_heads=cfg.n_kv_heads,
        head_dim=max(HEAD, cfg.head_dim),
        rotary_dim=cfg.head_dim,
        score_scale=cfg.head_dim**-0.5,
        d_mlp=cfg.d_mlp + -cfg.d_mlp % (world * COLUMNS),
        vocab=cfg.vocab,
    )


def stack(params: Params, cfg: Config, spec: jtf.DecoderSpec) -> dict[str, jax.Array]:
    """Parameters of the tree of `init` as `decode_step` takes them: [L, out, in], filled up to the sizes of `spec`.

    Args:
      params: all of them, or a rank's part, with heads and F that need no filling up.
    """
    layers = params["layers"]
    h, fill_h = cfg.head_dim, spec.head_dim - cfg.head_dim
    missing = spec.d_mlp - cfg.d_mlp

    def filled(x: jax.Array, axis: int, amount: int) -> jax.Array:
        return jnp.pad(x, [(0, amount if i == axis else 0) for i in range(x.ndim)]) if amount else x

    def of(name: str) -> jax.Array:
        return jnp.stack([jnp.asarray(layer[name]) for layer in layers])

    # [L, D, K, G + 2, H]: of each key/value head its queries, its key and its value.
    qkv = filled(of("w_qkv").reshape(len(layers), cfg.d_model, -1, cfg.group + 2, h), 4, fill_h)
    rows = lambda part: jnp.swapaxes(part.reshape(*part.shape[:2], -1), 1, 2)  # noqa: E731
    w_o = filled(of("w_o").reshape(len(layers), -1, h, cfg.d_model), 2, fill_h)
    return {
        "attn_norm": of("attn_norm"),
        "q_proj": rows(qkv[:, :, :, : cfg.group]),
        "k_proj": rows(qkv[:, :, :, cfg.group]),
        "v_proj": rows(qkv[:, :, :, cfg.group + 1]),
        "o_proj": jnp.swapaxes(w_o.reshape(len(layers), -1, cfg.d_model), 1, 2),
        "mlp_norm": of("mlp_norm"),
        "gate_proj": filled(jnp.swapaxes(of("w_gate"), 1, 2), 1, missing),
        "up_proj": filled(jnp.swapaxes(of("w_up"), 1, 2), 1, missing),
        "down_proj": filled(jnp.swapaxes(of("w_down"), 1, 2), 2, missing),
        "final_norm": jnp.asarray(params["final_norm"]),
        "unembed": jnp.asarray(params["unembed"]).T,
    }


def rotations(positions: int, cfg: Config) -> tuple[jax.Array, jax.Array]:
    """cos and sin of all positions, float32 [positions, H / 2]."""
    half = cfg.head_dim // 2
    angle = jnp.arange(positions)[:, None] * cfg.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.cos(angle), jnp.sin(angle)


def read_whole(
    params: dict[str, jax.Array],
    embed: jax.Array,
    prompts: jax.Array,
    lengths: jax.Array,
    length: int,
    cfg: Config,
    axis_name: str = "tp",
    implementation: str | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """`prefill` by `decode_step`, of all prompts [B, T] and lengths [B] on every rank.

    Args:
      params: of `stack`, this rank's part.
      embed: [V, D].
      length: positions of the cache.

    Returns:
      The first generated token of each sequence [B], and the cache: keys and values [L, B, K / W, length, H].
    """
    world = lax.axis_size(axis_name)
    spec = whole_spec(cfg, world)
    size = (spec.layers, len(lengths), spec.kv_heads // world, length, spec.head_dim)
    cache = jnp.zeros(size, embed.dtype), jnp.zeros(size, embed.dtype)
    cos, sin = rotations(length, cfg)
    logits, cache = jtf.decode_step(
        params, embed[prompts], cache, 0 * lengths, axis_name, model=spec, cos=cos, sin=sin, counts=lengths,
        implementation=implementation,
    )  # fmt: skip
    return jtf.sample_greedy(logits, axis_name, implementation=implementation), cache


def decode_whole(
    params: dict[str, jax.Array],
    embed: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    first: jax.Array,
    lengths: jax.Array,
    n_tokens: int,
    cfg: Config,
    axis_name: str = "tp",
    implementation: str | None = None,
) -> jax.Array:
    """`decode` by `decode_step`: n_tokens of each sequence, [B, n_tokens], of which `first` [B] is the first."""
    spec = whole_spec(cfg, lax.axis_size(axis_name))
    cos, sin = rotations(cache[0].shape[3], cfg)
    # XLA would ask for it again in every step.
    how = {"axis_index": lax.axis_index(axis_name), "implementation": implementation}

    def one_token(state: tuple) -> tuple:
        i, token, cache, out = state
        logits, cache = jtf.decode_step(
            params, embed[token], cache, lengths + i, axis_name, model=spec, cos=cos, sin=sin, **how
        )
        token = jtf.sample_greedy(logits, axis_name, **how)
        return i + 1, token, cache, out.at[:, i + 1].set(token)

    out = jnp.zeros((len(first), n_tokens), jnp.int32).at[:, 0].set(first)
    state = (jnp.int32(0), first, cache, out)
    return lax.while_loop(lambda state: state[0] < n_tokens - 1, one_token, state)[3]
