"""What this library takes of JAX that JAX does not promise to keep, and one sentence if some of it is gone."""

import importlib
from collections.abc import Mapping

import jax

# All that modules import from `jax._src` as they are imported (a test compares).
NAMES: Mapping[str, tuple[str, ...]] = {
    "jax._src": ("distributed", "source_info_util"),
    "jax._src.core": (
        "Jaxpr", "NamedAxisEffect", "ShapedArray", "ShardingTypeError", "get_axis_env", "jaxprs_in_params", "trace_ctx",
    ),
    "jax._src.dispatch": ("apply_primitive", "prim_requires_devices_during_lowering"),
    "jax._src.lax.lax": ("_convert_element_type",),
    "jax._src.lib": ("version",),
    "jax._src.sharding_impls": (
        "SPMDAxisContext", "ShardingContext", "UnspecifiedValue", "_internal_use_concrete_mesh",
    ),
    "jax._src.util": ("weakref_lru_cache",),
}  # fmt: skip


def check() -> None:
    """Raises ImportError with all that this JAX does not have."""
    if missing := [f"{module}.{name}" for module, names in NAMES.items() for name in names if not _has(module, name)]:
        raise ImportError(
            f"jaxtaxfree does not know JAX {jax.__version__}, which has no {', '.join(missing)}: install an older one, "
            "such as pip install 'jax==0.12.0', or a newer jaxtaxfree."
        )


def _has(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True
