"""A decode step of a whole model, tensor parallel: one token of each sequence, through all layers, to the next token.

The model is that of `examples/transformer.py` in bf16, with the sizes of the shape, random weights, and caches that are
full but for the tokens of this run. It makes STEPS tokens; times are those of one. The tokens that it reads are given,
so that all implementations do the same work, whatever rounding makes them choose.

In the modes sustained and burst a call makes all tokens in a loop. In the modes calls and waited each step is a call of
its own (`step_calls.py`).

Every rank has the whole residual stream, so a layer's two row-parallel products end in a sum over all ranks:

fused: `jtf.decode_step` by what implementation=None takes, with its weights [out, in] stacked over layers, and a cache
    sharded along its heads.
fused/one_launch: the same by its kernel, which is all layers in one launch. --config is of this kernel.
fused/operations: the same by our operations, one by one.
fused_sequence: our operations one by one. The cache is sharded along the sequence: `all_gather` of the new token's
    queries, keys and values, `append_kv`, `decode_attention`, and `matmul_all_reduce` with the residual.
fused_heads: the cache is sharded along its heads, so each rank attends to its own; by the kernel of `decode_attention`
    without peers.
fused_local: the same, and what each rank multiplies by itself (queries, keys and values; gate and up with SwiGLU; the
    logits) is by the kernel of `all_gather_matmul` without peers.
fused_tokens: the residual stream is sharded along the sequences, so that a layer gathers and scatters: `next_token` of
    the example, with SwiGLU in the kernel that gathers. For so many sequences as ranks divide.
xla/...: what `fused_sequence` calls, by plain `lax`.
xla_heads/...: what `fused_heads` calls, by plain `lax` and einsum.
xla_heads_cudnn/...: the same, with attention by cuDNN.
xla_step/...: what `jtf.decode_step` means, by plain `lax`.
torch...: PyTorch, in processes of its own (`torch_decode_step.py`).

What is compared is the logits of the last step, and the logit of each token that was chosen, which is NaN if there is
no such token.

The cache is carried through the loop, and copied once for each call of STEPS tokens, or before the calls of so many,
since nothing of the caller's is donated: 0.4 to 3.5 % of all that is read.

The floor of a shape is the time to read a rank's weights and cache once, at the best bandwidth that a plain reduction
or copy of device memory reached in the same run.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from benchmarks import step_calls
from benchmarks.layout import Row, a_step_a_call, by_peer
from benchmarks.operation import (
    AXIS,
    CHECKED_RUNS,
    DEPENDENT,
    DTYPE,
    ONE,
    Config,
    Implementation,
    Operands,
    Operation,
    by_flags,
    config_name,
    normal,
)
from benchmarks.shapes import DECODE_STEP, DECODE_STEP_TINY, DecoderShape
from benchmarks.timing import measure_memory_bandwidths
from examples import transformer
from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops.decode_step import case as step_case
from jaxtaxfree.teams import Team

STEPS = 32
SPARE = CHECKED_RUNS - 1  # states beside that of the call

# As `transformer` has them, but for the layers, of which each parameter is a list; and "stacked", the same parameters
# as `jtf.decode_step` takes them, "tables", cos and sin of all positions, and "ranks", each rank's number. A program
# takes either the ones or the others: the host has to look at each array of a call.
Params = dict[str, Any]
STACKED = ("embed", "stacked", "tables", "ranks")
# Tokens that are read [STEPS, B], lengths [B] before that, and the cache.
State = tuple[jax.Array, jax.Array, Any]
# Logits [B, V / W], cache, and of the next token of each sequence the logit and which it is.
Stepped = tuple[jax.Array, Any, tuple[jax.Array, jax.Array]]
# (parameters, cache, token [B], lengths [B], config) -> Stepped
Step = Callable[..., Stepped]


def _attend_plainly(
    past: transformer.KeysAndValues,
    qkv: jax.Array,
    lengths: jax.Array,
    cfg: transformer.Config,
    axis_name: str,
    implementation: str | None,
) -> tuple[jax.Array, transformer.KeysAndValues]:
    """As `_attend_by_heads`, without jaxtaxfree."""
    del axis_name, implementation
    q, k, v = transformer.split_qkv(qkv, lengths[:, None], cfg)
    sequences = jnp.arange(len(lengths))
    keys, values = (cached.at[sequences, lengths].set(x[:, 0]) for cached, x in zip(past, (k, v)))
    seen = jnp.arange(keys.shape[1]) <= lengths[:, None, None]
    return transformer.attend(q, keys, values, seen), (keys, values)


def _multiply_plainly(y: jax.Array, w: jax.Array, *, gate: jax.Array | None = None) -> jax.Array:
    product = transformer.matmul(y, w)
    return product if gate is None else jax.nn.silu(transformer.matmul(y, gate)) * product


def _multiply_by_kernel(y: jax.Array, w: jax.Array, *, gate: jax.Array | None = None) -> jax.Array:
    gated: dict[str, Any] = {} if gate is None else {"gate": gate, "activation": jax.nn.silu}
    return jtf.all_gather_matmul(y, w, (), implementation="fused", **gated)


def _reduce_plainly(y: jax.Array, w: jax.Array, *, residual: jax.Array) -> jax.Array:
    return residual + lax.psum(y @ w, AXIS)


def _attend_by_heads(
    past: transformer.KeysAndValues,
    qkv: jax.Array,
    lengths: jax.Array,
    cfg: transformer.Config,
    axis_name: str,
    implementation: str | None,
    *,
    by_cudnn: bool = False,
) -> tuple[jax.Array, transformer.KeysAndValues]:
    """As `transformer.attend_to_cache`, of a cache that has all positions of this rank's heads."""
    del axis_name
    q, k, v = transformer.split_qkv(qkv, lengths[:, None], cfg)
    q = q.reshape(len(lengths), 1, -1, cfg.head_dim)
    past = jtf.append_kv(past, k, v, lengths, ONE)
    if by_cudnn:
        ones = jnp.ones_like(lengths)
        y = jax.nn.dot_product_attention(
            q, *past, query_seq_lengths=ones, key_value_seq_lengths=lengths + 1, implementation="cudnn"
        )
    else:
        y = jtf.decode_attention(q, *past, ONE, key_value_seq_lengths=lengths + 1, implementation=implementation)
    return y.reshape(len(lengths), 1, -1), past


def _replicated(
    params: transformer.Params,
    cache: transformer.Cache,
    token: jax.Array,
    lengths: jax.Array,
    cfg: transformer.Config,
    *,
    attend: Callable[..., tuple[jax.Array, transformer.KeysAndValues]],
    reduce: Callable[..., jax.Array],
    multiply: Callable[..., jax.Array],
    implementation: str | None,
) -> Stepped:
    """A step in which every rank has the residual stream [B, D].

    Args:
      attend: as `transformer.attend_to_cache`.
      reduce: (y, w, residual=x) -> x plus the sum of y @ w over the ranks.
      multiply: (y, w) -> y @ w, and with a gate silu(y @ gate) times it.
      implementation: of attention and what else communicates, but for `reduce`.
    """
    x = params["embed"][token]
    caches = []
    for layer, past in zip(params["layers"], cache, strict=True):
        with jax.named_scope("attention"):
            qkv = multiply(transformer.rms_norm(x, layer["attn_norm"]), layer["w_qkv"])
            y, past = attend(past, qkv[:, None], lengths, cfg, AXIS, implementation)
            caches.append(past)
            x = reduce(y[:, 0], layer["w_o"], residual=x)
        with jax.named_scope("mlp"):
            y = multiply(transformer.rms_norm(x, layer["mlp_norm"]), layer["w_up"], gate=layer["w_gate"])
            x = reduce(y, layer["w_down"], residual=x)
    with jax.named_scope("unembed"):
        logits = multiply(transformer.rms_norm(x, params["final_norm"]), params["unembed"])
    logits = logits.astype(jnp.float32)
    return logits, caches, _likeliest(logits, implementation)


def _sharded(
    params: transformer.Params,
    cache: transformer.Cache,
    token: jax.Array,
    lengths: jax.Array,
    cfg: transformer.Config,
) -> Stepped:
    """A step in which a rank has the residual stream of its sequences, [B / W, D]."""
    own, left = divmod(len(token), lax.axis_size(AXIS))
    if left:
        raise NotImplementedError(f"{lax.axis_size(AXIS)} ranks do not divide {len(token)} sequences")
    of_rank = partial(lax.dynamic_slice_in_dim, start_index=lax.axis_index(AXIS) * own, slice_size=own)
    x, cache = transformer.next_token(params, cache, of_rank(token), lengths, cfg, AXIS, "fused")
    logits = transformer.logits_shard(params, x, AXIS, "fused")
    return logits, cache, jax.tree.map(of_rank, _likeliest(logits, "fused"))


def _whole(
    params: transformer.Params,
    cache: tuple[jax.Array, jax.Array],
    token: jax.Array,
    lengths: jax.Array,
    cfg: transformer.Config,
    *,
    implementation: str | None,
    config: Config | None = None,
) -> Stepped:
    """A step by `jtf.decode_step`."""
    cos, sin = params["tables"]
    logits, cache = jtf.decode_step(
        params["stacked"], params["embed"][token], cache, lengths, AXIS, model=_spec_of(cfg, cache[0].shape[0]),
        cos=cos, sin=sin, axis_index=params["ranks"], implementation=implementation, config=config,
    )  # fmt: skip
    return logits, cache, _likeliest(logits, implementation, params["ranks"])


def _likeliest(
    logits: jax.Array, implementation: str | None, axis_index: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Of logits [B, V / W] each sequence's largest and its token, [B] each, on every rank."""
    logit, token = jtf.top_k(logits, 1, AXIS, axis_index=axis_index, implementation=implementation)
    return logit[:, 0], token[:, 0]


def _spec_of(cfg: transformer.Config, layers: int) -> jtf.DecoderSpec:
    return jtf.DecoderSpec(
        layers=layers, d_model=cfg.d_model, heads=cfg.n_heads, kv_heads=cfg.n_kv_heads, head_dim=cfg.head_dim,
        d_mlp=cfg.d_mlp, vocab=cfg.vocab,
    )  # fmt: skip


def _config(params: transformer.Params, cache: Any) -> transformer.Config:
    """The model's sizes, of all ranks together."""
    h, world = jax.tree.leaves(cache)[0].shape[-1], lax.axis_size(AXIS)
    if "stacked" in params:
        of = {name: w.shape for name, w in params["stacked"].items()}
        return transformer.Config(
            n_heads=world * of["q_proj"][1] // h,
            n_kv_heads=world * of["k_proj"][1] // h,
            head_dim=h,
            d_model=of["q_proj"][2],
            d_mlp=world * of["gate_proj"][1],
            vocab=params["embed"].shape[0],
        )
    layer = params["layers"][0]
    n = world * layer["w_o"].shape[0] // h
    return transformer.Config(
        n_heads=n,
        n_kv_heads=(world * layer["w_qkv"].shape[1] // h - n) // 2,
        head_dim=h,
        d_model=layer["w_o"].shape[1],
        d_mlp=world * layer["w_gate"].shape[1],
        vocab=params["embed"].shape[0],
    )


def _by_layer(params: Params) -> transformer.Params:
    if "layers" not in params:
        return params
    names = params["layers"]
    return params | {"layers": [dict(zip(names, layer)) for layer in zip(*names.values(), strict=True)]}


def begin(step: Step, state: State, params: Params) -> Any:
    """What is carried from step to step: the last logits, those of the tokens chosen, the cache, the last tokens."""
    tokens, lengths, cache = state
    params = _by_layer(params)
    cfg = _config(params, cache)
    x, _, (logit, last) = jax.eval_shape(lambda: step(params, cache=cache, token=tokens[0], lengths=lengths, cfg=cfg))
    zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros((len(tokens), *logit.shape), jnp.float32)
    return *zeros, cache, jnp.zeros(last.shape, last.dtype)


def one_token(step: Step, i: jax.Array, carry: Any, state: State, params: Params) -> Any:
    """The i-th step: from what the one before has carried to what the next one gets."""
    tokens, lengths, _ = state
    _, chosen, cache, last = carry
    params = _by_layer(params)
    cfg = _config(params, cache)
    # The step before has to be over: who serves knows no token earlier. That is in the index, because XLA reads
    # tokens[i] by a copy of its own, which takes an H100 3 us a step, and a token that was just chosen is there.
    token = tokens[i + jnp.where(last.reshape(-1)[0] < -1, 1, 0)]
    x, cache, (logit, last) = step(params, cache=cache, token=token, lengths=lengths + i, cfg=cfg)
    logit = jnp.where((last >= 0) & (last < cfg.vocab), logit, jnp.nan)
    return x.astype(jnp.float32), chosen.at[i].set(logit), cache, last


def _decode(step: Step, state: State, params: Params) -> tuple[jax.Array, jax.Array]:
    """The logits of the last of STEPS steps, and those of the tokens chosen [STEPS, ...]."""
    carry = begin(step, state, params)
    return lax.fori_loop(0, len(state[0]), lambda i, carry: one_token(step, i, carry, state, params), carry)[:2]


def _only(names: Iterable[str], params: Params) -> Params:
    return {name: params[name] for name in names}


def _model(shape: DecoderShape) -> transformer.Config:
    return transformer.Config(
        d_model=shape.d_model,
        n_layers=shape.layers,
        n_heads=shape.n,
        n_kv_heads=shape.kv_heads,
        head_dim=shape.h,
        d_mlp=shape.d_mlp,
        vocab=shape.vocab,
    )


def _by_name(params: transformer.Params) -> Params:
    """The reverse of what `_by_layer` does."""
    layers = params["layers"]
    return params | {"layers": {name: [layer[name] for layer in layers] for name in layers[0]}}


# One spec for a parameter of all layers.
_SPECS = transformer.param_specs(transformer.Config(n_layers=1), AXIS)
_SPECS["layers"] = _SPECS["layers"][0]
_STACKED = _spec_of(transformer.Config(), 1).partition_specs(AXIS)
_STACKED_SPECS = {"embed": _SPECS["embed"], "stacked": _STACKED, "tables": (P(), P()), "ranks": P(AXIS)}
_BY_SEQUENCE, _BY_HEADS = P(None, AXIS), P(None, None, AXIS)
_WHOLE, _BY_TOKENS = (P(None, AXIS), P(None, None)), (P(None, AXIS), P(None, AXIS))
# Rounded to bf16 some thirty times, in another order by each implementation.
_program = partial(Implementation, steps=STEPS, tolerance=0.05, out_spec=_WHOLE)
_by_sequence = partial(
    _program, in_specs=((P(), P(), _BY_SEQUENCE), _SPECS), takes="sequence", reads=lambda y: _only(_SPECS, y)
)
_by_heads = partial(_program, in_specs=((P(), P(), _BY_HEADS), _SPECS), takes="heads", reads=lambda y: _only(_SPECS, y))
_by_stack = partial(
    _program, in_specs=((P(), P(), _BY_HEADS), _STACKED_SPECS), takes="stacked", reads=lambda y: _only(STACKED, y)
)


def _replicated_call(
    attend: Callable[..., Any], implementation: str, multiply: Callable[..., jax.Array] = _multiply_plainly
) -> Any:
    reduce = partial(jtf.matmul_all_reduce, axis_name=AXIS, implementation=implementation)
    how = {"attend": attend, "reduce": reduce, "multiply": multiply, "implementation": implementation}
    return partial(_decode, partial(_replicated, **how))


def _whole_call(implementation: str | None, **config: Any) -> Any:
    return partial(_decode, partial(_whole, implementation=implementation, **config))


# Without jaxtaxfree where it matters: a reference must not depend on what it judges.
_plain = partial(
    _replicated, attend=_attend_plainly, reduce=_reduce_plainly, multiply=_multiply_plainly, implementation="xla"
)
REFERENCE = _by_heads(name="plain", call=partial(_decode, _plain))


class DecodeStep(Operation):
    name = "decode_step"
    shapes = DECODE_STEP
    tiny_shapes = DECODE_STEP_TINY
    sizes = ("b", "context", "layers", "d_model", "n", "kv_heads", "h", "d_mlp", "vocab")
    parts = ()
    optional_peers = ("xla_heads_cudnn", "torch")
    torch_script = "torch_decode_step.py"
    torch_tolerance = 0.05
    own, rival = "fused/one_launch", "xla_step/default"
    fewest_calls = 1
    ceiling = "GB/s of device memory"
    heading = "sequences, tokens of each"

    def implementations(self, configs: Sequence[Config] = ()) -> dict[str, Implementation]:
        by_cudnn = partial(_attend_by_heads, by_cudnn=True)
        implementations = (
            *by_flags(_by_sequence, "xla", _replicated_call(transformer.attend_to_cache, "xla"), DEPENDENT),
            *by_flags(_by_heads, "xla_heads", REFERENCE.call, DEPENDENT),
            *by_flags(_by_heads, "xla_heads_cudnn", _replicated_call(by_cudnn, "xla"), DEPENDENT),
            *by_flags(_by_stack, "xla_step", _whole_call("xla"), DEPENDENT),
            _by_stack(name="fused", call=_whole_call(None), mixed=True),
            _by_sequence(
                name="fused_sequence", call=_replicated_call(transformer.attend_to_cache, "fused"), mixed=True
            ),
            _by_heads(name="fused_heads", call=_replicated_call(_attend_by_heads, "fused"), mixed=True),
            _by_heads(name="fused_local", call=_replicated_call(_attend_by_heads, "fused", _multiply_by_kernel)),
            _by_sequence(name="fused_tokens", call=partial(_decode, _sharded), out_spec=_BY_TOKENS, mixed=True),
            *(
                _by_stack(name=f"fused/{name}", call=_whole_call("fused", config={"kernel": kernel}))
                for name, kernel in {"operations": "operations", "one_launch": "hopper"}.items()
            ),
            *(
                _by_stack(
                    name=config_name(config),
                    call=_whole_call("fused", config={"kernel": "hopper"} | config),
                    config=config,
                )
                for config in configs
            ),
        )
        return {implementation.name: implementation for implementation in implementations}

    def stepwise(self, implementation: Implementation) -> Implementation | None:
        if implementation.out_spec != _WHOLE:
            return None
        assert isinstance(implementation.call, partial)  # of `_decode`
        step = implementation.call.args[0]
        compiled = partial(
            step_calls.compile_calls, begin=partial(begin, step), one_step=partial(one_token, step), steps=STEPS
        )
        return replace(implementation, compile=compiled)

    def shapes_for(self, world: int) -> tuple[DecoderShape, ...]:
        return tuple(shape for shape in self.shapes if _model(shape).divides(world))

    def case_at(self, shape: DecoderShape, team: Team) -> Case | None:
        model = _spec_of(_model(shape), shape.layers)

        def of(*size: int, dtype: Any = DTYPE) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(size, dtype)

        cache = of(shape.layers, shape.b, shape.kv_heads // team.world, shape.context, shape.h)
        rows, table = of(shape.b, dtype=jnp.int32), of(1, shape.context, shape.h // 2, dtype=jnp.float32)
        operands = of(shape.b, 1, shape.d_model), cache, cache, rows, rows, table, table
        return step_case(*operands, team=team, model=model, placement=None)

    def torch_job(self, shape: DecoderShape, world: int, l2: str) -> dict[str, Any]:
        del world, l2
        return {"op": self.name, "steps": STEPS, **vars(shape)}

    def unavailable(self, peer: str) -> str:
        del peer
        return "" if jax.default_backend() == "gpu" else "cuDNN is for GPUs"

    def expected_from(self, implementation: Implementation) -> Implementation:
        del implementation
        return REFERENCE

    def fastest_seconds(self, shape: DecoderShape, world: int) -> float:
        return STEPS * _read_bytes(shape, world) / 4.8e12

    def calls_per_program(self, shape: DecoderShape, world: int) -> int:
        """One, which is a loop."""
        del shape, world
        return 1

    def y_bytes(self, shape: DecoderShape, world: int) -> int:
        return shape.weight_bytes() // world

    def operands(self, shape: DecoderShape, mesh: Mesh, calls: int, turns: int) -> Operands:
        cfg, world = _model(shape), mesh.shape[AXIS]
        on_mesh = partial(NamedSharding, mesh)
        root = jax.random.key(0)
        keys = (jax.random.fold_in(root, i) for i in itertools.count())
        # Of scores as normal as these a softmax averages about S / e of the values. These are so large that what it
        # gives counts for as much as the rest.
        value_scale = math.sqrt(shape.context / math.e)

        def make_cache() -> dict[str, Any]:
            """The same by heads; by sequence, where the ranks take blocks in turn; as `jtf.decode_step` has it."""
            size = (shape.b, shape.context, shape.kv_heads, shape.h)
            make = normal(size, on_mesh(_BY_HEADS))
            turns = (shape.b, -1, world, transformer.BLOCK, *size[2:])
            deal = jax.jit(lambda x: x.reshape(turns).swapaxes(1, 2).reshape(size), out_shardings=on_mesh(_BY_SEQUENCE))
            heads = [(make(next(keys)), value_scale * make(next(keys))) for _ in range(shape.layers)]
            made = {"heads": heads, "sequence": jax.tree.map(deal, heads), "stacked": stacked(heads)}
            return jax.block_until_ready(made)

        def stacked(heads: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
            """[L, B, K, S, H] of layers [B, S, K, H]."""
            stack = jax.jit(
                lambda parts: jnp.stack([jnp.swapaxes(part, 1, 2) for part in parts]), out_shardings=on_mesh(_BY_HEADS)
            )
            keys_of, values_of = (stack(parts) for parts in zip(*heads, strict=True))
            return keys_of, values_of

        def make_tokens() -> jax.Array:
            tokens = jax.random.randint(next(keys), (STEPS, shape.b), 0, shape.vocab)
            return jax.device_put(tokens, on_mesh(P()))

        def make_param(like: Any, spec: P) -> jax.Array:
            if like.ndim == 1:
                return jax.device_put(jnp.ones(like.shape, DTYPE), on_mesh(spec))
            scale = math.sqrt(like.shape[0])
            make = jax.jit(
                lambda key: (jax.random.normal(key, like.shape, DTYPE) / scale).astype(DTYPE),
                out_shardings=on_mesh(spec),
            )
            return make(next(keys))

        lengths = jax.device_put(jnp.full((shape.b,), shape.context - STEPS, jnp.int32), on_mesh(P()))
        caches = [make_cache() for _ in range(calls)]
        # The spare ones are other tokens: memory has no room for more caches.
        tokens = [make_tokens() for _ in range(calls + SPARE)]
        xs = {
            layout: tuple((each, lengths, caches[i % calls][layout]) for i, each in enumerate(tokens))
            for layout in ("heads", "sequence", "stacked")
        }
        specs = transformer.param_specs(cfg, AXIS)
        likes = jax.eval_shape(lambda: transformer.init(jax.random.key(0), cfg))
        # Heads and columns as they are: the kernel takes those of the listed shapes.
        whole = partial(transformer.stack, cfg=cfg, spec=_spec_of(cfg, shape.layers))
        stack = jax.jit(
            jax.shard_map(
                lambda params: whole(_by_layer(params)), mesh=mesh, in_specs=(_SPECS,), out_specs=_STACKED,
                check_vma=False,
            )
        )  # fmt: skip
        tables = tuple(jax.device_put(table, on_mesh(P())) for table in transformer.rotations(shape.context, cfg))
        ranks = jax.device_put(np.arange(world, dtype=np.int32), on_mesh(P(AXIS)))

        def make_params() -> Params:
            params = _by_name(jax.tree.map(make_param, likes, specs))
            return params | {"stacked": stack(params), "tables": tables, "ranks": ranks}

        ys = [make_params() for _ in range(turns)]
        return Operands(xs=xs, ys=tuple(ys), spare=SPARE)

    def check_shape(self, shape: DecoderShape, world: int) -> None:
        if not _model(shape).divides(world):
            raise ValueError(f"{world} ranks do not divide the key/value heads, d_mlp or vocabulary of {shape}")
        if shape.context <= STEPS or shape.context % (world * transformer.BLOCK):
            raise ValueError(
                f"The context of {shape} is no multiple of {world * transformer.BLOCK}, or has no room for {STEPS}"
            )

    def ceilings(self, mesh: Mesh, on_gpu: bool) -> dict[str, float]:
        return measure_memory_bandwidths(mesh, 4 * 2**30 if on_gpu else 2**20)

    def floor_us(self, shape: DecoderShape, world: int, medians: Mapping[str, float], bandwidth: float) -> float | None:
        """A rank's weights and cache, read once."""
        del medians
        return _read_bytes(shape, world) / bandwidth * 1e6

    def table(self, rows: Sequence[Row]) -> list[str]:
        sizes = ("b", "context")
        if len({self.sizes_of(row)[2:] for row in rows}) > 1:
            sizes = ("name",)
        lines = by_peer(rows, sizes=sizes, heading=self.heading if len(sizes) > 1 else "model", digits=self.digits)
        calls = a_step_a_call(rows, sizes=sizes, heading=self.heading if len(sizes) > 1 else "model")
        return [*lines, "", *calls] if calls else lines

    def parse_shape(self, text: str) -> DecoderShape:
        """B,CONTEXT with the model of the listed shapes, or all sizes."""
        try:
            sizes = tuple(int(size) for size in text.split(","))
        except ValueError:
            sizes = ()
        if len(sizes) == 2:
            sizes += self.sizes_of(self.shapes[0])[2:]
        if len(sizes) != len(self.sizes):
            raise ValueError(f"{text!r} is neither B,CONTEXT nor {','.join(self.sizes).upper()}")
        listed = (shape for shape in self.shapes if self.sizes_of(shape) == sizes)
        return next(listed, DecoderShape(name="x".join(map(str, sizes)), **dict(zip(self.sizes, sizes))))


def _read_bytes(shape: DecoderShape, world: int) -> int:
    """What a rank reads in a step."""
    return (shape.weight_bytes() + shape.cache_bytes()) // world
