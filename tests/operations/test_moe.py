"""`moe` against a layer in NumPy, in f64: every way to divide it, capacity, derivatives, errors."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops.moe import exchange
from tests.helpers.support import TRITON_CALL, fails, lower_for_cuda, mesh_of, one_program, sharded

D, F = 8, 16
BOTH = ("expert", "tensor")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer, and how it is divided.

    Attributes:
      expert, tensor: ranks along each axis; 0 where there is none.
      t, k: tokens (of a rank, where they are sharded) and choices of each.
      experts: of a rank.
    """

    expert: int = 0
    tensor: int = 0
    t: int = 5
    k: int = 2
    experts: int = 2
    tokens: str = "sharded"
    capacity: int | None = None
    shared: bool = False
    gated: bool = True

    @property
    def count(self) -> int:
        return self.experts * max(1, self.expert)

    @property
    def all_tokens(self) -> int:
        return self.t * (max(1, self.expert) * max(1, self.tensor) if self.tokens == "sharded" else 1)

    def arrays(self, seed: int, routing: str = "any") -> dict[str, Any]:
        draw = np.random.default_rng(seed)
        shape = (self.all_tokens, self.k)
        experts = {
            "any": draw.integers(0, self.count, shape),  # some tokens have one twice
            "one": np.full(shape, seed % self.count),
            "some": np.where(draw.random(shape) < 0.3, -1, draw.integers(0, self.count + 1, shape)),
        }[routing]
        e, f = self.count, F * max(1, self.tensor)
        normal = lambda *shape: draw.normal(size=shape).astype(np.float32)  # noqa: E731
        arrays = {
            "x": normal(self.all_tokens, D),
            "experts": experts.astype(np.int32),
            "weights": normal(*shape),
            "w_gate": normal(e, D, f) if self.gated else None,
            "w_up": normal(e, D, f),
            "w_down": normal(e, f, D),
        }
        if self.shared:
            arrays["shared"] = normal(D, f), normal(D, f), normal(f, D)
        return arrays

    def kept(self, experts: np.ndarray) -> np.ndarray:
        """Which choices are not dropped: the first ones at each rank, by source, expert and token."""
        kept = (experts >= 0) & (experts < self.count)
        if self.capacity is None:
            return kept
        sources = max(1, self.expert) if self.tokens == "sharded" else 1
        # The tokens of a source: with a tensor axis, those of all its ranks.
        source = np.arange(len(experts)) // max(1, len(experts) // sources)
        for rank in range(max(1, self.expert)):
            mine = [
                (source[t], experts[t, j], t, j) for t, j in np.argwhere(kept) if experts[t, j] // self.experts == rank
            ]
            for _, _, t, j in sorted(mine)[self.capacity :]:
                kept[t, j] = False
        return kept

    def expected(self, arrays: dict[str, Any]) -> tuple[np.ndarray, int]:
        a = {
            name: np.asarray(x, np.float64)
            for name, x in arrays.items()
            if name not in ("experts", "shared") and x is not None
        }
        silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731

        def expert(x: np.ndarray, gate: Any, up: np.ndarray, down: np.ndarray) -> np.ndarray:
            return (silu(x @ up) if gate is None else silu(x @ gate) * (x @ up)) @ down

        out, kept = np.zeros_like(a["x"]), self.kept(arrays["experts"])
        for t, j in np.argwhere(kept):
            e = arrays["experts"][t, j]
            gate = a["w_gate"][e] if self.gated else None
            out[t] += a["weights"][t, j] * expert(a["x"][t], gate, a["w_up"][e], a["w_down"][e])
        if self.shared:
            out += expert(a["x"], *(np.asarray(w, np.float64) for w in arrays["shared"]))
        return out, int((~kept).sum())

    @property
    def how(self) -> dict[str, Any]:
        """The keywords of `moe`."""
        axes = self.axes
        return {
            "axis_name": axes if len(axes) == 2 else axes[0],
            "parallel": BOTH if len(axes) == 2 else "expert" if self.expert else "tensor",
            "tokens": self.tokens,
            "capacity": self.capacity,
        }

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, size in (("ep", self.expert), ("tp", self.tensor)) if size)

    @property
    def rows(self) -> P:
        return P(self.axes) if self.tokens == "sharded" else P()

    @property
    def specs(self) -> dict[str, Any]:
        e, t = ("ep" if self.expert else None), ("tp" if self.tensor else None)
        return {
            "x": self.rows,
            "experts": self.rows,
            "weights": self.rows,
            "w_gate": P(e, None, t) if self.gated else None,
            "w_up": P(e, None, t),
            "w_down": P(e, t),
            **({"shared": (P(None, t), P(None, t), P(t))} if self.shared else {}),
        }


@functools.cache
def program(layer: Layer, check_vma: bool = True, **keywords: Any) -> Callable[..., Any]:
    """The layer as a function of its arrays by their names: results, and how many choices were dropped."""
    sizes = [size for size in (layer.expert, layer.tensor) if size]
    mesh = Mesh(np.array(jax.devices("cpu")[: int(np.prod(sizes))]).reshape(sizes), layer.axes)
    call = functools.partial(jtf.moe, return_dropped=True, **layer.how, **keywords)
    return one_program(
        lambda arrays: call(**arrays),
        mesh=mesh,
        in_specs=(layer.specs,),
        out_specs=(layer.rows, P()),
        check_vma=check_vma,
    )


def check(layer: Layer, seed: int, routing: str = "any", **keywords: Any) -> None:
    arrays = layer.arrays(seed, routing)
    out, dropped = program(layer, **keywords)(arrays)
    wanted, count = layer.expected(arrays)
    np.testing.assert_allclose(out, wanted, rtol=2e-4, atol=2e-3)
    assert dropped == count


LAYERS = (
    *(Layer(expert=world) for world in (1, 2, 3, 8)),
    Layer(expert=2, t=7, k=3, capacity=9),
    Layer(expert=3, t=4, capacity=5, shared=True),
    Layer(expert=2, t=1, k=1, experts=4, gated=False),
    Layer(expert=4, tokens="replicated", shared=True),
    Layer(tensor=2, shared=True),
    Layer(tensor=4, tokens="replicated", experts=3, gated=False),
    Layer(tensor=2, capacity=6),
    Layer(expert=2, tensor=2, shared=True),
    Layer(expert=4, tensor=2, k=2, shared=True),
    Layer(expert=2, tensor=2, tokens="replicated", capacity=4, shared=True),
    Layer(expert=2, tensor=2, capacity=7),
)


@given(st.sampled_from(LAYERS), st.integers(0, 2**31), st.sampled_from(("any", "one", "some")))
@settings(max_examples=30, deadline=None)
def test_any_layer(layer: Layer, seed: int, routing: str) -> None:
    """However it is divided, whoever is chosen: all tokens by one expert, an expert twice, numbers of no expert."""
    check(layer, seed, routing)


@pytest.mark.soak
@given(
    st.builds(
        Layer,
        expert=st.sampled_from((1, 2, 3, 4, 8)),
        t=st.integers(0, 6),
        k=st.integers(1, 4),
        experts=st.integers(1, 3),
        tokens=st.sampled_from(("sharded", "replicated")),
        capacity=st.none() | st.integers(1, 20),
        shared=st.booleans(),
        gated=st.booleans(),
    ),
    st.integers(0, 2**31),
    st.sampled_from(("any", "one", "some")),
)
@settings(max_examples=150, deadline=None)
def test_any_size(layer: Layer, seed: int, routing: str) -> None:
    check(layer, seed, routing)


@pytest.mark.parametrize(("dtype", "experts"), [("uint8", 256), ("int8", 128), ("uint32", 4)])
@pytest.mark.parametrize("k", (1, 2))
def test_experts_of_any_integers(dtype: str, experts: int, k: int) -> None:
    """A dtype that holds the numbers of the experts, and not how many there are."""
    layer = Layer(expert=2, t=7, k=k, experts=experts // 2)
    arrays = layer.arrays(0)
    arrays["experts"] = np.clip(arrays["experts"], 0, experts - 1)
    wanted, _ = layer.expected(arrays)
    out, dropped = program(layer)({**arrays, "experts": arrays["experts"].astype(dtype)})
    np.testing.assert_allclose(out, wanted, rtol=2e-4, atol=2e-3)
    assert dropped == 0


@pytest.mark.parametrize("tokens", ("sharded", "replicated"))
@pytest.mark.parametrize("layer", [Layer(expert=2), Layer(tensor=2)])
def test_what_is_still_to_be_added_is_not_rounded(layer: Layer, tokens: str) -> None:
    """Experts of which a token has itself back: 1 + 2**-9 on one rank, or of half of each, and then -1 on another."""
    expert = layer.expert > 0
    t, d = 4, 2
    x = jnp.ones((t, d), jnp.bfloat16)
    experts = np.tile(np.int32([0, 0, 2]), (t, 1))
    weights = np.tile(np.float32([1, 2**-9, -1]), (t, 1))
    up = np.tile(np.eye(d), (4, 1, 1))
    if not expert:  # rank 0 has expert 0, rank 1 expert 2
        up[0, 1:], up[2, 1:] = 0, 0
        up[2] = up[2][:, ::-1]
        x = x.at[:, 1].set(0)
    down = up.swapaxes(1, 2)
    call = functools.partial(jtf.moe, axis_name=layer.axes[0], parallel=layer.how["parallel"], activation=None)
    specs = (P(layer.axes[0]), P(layer.axes[0])) if expert else (P(None, None, "tp"), P(None, "tp"))
    rows = P(*layer.axes) if tokens == "sharded" else P()
    run = jax.shard_map(
        lambda x, experts, weights, up, down: call(x, experts, weights, None, up, down, tokens=tokens),
        mesh=mesh_of(2, *layer.axes), in_specs=(rows, rows, rows, *specs), out_specs=rows,
    )  # fmt: skip
    found = np.asarray(jax.jit(run)(x, experts, weights, jnp.bfloat16(up), jnp.bfloat16(down)), np.float32)
    np.testing.assert_array_equal(found, 2**-9 * np.asarray(x, np.float32))


def test_capacity_beyond_all_rows_costs_no_memory() -> None:
    layer = Layer(expert=2, k=1, capacity=10**9)
    assert str(10**9) not in str(jax.make_jaxpr(program(layer))(layer.arrays(0)))
    check(layer, 0)


def test_no_tokens() -> None:
    for layer in (Layer(expert=2, t=0), Layer(tensor=2, t=0, shared=True), Layer(expert=2, t=0, tokens="replicated")):
        check(layer, 0)


@pytest.mark.parametrize("along", ("expert", "tensor"))
def test_by_kernels(along: str) -> None:
    """All of them in the simulator: rows travel or are gathered, are multiplied, and travel back or are added up."""
    check(Layer(**{along: 2}, t=3, shared=along == "tensor"), 0, implementation="simulate")


def test_tokens_by_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as here go by `all_gather` and `psum_scatter`, if nobody says otherwise."""
    monkeypatch.setattr(exchange, "LEAST_BYTES", 0)
    check(Layer(expert=2, t=4), 0, implementation="simulate")


def test_gradients_of_exchanged_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels, of tokens and of weights, as by XLA."""
    monkeypatch.setattr(exchange, "LEAST_BYTES", 0)
    draw = np.random.default_rng(0)
    places = np.stack([draw.permutation(24).reshape(12, 2), draw.permutation(24).reshape(12, 2)]) - 8
    x, weights = (draw.normal(size=shape).astype(np.float32) for shape in ((12, D), (2 * 12, 2)))

    def loss(x: Any, places: Any, weights: Any, implementation: str) -> jax.Array:
        how = {"implementation": implementation}
        rows = exchange.dispatch(x, places, 16, ("tp",), weights, **how)
        # Rows that no choice has may be anything, and so may what is made of them.
        there = jnp.zeros(16, bool).at[jnp.where(places < 0, 16, places)].set(True, mode="drop")
        rows = jnp.where(there[:, None], jnp.sin(rows), 0)
        return jax.lax.psum(jnp.sum(exchange.combine(rows, places, ("tp",), weights, **how) ** 2), "tp")

    def gradients(implementation: str) -> Any:
        local = functools.partial(loss, implementation=implementation)
        run = one_program(local, mesh=mesh_of(2, "tp"), in_specs=(P("tp"),) * 3, out_specs=P())
        return jax.grad(run, (0, 2))(x, np.maximum(places, -1).reshape(-1, 2).astype(np.int32), weights)

    for found, wanted in zip(gradients("simulate"), gradients("xla"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        assert wanted.any()


@pytest.mark.parametrize("check_vma", (True, pytest.param(False, marks=pytest.mark.soak)))
@pytest.mark.parametrize(
    "layer",
    (pytest.param(Layer(expert=2), marks=pytest.mark.soak), Layer(expert=2, tensor=2, shared=True)),
    ids=("expert", "both"),
)
def test_gradients(layer: Layer, check_vma: bool) -> None:
    """Of tokens, weights and all experts, as of a dense layer of all experts."""
    arrays = layer.arrays(1)
    experts = arrays.pop("experts")
    ct = np.random.default_rng(2).normal(size=arrays["x"].shape).astype(np.float32)
    divided = program(layer, check_vma)

    def dense(x: Any, weights: Any, w_gate: Any, w_up: Any, w_down: Any, shared: Any = None) -> jax.Array:
        hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x, w_gate)) * jnp.einsum("td,edf->tef", x, w_up)
        out = jnp.einsum("tef,efd->ted", hidden, w_down)
        factor = jnp.sum(weights[..., None] * jax.nn.one_hot(experts, layer.count), axis=1)
        out = jnp.einsum("te,ted->td", factor, out)
        if shared is not None:
            out = out + (jax.nn.silu(x @ shared[0]) * (x @ shared[1])) @ shared[2]
        return jnp.sum(out * ct)

    found = jax.jit(jax.grad(lambda arrays: jnp.sum(divided({**arrays, "experts": experts})[0] * ct)))(arrays)
    wanted = jax.grad(lambda arrays: dense(**arrays))(arrays)
    for name in wanted:
        for x, y in zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted[name]), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3, err_msg=name)


def test_with_a_router_in_scan_and_remat() -> None:
    """Layers that are computed again for the gradient, each with a router."""
    layer = Layer(expert=2, t=6)
    arrays = layer.arrays(3)
    routers = np.random.default_rng(4).normal(size=(3, D, layer.count)).astype(np.float32)

    def layers(x: Any, routers: Any, w_gate: Any, w_up: Any, w_down: Any, remat: bool) -> jax.Array:
        def step(x: Any, router: Any) -> Any:
            experts, weights = jtf.routing.top_k(x @ router, 2, normalise="sum")
            return x + jtf.moe(x, experts, weights, w_gate, w_up, w_down, "ep") / 256, None

        x, _ = jax.lax.scan(jax.checkpoint(step) if remat else step, x, routers)
        return jax.lax.psum(jnp.sum(jnp.tanh(x)), "ep")

    def gradient(remat: bool) -> Any:
        specs = P("ep"), P(), P("ep"), P("ep"), P("ep")
        loss = one_program(functools.partial(layers, remat=remat), mesh=mesh_of(2, "ep"), in_specs=specs, out_specs=P())
        return jax.grad(loss, (0, 1))(arrays["x"], routers, arrays["w_gate"], arrays["w_up"], arrays["w_down"])

    for found, wanted in zip(gradient(True), gradient(False), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        assert found.any()


@pytest.mark.parametrize("layer", [Layer(expert=2, k=1), Layer(expert=2), Layer(tensor=2)])
def test_vmap(layer: Layer) -> None:
    """Over tokens with the same weights, and over everything."""
    a, b = layer.arrays(0), layer.arrays(1)
    tokens = ("x", "experts", "weights")
    mesh = mesh_of(2, *layer.axes)
    one = jax.shard_map(
        lambda arrays: jtf.moe(**arrays, **layer.how), mesh=mesh, in_specs=(layer.specs,), out_specs=layer.rows
    )
    for names in (tokens, tuple(a)):
        both = {name: np.stack([a[name], b[name]]) if name in names else a[name] for name in a}
        found = jax.jit(jax.vmap(one, ({name: 0 if name in names else None for name in a},)))(both)
        for i, arrays in enumerate((a, {**a, **{name: b[name] for name in names}})):
            np.testing.assert_allclose(found[i], layer.expected(arrays)[0], rtol=2e-4, atol=2e-3)


def test_errors() -> None:
    layer = Layer(expert=2)
    arrays = layer.arrays(0)

    def call(changed: dict[str, Any] | None = None, **keywords: Any) -> None:
        given = {**arrays, **(changed or {})}
        how = {**layer.how, **keywords}
        mesh = mesh_of(2, "ep")
        jax.eval_shape(
            jax.shard_map(lambda a: jtf.moe(**a, **how), mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), given
        )

    with fails(ValueError, "tokens as 'sharded' or 'replicated'", "'all'"):
        call(tokens="all")
    with fails(ValueError, "parallel as 'expert', 'tensor'", "'data'"):
        call(parallel="data")
    with fails(ValueError, "axis_name as a pair", "'ep'"):
        call(parallel=BOTH)
    with fails(ValueError, "takes each mesh axis once"):
        call(parallel=BOTH, axis_name=("ep", "ep"))
    with fails(ValueError, "capacity of at least 1", "not 0"):
        call(capacity=0)
    with fails(ValueError, "no activation 'tanh'"):
        call(activation="tanh")
    with fails(ValueError, "experts [T, k] and weights [T, k]", "[5, 1]"):
        call({"weights": arrays["weights"][:, :1]})
    with fails(ValueError, "experts as integers", "float32"):
        call({"experts": arrays["weights"]})
    with fails(ValueError, "w_down [E, F, D]", "[2, 15, 8]"):
        call({"w_down": arrays["w_down"][:, 1:]})
    with fails(ValueError, "w_gate like w_up", "[2, 8, 15]"):
        call({"w_gate": arrays["w_gate"][..., 1:]})
    with fails(NameError, "moe needs a mesh axis", "'tp'"):
        call(axis_name="tp")
    with fails(ValueError, "x of floating-point numbers", "int32"):
        call({"x": arrays["x"].astype(np.int32)})
    with fails(ValueError, "at least one expert of each rank", "[0, 8, 16]"):
        call({name: arrays[name][:0] for name in ("w_gate", "w_up", "w_down")})
    up, down = np.ones((D, F), np.float32), np.ones((F, D), np.float32)
    for shared in (3, (up, down), (up, up, down, down)):
        with fails(ValueError, "shared as (w_gate, w_up, w_down)"):
            call(shared=shared)
    for shared in ((up[:, :1], up, down), (up, up, down[:, :1]), (up[1:], up[1:], down), (None, None, down)):
        with fails(ValueError, "w_up [8, F'] and w_down [F', 8]"):
            call(shared=shared)
    call(shared=(None, up, down), capacity=jnp.int32(3))


# What kernels do here: collectives, and what XLA would make of places and rows.
XLA = r"stablehlo\.(?:all_\w+|reduce_scatter|collective_\w+|sort|scatter)"


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize(
    ("k", "calls"),
    (
        (2, 9),  # gathers of rows and of choices; counts, places; rows spread; two products; rows collected; a scatter
        (1, 13),  # twice places, rows spread and collected, and two exchanges; a gather of the counts; two products
    ),
)
def test_lowered_for_cuda(k: int, calls: int) -> None:
    """Kernels alone: rows are gathered or exchanged, and none of XLA's collectives, sorts and scatters is there."""
    layer = Layer(expert=2)
    shapes = {"x": (2 * 512, 256), "experts": (2 * 512, k), "weights": (2 * 512, k)}
    shapes |= {"w_gate": (4, 256, 512), "w_up": (4, 256, 512), "w_down": (4, 512, 256)}
    mesh = mesh_of(2, "ep")
    arrays = {
        name: sharded(mesh, P("ep"), shape, "int32" if name == "experts" else "bfloat16")
        for name, shape in shapes.items()
    }
    call = functools.partial(jtf.moe, **layer.how, implementation="fused")
    text = lower_for_cuda(jax.shard_map(lambda a: call(**a), mesh=mesh, in_specs=P("ep"), out_specs=P("ep")), arrays)
    assert text.count(TRITON_CALL) == calls
    assert re.findall(XLA, text) == []


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("shared", (False, True))
def test_columns_lowered_for_cuda(shared: bool) -> None:
    """Kernels alone, as many as above where tokens are gathered; shared experts gather and add up nothing again."""
    mesh = mesh_of(2, "tp")
    places = {"x": P("tp"), "experts": P("tp"), "weights": P("tp"), "w_down": P(None, "tp")}
    places |= dict.fromkeys(("w_gate", "w_up"), P(None, None, "tp"))
    shapes = {"x": (2 * 64, 256), "experts": (2 * 64, 2), "weights": (2 * 64, 2), "w_down": (4, 512, 256)}
    shapes |= dict.fromkeys(("w_gate", "w_up"), (4, 256, 512))
    arrays = {
        name: sharded(mesh, places[name], shape, "int32" if name == "experts" else "bfloat16")
        for name, shape in shapes.items()
    }
    if shared:
        places["shared"] = P(None, "tp"), P(None, "tp"), P("tp")
        sizes = (256, 512), (256, 512), (512, 256)
        arrays["shared"] = tuple(sharded(mesh, *each, "bfloat16") for each in zip(places["shared"], sizes))
    call = functools.partial(jtf.moe, axis_name="tp", parallel="tensor", implementation="fused")
    mapped = jax.shard_map(lambda a: call(**a), mesh=mesh, in_specs=(places,), out_specs=P("tp"))
    text = lower_for_cuda(mapped, arrays)
    assert text.count(TRITON_CALL) == 9
    assert re.findall(XLA, text) == []


def _narrow(w: np.ndarray, dtype: str, scales: str, transposed: bool) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Weights of 8 bits, their scales, and f64 of what both are, [E, rows, columns]."""
    block = {"columns": (-1, 1), "blocks": (128, 128)}[scales]
    values, scale = jax.jit(jax.vmap(lambda each: jtf.quantize(each, dtype, block=block)))(w)
    wide = np.asarray(jax.jit(jax.vmap(jtf.dequantize))(values, scale), np.float64)
    return (values.swapaxes(1, 2), scale.swapaxes(1, 2), wide) if transposed else (values, scale, wide)


@pytest.mark.parametrize(
    ("layer", "dtype", "scales", "transposed", "quantize_rows", "tolerance"),
    (
        (Layer(expert=1), "int8", "columns", False, None, 1e-3),
        (Layer(expert=2), "float8_e4m3fn", "blocks", True, None, 1e-3),
        (Layer(expert=4, gated=False), "float8_e4m3fn", "blocks", False, "block", 0.06),
        (Layer(expert=2, shared=True), "int8", "columns", True, "row", 0.02),
        (Layer(tensor=2), "float8_e4m3fn", "blocks", True, "row", 0.06),
        (Layer(expert=4, k=4), "int8", "blocks", True, "block", 0.02),
    ),
    ids=str,
)
def test_weights_of_8_bits(
    layer: Layer, dtype: str, scales: str, transposed: bool, quantize_rows: str | None, tolerance: float
) -> None:
    """Against f64 of the dequantised weights. Rows that are quantised, too, are as far away as 8 bits are."""
    draw = np.random.default_rng(0)
    d, f = 136, 256
    arrays, specs = layer.arrays(0), layer.specs
    arrays["x"] = draw.normal(size=(layer.all_tokens, d)).astype(np.float32)
    if layer.shared:
        arrays["shared"] = tuple(draw.normal(size=shape).astype(np.float32) / 16 for shape in ((d, f), (d, f), (f, d)))
    wanted = dict(arrays)
    for name, shape in (("w_gate", (d, f)), ("w_up", (d, f)), ("w_down", (f, d))):
        if arrays[name] is None:
            continue
        w = (draw.normal(size=(layer.count, *shape)) / 16).astype(np.float32)
        arrays[name], arrays[f"{name}_scale"], wanted[name] = _narrow(w, dtype, scales, transposed)
        if transposed:
            e, *rest = (*specs[name], None)[:3]
            specs[name] = P(e, *reversed(rest))
        specs[f"{name}_scale"] = specs[name]
    sizes = [size for size in (layer.expert, layer.tensor) if size]
    mesh = Mesh(np.array(jax.devices("cpu")[: int(np.prod(sizes))]).reshape(sizes), layer.axes)
    how = {"weights_transposed": transposed, "quantize_rows": quantize_rows, **layer.how}
    run = one_program(
        lambda arrays: jtf.moe(**arrays, **how), mesh=mesh, in_specs=(specs,), out_specs=layer.rows
    )  # fmt: skip
    expected, _ = layer.expected(wanted)
    error = np.sqrt(np.mean((run(arrays) - expected) ** 2) / np.mean(expected**2))
    assert error < tolerance


@pytest.mark.parametrize("k", (1, 2))
def test_rows_of_8_bits_travel_as_such(k: int) -> None:
    """Gathered with k of 2, exchanged with k of 1. The layer's gradients are those of rows that stay."""
    layer = Layer(expert=2, t=4, k=k)
    draw = np.random.default_rng(0)
    arrays, specs = layer.arrays(0), layer.specs
    arrays["x"] = draw.normal(size=(layer.all_tokens, 256)).astype(np.float32)
    for name, shape in (("w_gate", (256, 128)), ("w_up", (256, 128)), ("w_down", (128, 256))):
        w = (draw.normal(size=(layer.count, *shape)) / 16).astype(np.float32)
        arrays[name], arrays[f"{name}_scale"], _ = _narrow(w, "int8", "columns", False)
        specs[f"{name}_scale"] = specs[name]
    mesh = mesh_of(2, *layer.axes)

    def run(quantize_rows: str | None) -> Any:
        def local(arrays: dict[str, Any]) -> jax.Array:
            return jtf.moe(**arrays, **layer.how, quantize_rows=quantize_rows)

        return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=layer.rows)

    moved = ("moe_dispatch", "all_gather", "ragged_all_to_all", "moe_spread")
    text = str(jax.make_jaxpr(run("block"))(arrays))
    wide = [line for line in text.splitlines() if any(f" = {name}[" in line for name in moved) and "256]" in line]
    to_experts = [line for line in wide if "i8[" in line]
    back = [line for line in wide if "i8[" not in line]
    assert len(to_experts) == (2 if k == 2 else 3), text
    assert all("ragged_all_to_all" in line for line in back), back

    def gradients(quantize_rows: str | None, ct: jax.Array) -> Any:
        of = lambda x, weights: run(quantize_rows)(arrays | {"x": x, "weights": weights})  # noqa: E731
        return jax.jit(lambda *primals: jax.vjp(of, *primals)[1](ct))(arrays["x"], arrays["weights"])

    ct = draw.normal(size=arrays["x"].shape).astype(np.float32)
    for found, expected in zip(gradients("row", ct), gradients(None, ct)):
        np.testing.assert_array_equal(found, expected)


def test_errors_of_weights_of_8_bits() -> None:
    layer = Layer(expert=1, gated=False)
    arrays = layer.arrays(0)
    narrow, one = arrays["w_up"].astype(np.int8), np.float32(1)
    for more, message in (
        ({"w_up": narrow}, "moe takes w_up_scale with a w_up of float8_e4m3fn, float8_e5m2, int8, and with no other"),
        ({"w_up_scale": one}, "not with float32: leave out w_up_scale."),
        ({"w_gate_scale": one}, "not with none: leave out w_gate_scale."),
        ({"quantize_rows": "row"}, "moe takes quantize_rows with weights of float8_e4m3fn, float8_e5m2, int8 only"),
        ({"weights_transposed": True}, "moe takes weights_transposed with weights of"),
        ({"quantize_rows": "column"}, "moe takes quantize_rows as None, 'row' or 'block', not 'column'."),
    ):
        local = functools.partial(jtf.moe, **arrays | more, **layer.how)
        with fails(ValueError, message):
            jax.shard_map(local, mesh=mesh_of(1, "ep"), in_specs=(), out_specs=P(), check_vma=False)()
