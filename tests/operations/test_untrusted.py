"""Lengths and pages of a cache that arrive as data and are wrong, as `docs/guarantees.md` has it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers.support import mesh_of, one_program

PAGES = jax.random.normal(jax.random.key(0), (4, 16, 2, 64))
QUERY = jax.random.normal(jax.random.key(1), (2, 1, 2, 64))


def attend(implementation: str, lengths: list[int]) -> np.ndarray:
    def local(query: jax.Array, key: jax.Array, lengths: jax.Array) -> jax.Array:
        how: dict[str, Any] = {"key_value_seq_lengths": lengths, "implementation": implementation}
        return jtf.decode_attention(query, key, key, "tp", **how)

    specs = P(), P(None, "tp"), P()
    program = one_program(local, mesh=mesh_of(2), in_specs=specs, out_specs=P(), check_vma=False)
    return np.asarray(program(QUERY, PAGES.reshape(2, 32, 2, 64), jnp.asarray(lengths, jnp.int32)))


@pytest.mark.parametrize("implementation", ("xla", "simulate"))
def test_attention_leaves_out_keys_that_the_cache_has_not(implementation: str) -> None:
    found = attend(implementation, [-5, 10**9])
    np.testing.assert_allclose(found, attend("xla", [0, 32]), rtol=1e-5, atol=1e-6)
    assert not found[0].any() and found[1].all()


@pytest.mark.parametrize("implementation", ("xla", "simulate"))
@pytest.mark.parametrize("kv_layout", ("BSKH", "KBSH"))
def test_attention_reads_no_page_that_there_is_not(kv_layout: str, implementation: str) -> None:
    """The simulator would raise for a read outside of the pool. The second sequence is right."""
    pool = PAGES if kv_layout == "BSKH" else jnp.moveaxis(PAGES, 2, 0)

    def local(query: jax.Array, key: jax.Array, tables: jax.Array) -> jax.Array:
        how: dict[str, Any] = {"key_value_seq_lengths": jnp.array([32, 20]), "implementation": implementation}
        return jtf.decode_attention(query, key, key, "tp", block_tables=tables, kv_layout=kv_layout, **how)

    def run(tables: list[list[int]]) -> np.ndarray:
        program = one_program(local, mesh=mesh_of(1), in_specs=(P(),) * 3, out_specs=P(), check_vma=False)
        return np.asarray(program(QUERY, pool, jnp.asarray(tables, jnp.int32)))

    found = run([[-(2**31), 2**31 - 1], [2, 1]])
    np.testing.assert_allclose(found, run([[0, 3], [2, 1]]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("lengths", "tables"), (([16, 16], [[0, 99], [2, -3]]), ([-4, 1000], [[0, 1], [2, 3]])), ids=("pages", "lengths")
)
def test_a_cache_drops_tokens_without_a_place(lengths: list[int], tables: list[list[int]]) -> None:
    cache = jtf.append_kv((PAGES, PAGES), QUERY, QUERY, jnp.asarray(lengths), (), block_tables=jnp.asarray(tables))
    for part in cache:
        np.testing.assert_array_equal(part, PAGES)
