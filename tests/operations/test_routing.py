"""Routers of published models, against their formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtaxfree import routing
from tests.helpers.support import fails, mesh_of

T, E = 40, 16


def logits(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(T, E)).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    shifted = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def highest(x: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-x, axis=-1, kind="stable")[:, :k]


def same(found: tuple[jax.Array, jax.Array], experts: np.ndarray, weights: np.ndarray) -> None:
    assert found[0].dtype == jnp.int32
    assert found[1].dtype == jnp.float32
    np.testing.assert_array_equal(found[0], experts)
    np.testing.assert_allclose(found[1], weights, rtol=1e-5)


def test_switch() -> None:
    """The probability of the best expert, not divided by anything."""
    p = softmax(logits())
    experts = highest(p, 1)
    same(routing.top_k(jnp.asarray(logits()), 1), experts, np.take_along_axis(p, experts, 1))


def test_mixtral() -> None:
    """Softmax over the logits of the two best."""
    experts = highest(logits(), 2)
    weights = softmax(np.take_along_axis(logits(), experts, 1))
    found = routing.top_k(jnp.asarray(logits()), 2, scores="logits", normalise="softmax")
    same(found, experts, weights)
    # Which is what division by the sum makes of a softmax over all.
    np.testing.assert_allclose(routing.top_k(jnp.asarray(logits()), 2, normalise="sum")[1], weights, rtol=1e-5)


def test_qwen3() -> None:
    p = softmax(logits())
    experts = highest(p, 8)
    weights = np.take_along_axis(p, experts, 1)
    found = routing.top_k(jnp.asarray(logits()), 8, normalise="sum")
    same(found, experts, weights / weights.sum(1, keepdims=True))


def test_deepseek_v2() -> None:
    """Experts of the groups whose best one is best; probabilities times a factor."""
    p = softmax(logits())
    groups = highest(p.reshape(T, 8, 2).max(-1), 3)
    limited = np.where(np.isin(np.arange(E) // 2, groups[0]), p, 0)
    for t in range(T):
        limited[t] = np.where(np.isin(np.arange(E) // 2, groups[t]), p[t], 0)
    experts = highest(limited, 4)
    found = routing.top_k(jnp.asarray(logits()), 4, groups=8, top_groups=3, scale=16.0)
    same(found, experts, 16 * np.take_along_axis(p, experts, 1))


def test_deepseek_v3() -> None:
    """Sigmoids plus a bias decide, also on groups by the sum of their two best; weights are without the bias."""
    s = 1 / (1 + np.exp(-logits().astype(np.float64)))
    bias = np.random.default_rng(1).normal(size=E).astype(np.float32)
    biased = s + bias
    by_group = np.sort(biased.reshape(T, 4, 4), axis=-1)[..., -2:].sum(-1)
    groups = highest(by_group, 2)
    limited = np.stack([np.where(np.isin(np.arange(E) // 4, g), b, -np.inf) for g, b in zip(groups, biased)])
    experts = highest(limited, 4)
    weights = np.take_along_axis(s, experts, 1)
    weights = 2.5 * weights / (weights.sum(1, keepdims=True) + 1e-20)
    keywords = {"groups": 4, "top_groups": 2, "group_score": "top2", "normalise": "sum", "scale": 2.5}
    found = routing.top_k(jnp.asarray(logits()), 4, scores="sigmoid", bias=jnp.asarray(bias), **keywords)
    same(found, experts, weights)


def test_equal_scores_go_by_number() -> None:
    experts, weights = routing.top_k(jnp.zeros((2, 4)), 3)
    np.testing.assert_array_equal(experts, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(weights, np.full((2, 3), 0.25))


def test_low_precision_logits() -> None:
    """Scores are f32."""
    x = jnp.asarray(logits(), jnp.bfloat16)
    np.testing.assert_allclose(routing.top_k(x, 2)[1], routing.top_k(x.astype(jnp.float32), 2)[1])


def test_gradients() -> None:
    """Those of the scores that were chosen; the bias has none."""
    x, bias = jnp.asarray(logits()), jnp.ones(E)
    ct = jnp.asarray(np.random.default_rng(2).normal(size=(T, 3)), jnp.float32)

    def loss(x: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.sum(routing.top_k(x, 3, scores="sigmoid", bias=bias, normalise="sum")[1] * ct)

    of_x, of_bias = jax.grad(loss, (0, 1))(x, bias)
    chosen = routing.top_k(x, 3, scores="sigmoid")[0]

    def plain(x: jax.Array) -> jax.Array:
        s = jax.nn.sigmoid(jnp.take_along_axis(x, chosen, 1))
        return jnp.sum(s / s.sum(1, keepdims=True) * ct)

    np.testing.assert_allclose(of_x, jax.grad(plain)(x), atol=1e-6)
    assert not of_bias.any()


def test_load() -> None:
    experts = np.random.default_rng(0).integers(-1, E + 1, (T, 3)).astype(np.int32)
    np.testing.assert_array_equal(routing.load(jnp.asarray(experts), E), [(experts == e).sum() for e in range(E)])


@pytest.mark.parametrize(("dtype", "count"), [("uint8", 256), ("int8", 128), ("int16", 300)])
def test_load_of_narrow_numbers(dtype: str, count: int) -> None:
    """Whose dtype does not hold the number of experts, or only just."""
    experts = np.random.default_rng(0).integers(0, count, (T, 3)).astype(dtype)
    wanted = np.bincount(experts.reshape(-1), minlength=count)
    np.testing.assert_array_equal(routing.load(jnp.asarray(experts), count), wanted)


def test_balance_loss() -> None:
    """1 of even choices; that of all ranks is of their means."""
    even = jnp.tile(jnp.eye(E), (3, 1)) * 0
    chosen = jnp.arange(3 * E, dtype=jnp.int32)[:, None] % E
    np.testing.assert_allclose(routing.balance_loss(even, chosen), 1, rtol=1e-6)
    x = jnp.asarray(logits())
    experts, _ = routing.top_k(x, 2)
    share = np.array([(np.asarray(experts) == e).mean() for e in range(E)])
    wanted = E * np.sum(share * softmax(logits()).mean(0))
    np.testing.assert_allclose(routing.balance_loss(x, experts), wanted, rtol=1e-5)
    program = jax.shard_map(
        lambda *a: routing.balance_loss(*a, axis_name="tp"), mesh=mesh_of(2), in_specs=P("tp"), out_specs=P()
    )
    np.testing.assert_allclose(program(x, experts), wanted, rtol=1e-5)
    assert lax.stop_gradient(jax.grad(lambda x: routing.balance_loss(x, experts))(x)).any()


def test_errors() -> None:
    x = jnp.zeros((2, 6))
    with fails(ValueError, "scores as one of 'softmax', 'sigmoid', 'logits'", "'tanh'"):
        routing.top_k(x, 2, scores="tanh")  # type: ignore[arg-type]
    with fails(ValueError, "normalise as one of", "True"):
        routing.top_k(x, 2, normalise=True)  # type: ignore[arg-type]
    with fails(ValueError, "6 experts are not in 4"):
        routing.top_k(x, 2, groups=4)
    with fails(ValueError, "k from 1 to 6", "not 7"):
        routing.top_k(x, 7)
    with fails(ValueError, "k from 1 to 2", "not 3"):
        routing.top_k(x, 3, groups=3, top_groups=1)
    with fails(ValueError, "top_groups from 1 to 3", "not 4"):
        routing.top_k(x, 2, groups=3, top_groups=4)
    with fails(ValueError, "groups of two experts or more"):
        routing.top_k(x, 2, groups=6, top_groups=2, group_score="top2")
    with fails(ValueError, "a bias [6]", "[5]"):
        routing.top_k(x, 2, bias=jnp.zeros(5))
    with pytest.raises(ValueError, match=r"logits \[T, E\]"):
        routing.top_k(x[0], 2)
    for name, value in (("k", 2.5), ("k", "2"), ("groups", 2.0), ("top_groups", 1.5)):
        with fails(TypeError, f"top_k takes {name} as a whole number, not {value!r}."):
            routing.top_k(x, **{"k": 2, name: value})
    with fails(ValueError, "top_k takes top_groups from 1 to 3, not 0."):
        routing.top_k(x, 2, groups=3, top_groups=0)
    with fails(ValueError, "top_k takes logits [T, E], not []."):
        routing.top_k(1.0, 1)
    with fails(ValueError, "load takes experts as integers, not float32."):
        routing.load(jnp.zeros((2, 2)), 3)


def test_sigmoids_that_are_all_0() -> None:
    """Divided by their sum they stay 0."""
    experts, weights = routing.top_k(
        np.full((2, 4), -200.0, np.float32), 2, scores="sigmoid", normalise="sum", bias=[0] * 4
    )
    np.testing.assert_array_equal(experts, [[0, 1]] * 2)
    np.testing.assert_array_equal(weights, np.zeros((2, 2)))
