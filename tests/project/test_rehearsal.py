"""Tests of GPUs can be rehearsed without one: `tests/helpers/rehearsal.py`."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.helpers import rehearsal
from tests.helpers.parity import mesh_of

H100 = "NVIDIA H100 80GB HBM3"


def sums(dtype: str = "bfloat16", **how: Any) -> jax.Array:
    mesh = mesh_of(jax.devices("cuda")[:2], (2,), ("tp",))
    call = jax.shard_map(
        lambda x, y: jtf.matmul_all_reduce(x, y, "tp", **how),
        mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P(), check_vma=False,
    )  # fmt: skip
    x, y = jnp.ones((16, 256), dtype), jnp.ones((256, 64), dtype)
    return jax.jit(call)(x, y)


@pytest.mark.parametrize("implementation", (None, "fused"))
def test_kernels_are_compiled_and_references_run(no_code: None, implementation: str | None) -> None:
    with rehearsal.rehearsing(H100) as seen:
        assert bool(jnp.all(sums(implementation=implementation) == 256))
    assert (seen.programs, seen.launches) == (1, 1)


def test_kernels_are_compiled_and_nothing_runs(no_code: None) -> None:
    with rehearsal.rehearsing(H100, run=False) as seen, pytest.raises(pytest.skip.Exception):
        sums(implementation="fused")
    assert (seen.programs, seen.launches) == (1, 1)


def test_what_no_kernel_takes_is_refused(no_code: None) -> None:
    with rehearsal.rehearsing(H100), pytest.raises(NotImplementedError, match="cannot run here"):
        sums("float32", implementation="fused", config={"kernel": "hopper"})


def test_it_is_over_behind_it() -> None:
    with rehearsal.rehearsing(H100):
        pass
    rehearsal.needs_real_gpus()
    if jax.default_backend() == "cpu":
        with pytest.raises(RuntimeError, match="cuda"):
            jax.devices("cuda")


@pytest.mark.slow
def test_a_test_of_gpus() -> None:
    """Passes, with its kernels; what a GPU has to answer for is skipped."""
    chosen = ["tests/gpu/test_gpu.py", "-k", "outputs_vary or does_not_arrive"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rehearse=run", *chosen]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
