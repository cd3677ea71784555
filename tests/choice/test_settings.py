"""What configurations may say. No GPU needed."""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from jaxtaxfree.ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, register
from jaxtaxfree.ops.product import Call
from jaxtaxfree.ops.variant import choose, named, settings_of
from jaxtaxfree.primitive import Unsupported
from jaxtaxfree.settings import setting
from tests.compiled.test_gluon import NAME, launch_of
from tests.helpers.support import TRITON_CALL, by_shape, chosen, fails, lower_for_cuda, mesh_of, product_call, sharded

PRODUCTS = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
NAMES = tuple(name for name in register.OPERATIONS if "matmul" in name)
KERNELS = ("portable", "few", "hopper", "hopper_few")
# Of every product: the kernels that refuse a setting.
REFUSED_BY_ALL: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("portable", "few", "hopper"), {"block_m": 48}),
    (("hopper_few",), {"block_m": 56}),
    (("hopper_few",), {"block_m": 20}),
    (KERNELS, {"block_m": 512}),
    (KERNELS, {"block_n": 96}),
    (KERNELS, {"block_n": 64.0}),
    (KERNELS, {"block_k": None}),
    (KERNELS, {"num_warps": 3}),
    (KERNELS, {"num_stages": 0}),
    (("hopper", "hopper_few"), {"num_stages": 1}),
    (("portable", "hopper"), {"group_m": 0}),
    (("hopper",), {"num_warps": 4}),
    (("hopper",), {"num_warps": 16}),
    (("hopper_few",), {"splits": 0}),
    (("hopper_few",), {"whole": -1}),
    (("hopper",), {"programs": 0}),
    (("hopper",), {"pace": float("nan")}),
    (("hopper",), {"pace": 1.5}),
)
REFUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *((name, kernel, settings) for name in NAMES for kernels, settings in REFUSED_BY_ALL for kernel in kernels),
    *(("all_gather_matmul", kernel, {"chunk": 100}) for kernel in ("portable", "few", "hopper_few")),
    *((name, "hopper", {"chunk": 100}) for name in NAMES[1:]),
    ("all_gather_matmul", "portable", {"pushers": 0}),
    ("all_gather_matmul", "portable", {"units": -1}),
    ("all_gather_matmul", "hopper", {"unit": 7}),
    ("all_gather_matmul", "hopper", {"unit": 256}),
    ("all_gather_matmul", "hopper", {"part": 100}),
    ("all_gather_matmul", "hopper_few", {"part": 0}),
    ("matmul_reduce_scatter", "portable", {"lag": 0}),
    *((name, "hopper", {"exact_wire": 1}) for name in NAMES[1:]),
    ("matmul_all_reduce", "hopper", {"groups": -1}),
    ("matmul_all_reduce", "few", {"shots": 3}),
    ("matmul_all_reduce", "hopper_few", {"add_rows": 3}),
    ("decode_attention", "portable", {"splits": 0}),
    ("decode_attention", "portable", {"block_s": 8}),
    ("decode_attention", "portable", {"merge_rows": 3}),
    ("decode_attention", "portable", {"num_warps": 64}),
    ("psum", "portable", {"block": 1 << 20}),
    ("all_gather", "portable", {"num_warps": 0}),
    ("psum_scatter", "portable", {"block": 8}),
    ("all_to_all", "portable", {"block": 24}),
)


# Settings that the simulator takes and the compiler does not, and what the error says that they have to be.
DO_NOT_COMPILE: tuple[tuple[dict[str, Any], int, str], ...] = (
    (
        {"kernel": "hopper_few", "num_warps": 8},
        64,
        "num_warps of a config is at most 4 for the kernel 'hopper_few' with",
    ),
    ({"kernel": "hopper_few", "num_warps": 2}, 64, "num_warps of a config is 4, 8 or 16 for the kernel 'hopper_few'"),
    ({"kernel": "hopper_few", "block_n": 32}, 64, "block_n of a config is at least 64 for the kernel 'hopper_few'"),
    ({"kernel": "hopper", "block_m": 64}, 4096, "block_m of a config is at least 128 for the kernel 'hopper', not 64"),
)


@pytest.mark.parametrize("operation", NAMES)
@pytest.mark.parametrize(("config", "rows", "says"), DO_NOT_COMPILE, ids=lambda x: str(x)[:40].replace(" ", ""))
def test_settings_that_do_not_compile_together(operation: str, config: dict[str, Any], rows: int, says: str) -> None:
    entry, mesh = register.OPERATIONS[operation], mesh_of(2)
    call = functools.partial(entry.function, axis_name="tp", implementation="fused", config=config)
    program = jax.shard_map(call, mesh=mesh, in_specs=entry.in_specs("tp"), out_specs=entry.out_spec("tp"))
    operands = [
        sharded(mesh, spec, shape, "bfloat16")
        for spec, shape in zip(entry.in_specs("tp"), ((rows, 1024), (1024, 1024)))
    ]
    with fails(ValueError, says):
        lower_for_cuda(program, *operands)


@pytest.mark.parametrize("operation", (jtf.matmul_reduce_scatter, jtf.matmul_all_reduce), ids=lambda x: x.__name__)
def test_the_least_columns_of_a_tile_that_is_added_up(operation: Callable) -> None:
    """Whose halves travel in pieces of 16 columns."""
    call = functools.partial(operation, axis_name="tp", implementation="fused")
    operands = [sharded(mesh_of(2), spec, (4096, 4096), "bfloat16") for spec in (P(None, "tp"), P("tp"))]

    def lower(block_n: int, block_k: int = 64) -> str:
        local = functools.partial(call, config={"kernel": "hopper", "block_n": block_n, "block_k": block_k})
        out = P() if operation is jtf.matmul_all_reduce else P("tp")
        specs = {"in_specs": (P(None, "tp"), P("tp")), "out_specs": out}
        return lower_for_cuda(jax.shard_map(local, mesh=mesh_of(2), **specs), *operands)

    with fails(ValueError, "block_n of a config is at least 32 for the kernel 'hopper' here, not 16"):
        lower(16, 128)
    with fails(Unsupported, "a step of K has to hold 16 columns of what arrives, and with", "block_k=64 it holds 4"):
        lower(8)
    assert TRITON_CALL in lower(32)


def test_the_least_columns_of_a_tile() -> None:
    operands = [sharded(mesh_of(2), spec, (4096, 4096), "bfloat16") for spec in (P("tp"), P(None, "tp"))]
    config = {"kernel": "hopper", "block_n": 8}
    call = functools.partial(jtf.all_gather_matmul, axis_name="tp", implementation="fused", config=config)
    specs = {"in_specs": (P("tp"), P(None, "tp")), "out_specs": P(None, "tp")}
    with fails(ValueError, "block_n of a config is at least 16 for the kernel 'hopper'"):
        lower_for_cuda(jax.shard_map(call, mesh=mesh_of(2), **specs), *operands)


@pytest.mark.parametrize(("operation", "kernel", "settings"), REFUSED, ids=lambda x: str(x).replace(" ", ""))
def test_what_makes_no_sense_is_refused(operation: str, kernel: str, settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with fails(ValueError, f"The setting {name} of a config is ", f", not {value!r}."):
        named("", register.OPERATIONS[operation].variants, kernel).Config(**settings)


def traced(name: str, config: Any, implementation: str | None = None) -> Any:
    def local(x: jax.Array) -> jax.Array:
        return getattr(jtf, name)(x, x.T, "tp", config=config, implementation=implementation)

    program = jax.shard_map(local, mesh=mesh_of(2), in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
    return jax.eval_shape(program, jnp.ones((16, 8)))


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
    with fails(ValueError, f"The setting {next(iter(settings))} of a config is"):
        traced(name, settings, implementation)


def test_a_value_that_one_kernel_takes_is_not_refused_for_another() -> None:
    """Of 72 rows only the kernel for few rows on Hopper makes a tile."""
    traced("matmul_all_reduce", {"block_m": 72})
    with fails(ValueError, "The setting block_m of a config is a power of 2"):
        traced("matmul_all_reduce", {"kernel": "few", "block_m": 72})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("old", "new"),
    (
        ({"hopper": True}, "hopper"),
        ({"hopper": True, "small": True}, "hopper_few"),
        ({"hopper": True, "small": False}, "hopper"),
        ({"small": True}, "few"),
        ({"hopper": False}, "portable"),
    ),
)
def test_the_old_spelling_is_told_the_new_one(name: str, old: dict[str, bool], new: str) -> None:
    with fails(ValueError, f"{name} names its kernels now", f'say config={{"kernel": {new!r}}}.'):
        traced(name, old | {"block_m": 64})


def test_kernels_and_settings_that_there_are_not() -> None:
    with fails(ValueError, "matmul_all_reduce has no kernel 'blackwell'", "'hopper', 'hopper_few', 'few', 'portable'"):
        traced("matmul_all_reduce", {"kernel": "blackwell"})
    with fails(ValueError, "matmul_all_reduce has no setting 'block_q'", "config takes kernel, block_m"):
        traced("matmul_all_reduce", {"block_q": 1})
    with fails(ValueError, "'hopper' of matmul_all_reduce has no setting 'splits'", "'hopper_few' has it"):
        traced("matmul_all_reduce", {"kernel": "hopper", "splits": 2})
    with fails(ValueError, "has no setting 'pace'", "'hopper' has it"):  # no kernel has both
        traced("matmul_all_reduce", {"pace": 0.5, "splits": 2})


def test_integers_of_numpy_are_integers() -> None:
    assert all_gather_matmul.few.Config(block_n=np.int32(64)).block_n == 64


def lowered(mesh: Mesh, name: str, config: Any) -> str:
    """Of few rows, in bf16, for Hopper."""
    entry = register.OPERATIONS[name]
    call = functools.partial(entry.call, axis_name="tp", implementation="fused", config=config)
    specs = entry.in_specs("tp")
    program = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=entry.out_spec("tp"))
    sizes = ((64, 2048), (2048, 8192))
    return lower_for_cuda(program, *(sharded(mesh, spec, size, "bfloat16") for spec, size in zip(specs, sizes)))


@pytest.mark.parametrize("name", NAMES)
def test_no_settings_are_those_by_shape(name: str) -> None:
    mesh = mesh_of(4)
    assert lowered(mesh, name, {}) == lowered(mesh, name, None)


@pytest.mark.covers(3)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("module", PRODUCTS)
@pytest.mark.parametrize("rows", (16, 2048))
def test_what_settings_do_not_say_is_chosen_by_shape(module: ModuleType, kernel: str, rows: int) -> None:
    call = product_call(module, rows, 1024, 8192, world=4)
    found = chosen(module, call, kernel=kernel, num_stages=2)
    assert found.variant.name == kernel
    assert found.config == dataclasses.replace(by_shape(module, kernel, call), num_stages=2)
    # All of them leave nothing to be chosen.
    config = found.variant.Config(block_m=128, num_warps=8 if kernel == "hopper" else 4)
    assert chosen(module, call, **dict(settings_of("", module.VARIANTS, config))).config == config


@pytest.mark.parametrize("module", PRODUCTS)
@pytest.mark.parametrize(("rows", "kernel"), ((16, "hopper_few"), (2048, "hopper")))
def test_no_setting_changes_the_kernel(module: ModuleType, rows: int, kernel: str) -> None:
    call = product_call(module, rows, 1024, 8192, world=4)
    assert chosen(module, call).variant.name == chosen(module, call, block_n=128).variant.name == kernel
    other, value = ("pace", 0.5) if kernel == "hopper_few" else ("splits", 2)
    with fails(ValueError, f"The kernel {kernel!r} of ", f"has no setting {other!r}", "has it", '"kernel": '):
        chosen(module, call, **{other: value})


@pytest.mark.parametrize("module", PRODUCTS)
def test_a_kernel_is_one_class_and_one_entry(module: ModuleType) -> None:
    """A dummy for another GPU is taken there alone, and its settings are its own."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(module.hopper.Config):
        clusters: int = setting(2, least=1)

    class Blackwell(module.hopper.Hopper):
        name = "blackwell"

        def refuses(self, call: Call, config: Any) -> list[str]:
            return [] if call.target.compute_capability == 100 else ["it is for GPUs of compute capability 10.0"]

        def by_shape(self, call: Call, asked: Any) -> Any:
            return Config()

    Blackwell.Config = Config
    variants = (*module.VARIANTS, Blackwell())
    for capability, name in ((90, "hopper"), (100, "blackwell"), (80, "portable")):
        call = product_call(module, 2048, 1024, 8192, world=4, compute_capability=capability)
        assert choose(call.operation, variants, call, {}).variant.name == name
    assert dict(settings_of("", variants, {"clusters": 4})) == {"clusters": 4}
    with fails(NotImplementedError, "('blackwell')", "it is for GPUs of compute capability 10.0"):
        choose(call.operation, variants, call, {"kernel": "blackwell"})


@pytest.mark.parametrize("name", ("matmul_reduce_scatter", "matmul_all_reduce"))
def test_the_wire_is_no_matter_of_tiles(name: str) -> None:
    """What is chosen by shape is chosen with f32 on the wire, too."""
    mesh = mesh_of(4)
    texts = [lowered(mesh, name, config) for config in ({"exact_wire": True}, {"exact_wire": False}, None)]
    assert {launch_of(text)[NAME] for text in texts} == {b"matmul_reduce_hopper_few_kernel"}
    assert texts[0] != texts[1] == texts[2]
