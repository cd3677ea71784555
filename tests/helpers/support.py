"""What several test files share: the registered kernels, and how to compile them where there is no GPU."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_triton import triton_lib
from triton.backends.compiler import GPUTarget

from jaxtaxfree.ops import all_gather_matmul as gather_ops
from jaxtaxfree.ops import product, register
from jaxtaxfree.ops.operand import Operand
from jaxtaxfree.ops.shapes import MatmulShape
from jaxtaxfree.ops.variant import Choice, Variant, choose, named
from jaxtaxfree.target import target_of
from tests.helpers import compiling

TRITON_CALL = "triton_kernel_call_ffi"
SIDE_EFFECT = "has_side_effect = true"
DTYPES = ("float32", "bfloat16", "float16")
ROWS, COLUMNS = P("tp"), P(None, "tp")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # compared by identity, to be a key of a cache
class Kernel:
    """A kernel and the calls by which the tests compile it.

    Attributes:
      name: in the names of tests.
      function: what `triton.jit` made. The calls below must launch it and no other one.
      operation: of two operands, an axis name, and the keywords `implementation` and `config`.
      in_specs, out_specs: of the operands and the result on a mesh with the axis "tp".
      module: of the operation.
      benchmarks: the shapes that the benchmarks run, in global sizes.
      aligned: a shape whose sizes are multiples of all blocks.
      odd: a shape that nothing divides.
      waits: places in its source that wait for peers.
      dot: the instruction of its products for bf16 on sm_90.
      amd: what of the configuration differs on gfx942, which has a third of the shared memory.
      rhs_shape: of the second operand, if it is not [K, N].
      rhs_transposed: it is [N, K].
    """

    name: str
    function: triton.JITFunction
    operation: Callable[..., jax.Array]
    in_specs: tuple[P, ...]
    out_specs: P
    module: ModuleType
    benchmarks: tuple[MatmulShape, ...]
    aligned: MatmulShape
    odd: MatmulShape
    waits: int
    dot: str
    amd: dict[str, int]
    rhs_shape: Callable[[MatmulShape], tuple[int, int]] = lambda shape: (shape.k, shape.n)
    rhs_transposed: bool = False

    def default_config(self, shape: MatmulShape, world: int, dtype: str, compute_capability: int = 90) -> Any:
        """What the operation is to choose for this kernel, or for the other one that takes any GPU, by shape."""
        k, n = (shape.k, shape.n // world) if self.module is gather_ops else (shape.k // world, shape.n)
        on = {"world": world, "dtype": dtype, "compute_capability": compute_capability}
        on |= {"rhs_transposed": self.rhs_transposed}
        return portable_choice(self.module, product_call(self.module, shape.m, k, n, **on)).config


def product_call(
    module: ModuleType,
    rows: int,
    k: int,
    n: int,
    *,
    world: int,
    dtype: Any = "bfloat16",
    out_dtype: Any = None,
    compute_capability: int = 90,
    precision: str = "tf32",
    rhs_transposed: bool = False,
    lhs_scales: Any = "none",
    rhs_scales: Any = "none",
    rhs_dtype: Any = None,
    **form: Any,
) -> product.Call:
    """A call of the operation of a module: `rows` of all ranks, or [rows, k], by a rank's rhs [k, n]."""
    return product.Call(
        operation=module.__name__.rpartition(".")[2],
        rows=rows,
        k=k,
        n=n,
        world=world,
        lhs=Operand(dtype=np.dtype(dtype), scales=lhs_scales),
        rhs=Operand(dtype=np.dtype(rhs_dtype or dtype), transposed=rhs_transposed, scales=rhs_scales),
        out_dtype=np.dtype(out_dtype or dtype),
        target=target_of(compute_capability),
        precision=precision,
        **form,
    )


def portable_choice(module: ModuleType, call: product.Call) -> Choice:
    """What is chosen where there is no kernel for the GPU at hand."""
    others = [variant for variant in module.VARIANTS if variant.name in ("few", "portable")]
    return choose(call.operation, others, call, {})


def chosen(module: ModuleType, call: product.Call, **settings: Any) -> Choice:
    """The kernel of a call, and its configuration."""
    return choose(call.operation, module.VARIANTS, call, settings)


def by_shape(module: ModuleType, kernel: str, call: product.Call, **asked: Any) -> Any:
    """The configuration of a kernel for a call, whether or not it is taken."""
    return named(call.operation, module.VARIANTS, kernel).by_shape(call, asked)


def variant_of(module: ModuleType, config: Any) -> Variant:
    """The kernel of a configuration."""
    return next(variant for variant in module.VARIANTS if variant.Config is type(config))


# By the name of a kernel, what its tests have to know besides the register; see `Kernel`. A kernel that is added here
# gets every test of test_compiled.py.
_MANY: dict[str, Any] = {
    "waits": 2,
    "dot": "wgmma.mma_async",
    "amd": {"block_n": 128, "block_k": 32, "num_stages": 2},
}
_FEW: dict[str, Any] = {"waits": 1, "dot": "mma.sync", "amd": {"num_stages": 2}}
COMPILED: dict[str, dict[str, Any]] = {
    "all_gather_matmul": {
        "aligned": MatmulShape(name="aligned", m=4096, k=1024, n=16384),
        "odd": MatmulShape(name="odd", m=4 * 77, k=129, n=4 * 37),
        **_MANY,
    },
    "all_gather_matmul_few": {
        "aligned": MatmulShape(name="aligned", m=16, k=1024, n=16384),
        "odd": MatmulShape(name="odd", m=60, k=129, n=4 * 37),
        **_FEW,
    },
    "matmul_reduce_scatter": {
        "aligned": MatmulShape(name="aligned", m=4096, k=4096, n=4096),
        "odd": MatmulShape(name="odd", m=4 * 77, k=4 * 129, n=37),
        **_MANY,
    },
    "matmul_reduce_scatter_few": {
        "aligned": MatmulShape(name="aligned", m=16, k=4096, n=4096),
        "odd": MatmulShape(name="odd", m=60, k=4 * 129, n=37),
        **_FEW,
    },
    "matmul_all_reduce": {
        "aligned": MatmulShape(name="aligned", m=4096, k=4096, n=4096),
        "odd": MatmulShape(name="odd", m=309, k=4 * 129, n=37),
        **_MANY,
    },
}


def name_of_kernel(variant: Variant) -> str:
    """What the kernel's function is called, which several operations may share."""
    return variant.kernel.__name__.removesuffix("_kernel")


def _compiled(entry: register.Operation, variant: Variant) -> Kernel:
    few = variant.name == "few"
    return Kernel(
        name=name_of_kernel(variant),
        function=variant.kernel,
        operation=entry.function,
        in_specs=entry.in_specs("tp"),
        out_specs=entry.out_spec("tp"),
        module=sys.modules[entry.function.__module__],
        benchmarks=tuple(shape for shape in entry.shapes if (shape.m <= 256) == few),
        **COMPILED[name_of_kernel(variant)],
    )


KERNELS = tuple(
    _compiled(entry, variant)
    for entry in register.OPERATIONS.values()
    for variant in reversed(entry.variants)
    if name_of_kernel(variant) in COMPILED
)


def transposed_kernels() -> list[Kernel]:
    """Those kernels that also take [N, K] for their second operand [K, N], as they are launched then."""

    def transposed(kernel: Kernel) -> Kernel:
        lhs_spec, rhs_spec = kernel.in_specs

        return dataclasses.replace(
            kernel,
            operation=functools.partial(kernel.operation, rhs_transposed=True),
            rhs_transposed=True,
            in_specs=(lhs_spec, P(*reversed((*rhs_spec, None)[:2]))),
            rhs_shape=lambda shape: (shape.n, shape.k),
        )

    return [transposed(kernel) for kernel in KERNELS if "RHS_TRANSPOSED" in kernel.function.arg_names]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What a call compiled to.

    Attributes:
      ptx: the code.
      shared: bytes of shared memory of a block.
      source: the arguments of `triton.compiler.ASTSource`: function, signature, constants, attributes.
      options: warps and stages.
    """

    ptx: str
    shared: int
    source: tuple
    options: dict[str, int]

    @property
    def constants(self) -> dict[str, Any]:
        return self.source[2]


def whole_numbers(seed: int, *shape: int, dtype: Any = "float32", limit: int = 3) -> np.ndarray:
    """Random integers. Sums of their products are exact in f32, in any order, so results can be compared exactly."""
    return np.random.default_rng(seed).integers(-limit, limit + 1, shape).astype(jnp.dtype(dtype))


def row_parallel_operands(world: int = 4, dtype: Any = "float32", *, m: int, k: int, n: int) -> tuple:
    """lhs [m, world * k] and rhs [world * k, n], so small that partial sums are exact in bf16."""
    limit = 1 if dtype == "bfloat16" else 3
    return (
        whole_numbers(0, m, world * k, dtype=dtype, limit=limit),
        whole_numbers(1, world * k, n, dtype=dtype, limit=limit),
    )


def row_parallel_shapes(mesh: Mesh, dtype: Any = "bfloat16", m: int = 64, k: int = 256, n: int = 128) -> tuple:
    """Such operands for lowering."""
    return sharded(mesh, COLUMNS, (m, k), dtype), sharded(mesh, ROWS, (k, n), dtype)


def exact_product(lhs: Any, rhs: Any, dtype: Any) -> np.ndarray:
    """The product, rounded once."""
    return (np.asarray(lhs, np.float64) @ np.asarray(rhs, np.float64)).astype(jnp.dtype(dtype))


def fails(error: type[Exception], *parts: str) -> Any:
    """Expects an error whose message has these parts."""
    return pytest.raises(error, check=lambda e: all(part in str(e) for part in parts) or pytest.fail(f"says: {e}"))


COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "collective_permute")


def assert_fused(text: str, calls: int = 1) -> None:
    """A program has so many kernels, and no collective of XLA's."""
    assert text.count(TRITON_CALL) == calls
    assert [name for name in COLLECTIVES if f"stablehlo.{name}" in text] == []


def assert_not_fused(text: str, collective: str = "all_gather") -> None:
    assert TRITON_CALL not in text
    assert f"stablehlo.{collective}" in text


def mesh_of(world: int, axis_name: str = "tp") -> Mesh:
    return Mesh(np.array(jax.devices("cpu")[:world]), (axis_name,))


def lower_for_cuda(function: Callable, *operands: Any, platforms: tuple[str, ...] = ("cuda",)) -> str:
    """The program of a function of `operands` (arrays or their shapes) for platforms that need not be there."""
    return jax.jit(function).trace(*operands).lower(lowering_platforms=platforms).as_text()


def one_program(function: Callable, **keywords: Any) -> Callable:
    """`jax.shard_map` inside of `jax.jit`; without that XLA compiles each operation by itself, which takes long."""
    return jax.jit(jax.shard_map(function, **keywords))


def soak(*cases: Any) -> list[Any]:
    """Cases of several parameters each that run in the soak alone."""
    return [pytest.param(*case, marks=pytest.mark.soak) for case in cases]


def sharded(mesh: Mesh, spec: P, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


@functools.cache
def compile_for_cuda(
    kernel: Kernel,
    shape: MatmulShape,
    dtype: str = "bfloat16",
    *,
    world: int = 4,
    compute_capability: int = 90,
    precision: str | None = None,
    amd: bool = False,
) -> Compiled:
    """Compiles a kernel as the operation's lowering does, for a GPU that need not be there.

    Args:
      kernel, shape, dtype, world: the call.
      compute_capability: 90 for sm_90.
      precision: as in `jnp.matmul`.
      amd: take the configuration for gfx942.
    """
    mesh = mesh_of(world)
    # Some operations would choose another kernel, which is for one kind of GPU alone.
    config = kernel.default_config(shape, world, dtype, compute_capability)
    if amd:
        config = dataclasses.replace(config, **kernel.amd)

    def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return kernel.operation(lhs, rhs, "tp", implementation="fused", config=config, precision=precision)

    operands = (
        sharded(mesh, kernel.in_specs[0], (shape.m, shape.k), dtype),
        sharded(mesh, kernel.in_specs[1], kernel.rhs_shape(shape), dtype),
    )
    program = jax.shard_map(call, mesh=mesh, in_specs=kernel.in_specs, out_specs=kernel.out_specs)
    return compile_call(kernel.function, program, *operands, compute_capability=compute_capability)


def compile_call(function: triton.JITFunction, program: Callable, *operands: Any, compute_capability: int) -> Compiled:
    """Compiles the one kernel that a program of `operands` (arrays or their shapes) launches.

    Args:
      function: the kernel that it must be.
      compute_capability: 90 for sm_90.
    """
    with pytest.MonkeyPatch.context() as patch:
        sources, binaries = _watch_jax_triton(patch)
        patch.setenv("JAXTAXFREE_COMPUTE_CAPABILITY", str(compute_capability))
        # jax-triton would not compile again what it has compiled for another test.
        patch.setattr(function, "_jT_kernel_cache", {}, raising=False)
        lower_for_cuda(program, *operands)
    (source,), ((binary, options),) = sources, binaries
    assert source[0] is function, f"launches {source[0].fn.__name__}"
    return Compiled(
        binary.binary,
        binary.shared_mem_bytes,
        source,
        {"num_warps": options.num_warps, "num_stages": options.num_stages},
    )


def compile_for_amd(call: Compiled, architecture: str = "gfx942") -> Any:
    """Compiles the kernel of a call for an AMD GPU, with the signature that its operation gives it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        return triton.compile(
            triton.compiler.ASTSource(*call.source), target=GPUTarget("hip", architecture, 64), options=call.options
        )


def _code_of(result: Any) -> Any:
    return dataclasses.replace(result, ttgir="", llir="")  # which are large


def _watch_jax_triton(patch: pytest.MonkeyPatch) -> tuple[list[tuple], list[tuple[Any, Any]]]:
    """The sources that jax-triton compiles from now on, and (result, options) of each."""
    sources: list[tuple] = []
    binaries: list[tuple[Any, Any]] = []
    to_ptx = triton_lib.compile_ttir_to_ptx_inplace

    class Source(triton_lib.tc.ASTSource):
        def __init__(self, *arguments: Any):
            sources.append(arguments)
            super().__init__(*arguments)

    def compile_to_ptx(ttir: Any, backend: Any, options: Any, *rest: Any) -> Any:
        compiled = functools.partial(to_ptx, ttir, backend, options, *rest)
        result = compiling.once(lambda: _code_of(compiled()), str(ttir), options, *rest)
        binaries.append((result, options))
        return result

    patch.setattr(triton_lib.tc, "ASTSource", Source)
    patch.setattr(triton_lib, "compile_ttir_to_ptx_inplace", compile_to_ptx)
    return sources, binaries
