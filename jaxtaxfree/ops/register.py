"""The operations of the library, each as one entry: over them tests, benchmarks, tuning and `taxes` loop.

To add an operation is to write its folder, its kernels, and one entry here. What a test or a benchmark has to know
besides (how a peer is called, which small shapes meet all branches of a kernel) it keeps by the name of the operation;
`tests/choice/test_register.py` says where an entry is missing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import jaxtaxfree
from jaxtaxfree.dispatch import Case
from jaxtaxfree.ops import all_gather_matmul, collectives, decode_attention, matmul_all_reduce, matmul_reduce_scatter
from jaxtaxfree.ops.all_gather_matmul import shapes as gather_shapes
from jaxtaxfree.ops.collectives import shapes as collective_shapes
from jaxtaxfree.ops.decode_attention import shapes as attention_shapes
from jaxtaxfree.ops.decode_attention.spec import Spec
from jaxtaxfree.ops.matmul_all_reduce import shapes as reduce_shapes
from jaxtaxfree.ops.matmul_reduce_scatter import shapes as scatter_shapes
from jaxtaxfree.ops.shapes import AttentionShape, CollectiveShape, MatmulShape
from jaxtaxfree.ops.variant import Variant
from jaxtaxfree.teams import Team

Types = tuple[jax.ShapeDtypeStruct, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation, and its usual call: that of a listed shape.

    Attributes:
      name: of the public function in `jaxtaxfree`, and in tables, results and errors.
      reference: what the operation means in plain `lax`, of the operands and parameters of its primitive.
      variants: its kernels.
      case: what the tables know a call by, of the operands' types, `team`, and the parameters of its primitive.
      parameters: (shape, dtype) -> the parameters of the primitive in the usual call.
      operands: (shape, world, dtype) -> the types of the operands, whole, before they are sharded.
      sharded: of each operand the dimension that is sharded; None if every rank has the whole of it.
      result_sharded: the same of the result.
      shapes: where it is tested, tuned and timed.
      tiny_shapes: the same without a GPU.
      named: of the last operands of the usual call, the keywords by which the public function takes them.
      keywords: what else the usual call says.
    """

    name: str
    reference: Callable[..., Any]
    variants: tuple[Variant[Any], ...]
    case: Callable[..., Case | None]
    parameters: Callable[[Any, np.dtype], dict[str, Any]]
    operands: Callable[[Any, int, np.dtype], Types]
    sharded: tuple[int | None, ...]
    result_sharded: int | None
    shapes: tuple[Any, ...]
    tiny_shapes: tuple[Any, ...]
    named: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        return getattr(jaxtaxfree, self.name)

    def call(self, *operands: Any, axis_name: str, **keywords: Any) -> Any:
        """The usual call of the public function, in `jax.shard_map`; `keywords` are `implementation` and `config`."""
        first = len(operands) - len(self.named)
        named = dict(zip(self.named, operands[first:]))
        return self.function(*operands[:first], axis_name=axis_name, **named, **self.keywords, **keywords)

    def in_specs(self, axis_name: str) -> tuple[PartitionSpec, ...]:
        """Of the operands in `jax.shard_map`."""
        return tuple(_spec(dimension, axis_name) for dimension in self.sharded)

    def out_spec(self, axis_name: str) -> PartitionSpec:
        """Of the result."""
        return _spec(self.result_sharded, axis_name)

    def case_at(self, shape: Any, team: Team, dtype: Any) -> Case:
        """The usual call at a shape, as the tables know it."""
        dtype = jnp.dtype(dtype)
        whole = self.operands(shape, team.world, dtype)
        local = [_part(x, dimension, team.world) for x, dimension in zip(whole, self.sharded, strict=True)]
        case = self.case(*local, team=team, **self.parameters(shape, dtype))
        assert case is not None, f"the tables do not know the usual call of {self.name}"
        return case


def _spec(dimension: int | None, axis_name: str) -> PartitionSpec:
    return PartitionSpec() if dimension is None else PartitionSpec(*[None] * dimension, axis_name)


def _part(x: jax.ShapeDtypeStruct, dimension: int | None, world: int) -> jax.ShapeDtypeStruct:
    """What a rank has of an operand."""
    sizes = [size // world if i == dimension else size for i, size in enumerate(x.shape)]
    return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)


def _product(name: str, module: ModuleType, shapes: ModuleType, along: str | None = None, **sharded: Any) -> Operation:
    """lhs [M, K] and rhs [K, N]; `along` is the parameter that says which dimension is gathered or scattered: rows."""
    rows = {along: 0} if along else {}

    def operands(shape: MatmulShape, world: int, dtype: np.dtype) -> Types:
        del world
        return jax.ShapeDtypeStruct((shape.m, shape.k), dtype), jax.ShapeDtypeStruct((shape.k, shape.n), dtype)

    return Operation(
        name=name,
        reference=module.reference,
        variants=module.VARIANTS,
        case=module.case,
        parameters=lambda shape, dtype: {"precision": None, "preferred_element_type": None, **rows},
        operands=operands,
        shapes=shapes.SHAPES,
        tiny_shapes=shapes.TINY_SHAPES,
        **sharded,
    )


def _attention_operands(shape: AttentionShape, world: int, dtype: np.dtype) -> Types:
    """query [B, 1, N, H], key and value [B, world * S, K, H], lengths [B]."""
    cache = jax.ShapeDtypeStruct((shape.b, world * shape.s, shape.kv_heads, shape.h), dtype)
    lengths = jax.ShapeDtypeStruct((shape.b,), np.dtype(np.int32))
    return jax.ShapeDtypeStruct((shape.b, 1, shape.n, shape.h), dtype), cache, cache, lengths


def _attention_parameters(shape: AttentionShape, dtype: np.dtype) -> dict[str, Any]:
    spec = Spec.usual(slots=shape.s, kv_heads=shape.kv_heads, head_size=shape.h, dtype=dtype)
    return {"names": ("query", "key", "value", "lengths"), "spec": spec}


def _collective(name: str, result_sharded: int | None, **keywords: Any) -> Operation:
    """x of one dimension, of as many bytes a rank as the shape says; where it is scattered, those of a part."""

    def operands(shape: CollectiveShape, world: int, dtype: np.dtype) -> Types:
        parts = world if result_sharded is not None else 1
        return (jax.ShapeDtypeStruct((world * parts * shape.nbytes // dtype.itemsize,), dtype),)

    return Operation(
        name=name,
        keywords=keywords,
        reference=collectives.REFERENCES[name],
        variants=collectives.VARIANTS[name],
        case=partial(collectives.case, name),
        parameters=lambda shape, dtype: {},
        operands=operands,
        sharded=(0,),
        result_sharded=result_sharded,
        shapes=collective_shapes.SHAPES,
        tiny_shapes=collective_shapes.TINY_SHAPES,
    )


OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        _product("all_gather_matmul", all_gather_matmul, gather_shapes, "axis", sharded=(0, 1), result_sharded=1),
        _product(
            "matmul_reduce_scatter",
            matmul_reduce_scatter,
            scatter_shapes,
            "scatter_dimension",
            sharded=(1, 0),
            result_sharded=0,
        ),
        _product("matmul_all_reduce", matmul_all_reduce, reduce_shapes, sharded=(1, 0), result_sharded=None),
        Operation(
            name="decode_attention",
            named=("key_value_seq_lengths",),
            reference=decode_attention.reference,
            variants=decode_attention.VARIANTS,
            case=decode_attention.case,
            parameters=_attention_parameters,
            operands=_attention_operands,
            sharded=(None, 1, 1, None),
            result_sharded=None,
            shapes=attention_shapes.SHAPES,
            tiny_shapes=attention_shapes.TINY_SHAPES,
        ),
        _collective("psum", None),
        _collective("all_gather", None, tiled=True),
        _collective("psum_scatter", 0, tiled=True),
        _collective("all_to_all", 0, tiled=True, split_axis=0, concat_axis=0),
    )
}
