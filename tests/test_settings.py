"""What configurations may say. No GPU needed."""

import dataclasses
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops import all_gather_matmul, collectives, decode_attention, matmul_all_reduce, matmul_reduce_scatter
from tests.support import fails, lower_for_cuda, mesh_of, sharded
from tests.test_gluon import NAME, launch_of

PRODUCTS = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
FEW, MANY = {"hopper": True, "small": True}, {"hopper": True}
REFUSED: tuple[tuple[ModuleType, dict[str, Any], str], ...] = (
    *((module, {"block_m": 48}, "block_m") for module in PRODUCTS),
    *((module, FEW | {"block_m": 56}, "block_m") for module in PRODUCTS),
    *((module, FEW | {"block_m": 20}, "block_m") for module in PRODUCTS),
    *((module, FEW | {"block_m": 512}, "block_m") for module in PRODUCTS),
    *((module, {"block_n": 96}, "block_n") for module in PRODUCTS),
    *((module, {"block_n": 64.0}, "block_n") for module in PRODUCTS),
    *((module, {"block_k": None}, "block_k") for module in PRODUCTS),
    *((module, {"num_warps": 3}, "num_warps") for module in PRODUCTS),
    *((module, {"num_stages": 0}, "num_stages") for module in PRODUCTS),
    *((module, FEW | {"num_stages": 1}, "num_stages") for module in PRODUCTS),
    *((module, MANY | {"num_stages": 1}, "num_stages") for module in PRODUCTS),
    *((module, {"group_m": 0}, "group_m") for module in PRODUCTS),
    *((module, FEW | {"splits": 0}, "splits") for module in PRODUCTS),
    *((module, FEW | {"whole": -1}, "whole") for module in PRODUCTS),
    *((module, MANY | {"programs": 0}, "programs") for module in PRODUCTS),
    *((module, MANY | {"pace": float("nan")}, "pace") for module in PRODUCTS),
    *((module, MANY | {"pace": 1.5}, "pace") for module in PRODUCTS),
    *((module, {"small": 1}, "small") for module in PRODUCTS),
    *((module, {"chunk": 100}, "chunk") for module in PRODUCTS),
    (all_gather_matmul, {"pushers": 0}, "pushers"),
    (all_gather_matmul, {"units": -1}, "units"),
    (all_gather_matmul, MANY | {"unit": 7}, "unit"),
    (all_gather_matmul, MANY | {"unit": 256}, "unit"),
    (all_gather_matmul, MANY | {"part": 100}, "part"),
    (all_gather_matmul, FEW | {"part": 0}, "part"),
    (matmul_reduce_scatter, {"lag": 0}, "lag"),
    (matmul_all_reduce, MANY | {"groups": -1}, "groups"),
    (matmul_all_reduce, {"shots": 3}, "shots"),
    (matmul_all_reduce, {"add_rows": 3}, "add_rows"),
    (decode_attention, {"splits": 0}, "splits"),
    (decode_attention, {"block_s": 8}, "block_s"),
    (decode_attention, {"merge_rows": 3}, "merge_rows"),
    (decode_attention, {"num_warps": 64}, "num_warps"),
    (collectives, {"block": 1 << 20}, "block"),
    (collectives, {"num_warps": 0}, "num_warps"),
)


@pytest.mark.parametrize(
    ("module", "settings", "name"),
    REFUSED,
    ids=lambda x: x.__name__.split(".")[-1] if isinstance(x, ModuleType) else str(x).replace(" ", ""),
)
def test_what_makes_no_sense_is_refused(module: ModuleType, settings: dict[str, Any], name: str) -> None:
    with fails(ValueError, f"The setting {name} of a config is ", f", not {settings[name]!r}."):
        module.Config(**settings)


@pytest.mark.parametrize("implementation", (None, "fused", "simulate", "xla"))
@pytest.mark.parametrize(
    ("name", "settings"),
    (
        ("all_gather_matmul", {"pushers": 0}),
        ("matmul_reduce_scatter", {"group_m": 0}),
        ("matmul_all_reduce", {"shots": 0}),
    ),
)
def test_calls_refuse_it_when_they_are_traced(name: str, settings: dict[str, int], implementation: str | None) -> None:
    def local(x: jax.Array) -> jax.Array:
        return getattr(jtf, name)(x, x.T, "tp", config=settings, implementation=implementation)

    program = jax.shard_map(local, mesh=mesh_of(2), in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    with fails(ValueError, f"The setting {next(iter(settings))} of a config is"):
        jax.eval_shape(program, jnp.ones((16, 8)))


def test_integers_of_numpy_are_integers() -> None:
    assert all_gather_matmul.Config(block_n=np.int32(64)).block_n == 64


def lowered(mesh: Mesh, name: str, config: Any) -> str:
    """Of few rows, in bf16, for Hopper."""
    gathers = name == "all_gather_matmul"
    lhs_spec, rhs_spec = (P("tp"), P(None, "tp")) if gathers else (P(None, "tp"), P("tp"))
    out_spec = {"all_gather_matmul": rhs_spec, "matmul_reduce_scatter": P("tp"), "matmul_all_reduce": P()}[name]
    program = jax.shard_map(
        lambda lhs, rhs: getattr(jtf, name)(lhs, rhs, "tp", implementation="fused", config=config),
        mesh=mesh,
        in_specs=(lhs_spec, rhs_spec),
        out_specs=out_spec,
    )
    operands = (sharded(mesh, lhs_spec, (64, 2048), "bfloat16"), sharded(mesh, rhs_spec, (2048, 8192), "bfloat16"))
    return lower_for_cuda(program, *operands)


@pytest.mark.parametrize("name", ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"))
def test_no_settings_are_those_by_shape(name: str) -> None:
    mesh = mesh_of(4)
    assert lowered(mesh, name, {}) == lowered(mesh, name, None)


@pytest.mark.parametrize(
    ("module", "settings"),
    (
        (all_gather_matmul, {"pushers": 24}),
        (matmul_reduce_scatter, {"num_stages": 2}),
        (matmul_all_reduce, {"num_stages": 2}),
    ),
)
@pytest.mark.parametrize("rows", (16, 2048))
def test_what_settings_do_not_say_is_chosen_by_shape(module: ModuleType, settings: dict[str, Any], rows: int) -> None:
    on = {"world": 4, "dtype": "bfloat16", "compute_capability": 90}
    rows = rows if module is matmul_all_reduce else rows // 4
    for hopper, default in (
        ({}, module.default_config(rows, 8192, **on)),
        ({"hopper": True}, module.hopper_config(rows, 8192, 4)),
    ):
        found = module.choose(rows, 1024, 8192, settings=settings | hopper, **on)
        assert found == dataclasses.replace(default, **settings)
    # All of them leave nothing to be chosen.
    config = module.Config(block_m=32, num_warps=4)
    assert module.choose(rows, 1024, 8192, settings=dataclasses.asdict(config), **on) == config


@pytest.mark.parametrize("name", ("matmul_reduce_scatter", "matmul_all_reduce"))
def test_the_wire_is_no_matter_of_tiles(name: str) -> None:
    """What is chosen by shape is chosen with f32 on the wire, too."""
    mesh = mesh_of(4)
    texts = [lowered(mesh, name, config) for config in ({"exact_wire": True}, {"exact_wire": False}, None)]
    assert {launch_of(text)[NAME] for text in texts} == {b"matmul_reduce_decode_hopper_kernel"}
    assert texts[0] != texts[1] == texts[2]
