"""The register of operations: what follows from an entry, and whether everything that is kept by name has it."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxtaxfree as jtf
from benchmarks import operations, table
from jaxtaxfree.ops.register import OPERATIONS, Operation
from tests.choice import test_settings
from tests.helpers import attention_parity, collectives_parity, parity, simulator_kernels, support
from tests.helpers.support import fails, mesh_of, name_of_kernel
from tests.operations import test_primitive
from tests.simulator import test_simulator_hopper

COMPILED_TESTS = Path(__file__).parents[1] / "compiled"
# Kernels whose compiled code has tests of its own in tests/compiled beside those of test_compiled.py.
COMPILED_ELSEWHERE = {
    "all_gather_matmul_hopper": "test_compiled_hopper.py",
    "matmul_reduce_scatter_hopper": "test_compiled_hopper.py",
    "matmul_all_reduce_hopper": "test_compiled_hopper.py",
    "all_gather_matmul_hopper_few": "test_compiled_hopper_few.py",
    "matmul_reduce_hopper_few": "test_compiled_reduce_hopper_few.py",
    "matmul_all_reduce_few": "test_compiled_all_reduce.py",
    "decode_attention": "test_compiled_attention.py",
    "psum": "test_compiled_collectives.py",
    "all_gather": "test_compiled_collectives.py",
    "psum_scatter": "test_compiled_collectives.py",
    "all_to_all": "test_compiled_collectives.py",
}
# What is kept by the name of an operation, and where.
BY_OPERATION: dict[str, Any] = {
    "TIMED in benchmarks/operations.py says how it is timed, and what it is compared with": operations.TIMED,
    "PRODUCTS in tests/helpers/parity.py, or NAMES in attention_parity.py or collectives_parity.py, says what GPUs "
    "have to get right": (*parity.PRODUCTS, *attention_parity.NAMES, *collectives_parity.NAMES),
    "OPERATIONS in tests/operations/test_primitive.py says how it is called with a small array": (
        test_primitive.OPERATIONS
    ),
}
# What is kept by the name of a kernel.
BY_KERNEL: dict[str, Any] = {
    "COMPILED in tests/helpers/support.py, or COMPILED_ELSEWHERE in tests/choice/test_register.py, says which calls "
    "are compiled": (
        *support.COMPILED,
        *COMPILED_ELSEWHERE,
    ),
    "SIMULATED in tests/helpers/simulator_kernels.py, or KERNELS in tests/simulator/test_simulator_hopper.py, says "
    "which calls are simulated": (
        *simulator_kernels.SIMULATED,
        *(kernel.function.removesuffix("_kernel") for kernel in test_simulator_hopper.KERNELS),
    ),
}
# What is kept by the names of an operation and of one of its kernels.
BY_VARIANT: dict[str, Any] = {
    "REFUSED in tests/choice/test_settings.py says which settings make no sense": {
        (operation, kernel) for operation, kernel, _ in test_settings.REFUSED
    },
}

each_operation = pytest.mark.parametrize("entry", OPERATIONS.values(), ids=OPERATIONS)


def missing(entries: Mapping[str, Operation]) -> list[str]:
    """A sentence for everything that is kept by name and lacks an operation or one of its kernels."""
    variants = [(entry, variant) for entry in entries.values() for variant in entry.variants]
    return [
        *(
            f"{place}: add an entry for {name!r}."
            for place, kept in BY_OPERATION.items()
            for name in entries
            if name not in kept
        ),
        *(
            f"{place}: add an entry for {name_of_kernel(variant)!r}, the kernel {variant.name!r} of {entry.name}."
            for place, kept in BY_KERNEL.items()
            for entry, variant in variants
            if name_of_kernel(variant) not in kept
        ),
        *(
            f"{place}: add an entry for {variant.name!r} of {entry.name!r}."
            for place, kept in BY_VARIANT.items()
            for entry, variant in variants
            if (entry.name, variant.name) not in kept
        ),
    ]


def test_nothing_is_missing() -> None:
    assert missing(OPERATIONS) == []


def test_what_is_missing_is_said() -> None:
    """Of an operation, and of a kernel, that stand nowhere else yet."""

    def ring_kernel() -> None: ...

    entry = OPERATIONS["psum"]
    (variant,) = entry.variants
    found = missing({"ppermute": dataclasses.replace(entry, name="ppermute")})
    assert len(found) == len(BY_OPERATION) + len(BY_VARIANT)
    assert found[0].startswith("TIMED in benchmarks/operations.py")
    assert all(sentence.endswith(" of 'ppermute'.") or "entry for 'ppermute'." in sentence for sentence in found)
    ring = type("Ring", (type(variant),), {"name": "ring", "kernel": staticmethod(ring_kernel)})()
    found = missing({"psum": dataclasses.replace(entry, variants=(variant, ring))})
    assert len(found) == len(BY_KERNEL) + len(BY_VARIANT)
    assert all("add an entry for 'ring'" in sentence for sentence in found)


def test_nothing_is_kept_of_what_there_is_not() -> None:
    kernels = {name_of_kernel(variant) for entry in OPERATIONS.values() for variant in entry.variants}
    assert {name for kept in BY_OPERATION.values() for name in kept} == OPERATIONS.keys()
    assert {name for kept in BY_KERNEL.values() for name in kept} == kernels
    assert all((COMPILED_TESTS / file).is_file() for file in COMPILED_ELSEWHERE.values())


@each_operation
def test_documents_have_a_place_for_its_times(entry: Operation) -> None:
    assert table.document_of(entry.name).is_file()


def test_the_table_of_operations() -> None:
    page = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    section = page[page.index("## Operations") :]
    lines = [line for line in section[: section.index("\n## ", 1)].splitlines() if line.startswith("| `")]
    wanted = []
    for entry in OPERATIONS.values():
        meaning = (entry.function.__doc__ or "").partition(", as one kernel")[0]
        kernels = ", ".join(f"`{variant.name}`" for variant in entry.variants)
        wanted.append(f"| `{entry.name}` | {meaning} | {kernels} |")
    assert lines == wanted


@each_operation
def test_its_kernels_are_in_folders_of_its_name(entry: Operation) -> None:
    """A kernel's host file and its device file have the same name, which is the kernel's in `config`."""
    for variant in entry.variants:
        assert type(variant).__module__.endswith(f".{variant.name}")


@each_operation
@pytest.mark.parametrize("world", (2, 4))
def test_its_usual_call(entry: Operation, world: int) -> None:
    """At every tiny shape the public function takes the operands of the entry, as it shards them."""
    mesh = mesh_of(world)
    for shape in entry.tiny_shapes:
        program = jax.shard_map(
            functools.partial(entry.call, axis_name="tp", implementation="xla"),
            mesh=mesh,
            in_specs=entry.in_specs("tp"),
            out_specs=entry.out_spec("tp"),
            check_vma=False,
        )
        out = jax.eval_shape(program, *entry.operands(shape, world, jnp.dtype("bfloat16")))
        assert out.dtype == "bfloat16"


@each_operation
def test_its_parameters_are_those_of_its_primitive(entry: Operation) -> None:
    """So the case at a shape is that of the call when it is lowered."""
    shape = entry.tiny_shapes[0]
    call = jax.shard_map(
        functools.partial(entry.call, axis_name="tp", implementation="fused"),
        mesh=mesh_of(2),
        in_specs=entry.in_specs("tp"),
        out_specs=entry.out_spec("tp"),
        check_vma=False,
    )
    jaxpr = jax.make_jaxpr(call)(*entry.operands(shape, 2, jnp.dtype("bfloat16"))).jaxpr
    (outer,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    seen = [eqn.params for eqn in outer.params["jaxpr"].eqns if eqn.primitive.name == entry.name]
    assert len(seen) == 1
    parameters = entry.parameters(shape, jnp.dtype("bfloat16"))
    assert parameters.items() <= seen[0].items()


@pytest.mark.parametrize(
    ("function", "flag"), ((jtf.all_gather_matmul, "return_gathered"), (jtf.decode_attention, "return_residual"))
)
def test_overloads_are_the_function(function: Callable[..., Any], flag: str) -> None:
    """They differ in the flag that says whether there are two results, and in what they return."""
    whole = inspect.signature(function)
    pair = tuple[jax.Array, jax.Array]
    found, of_several = {}, {}
    for overload in typing.get_overloads(function):
        signature = inspect.signature(overload)
        kind = signature.parameters[flag]
        if signature.parameters.get("rhs", kind).annotation == tuple[jax.Array, ...]:
            # Several rhs take some of the parameters, bias and activation as tuples as well.
            not_theirs = ("rhs_transposed", "gate", "gate_scale", "residual", "out_scale", "quantize_lhs")
            assert [name for name in whole.parameters if name not in not_theirs] == list(signature.parameters)
            of_several[kind.annotation] = signature.return_annotation, kind.default
            continue
        several = {"rhs", "rhs_scale", "bias", "activation", "out_scale"} & whole.parameters.keys()
        same = signature.replace(
            parameters=[
                whole.parameters[name] if name in several | {flag} else x for name, x in signature.parameters.items()
            ],
            return_annotation=whole.return_annotation,
        )
        assert same == whole
        out_scale = signature.parameters.get("out_scale", kind)
        if out_scale.annotation == typing.Literal["block"]:
            assert (signature.return_annotation, out_scale.default) == (pair, inspect.Parameter.empty)
            continue
        found[kind.annotation] = signature.return_annotation, kind.default
    empty = inspect.Parameter.empty
    assert found == {
        typing.Literal[False]: (jax.Array, False),
        typing.Literal[True]: (pair, empty),
        bool: (jax.Array | pair, empty),
    }
    if function is jtf.all_gather_matmul:
        each = tuple[jax.Array, ...]
        assert of_several == {
            typing.Literal[False]: (each, False),
            typing.Literal[True]: (tuple[each, jax.Array], empty),
        }
    assert whole.parameters[flag].default is False


def test_a_wrong_name_is_an_error() -> None:
    with fails(AttributeError, "ppermute"):
        _ = dataclasses.replace(OPERATIONS["psum"], name="ppermute").function
