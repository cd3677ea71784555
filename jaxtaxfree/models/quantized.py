"""Weights of 8 bits with scales, as checkpoints have them, and how they become wider ones."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxtaxfree.models.errors import ModelError
from jaxtaxfree.models.fields import Fields

NARROW = {np.dtype(x) for x in (np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)}
# What the name of a weight's scales ends with: of compressed-tensors, and of DeepSeek's blocks. Both multiply.
SCALES = ("_scale", "_scale_inv")
# Tensors beside the weights that are not read, because activations and the cache keep their 16 bits.
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".q_scale", ".weight_shape")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a checkpoint's 8-bit weights are stored.

    Attributes:
      method: its `quant_method`.
      block: rows and columns of a weight that share a scale, if blocks do.
    """

    method: str
    block: tuple[int, int] | None = None


def quantization_of(values: Mapping[str, Any] | None, wrong: list[str]) -> Quantization | None:
    """What a `quantization_config` says; what is wrong with it is appended to `wrong`."""
    if values is None:
        return None
    fields = Fields(values, "quantization_config")
    method = fields.take("quant_method", str)
    try:
        if method == "fp8":
            return _block_scales(fields)
        if method == "compressed-tensors":
            return _compressed_tensors(fields)
    except ModelError as error:
        wrong.append(str(error).rstrip("."))
        return None
    wrong.append(f"quant_method={method!r} is not supported (one of compressed-tensors, fp8)")
    return None


def _block_scales(fields: Fields) -> Quantization:
    """As DeepSeek and Qwen publish theirs."""
    fields.only("fmt", "e4m3", why="other formats are not read")
    fields.only("activation_scheme", "dynamic", "static", why="activations have 16 bits here, whatever it says")
    fields.only("scale_fmt", None, "float", why="scales are floats")
    # Which weights they are is seen by their dtypes.
    fields.take("modules_to_not_convert", list, None)
    fields.take("ignored_layers", list, None)
    block = fields.take("weight_block_size", list, None)
    fields.finish()
    return Quantization(method="fp8", block=tuple(block) if block else None)  # pyrefly: ignore[bad-argument-type]


def _compressed_tensors(fields: Fields) -> Quantization:
    fields.only(
        "format", "int-quantized", "float-quantized", "naive-quantized", why="weights are stored in another way"
    )
    for name in ("ignore", "kv_cache_scheme", "quantization_status", "global_compression_ratio", "version"):
        fields.take(name, object, None)  # seen by the tensors, or of the cache, or how it was made
    fields.only("sparsity_config", {}, {"format": "dense"}, why="sparse weights are stored in another way")
    fields.only("transform_config", {}, why="activations would have to be transformed")
    block = None
    for name, group in fields.take("config_groups", dict, {}).items():
        of_weights = dict((group or {}).get("weights") or {})
        inner = Fields(of_weights, f"config_groups.{name}.weights")
        inner.only("num_bits", 8, why="8 bits only")
        inner.only("type", "int", "float", why="numbers of another kind")
        inner.only("symmetric", True, why="there would be zero points")
        inner.only("strategy", "tensor", "channel", "block", "group", why="scales of another shape")
        for other in ("dynamic", "observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"):
            inner.take(other, object, None)  # how they were made
        structure = inner.take("block_structure", object, None)
        size = inner.take("group_size", int, None)
        inner.finish()
        if isinstance(structure, str):
            structure = [int(part) for part in structure.split("x")]
        if structure:
            block = tuple(structure)
        elif size and size > 0:
            block = (1, size)
    fields.finish()
    return Quantization(method="compressed-tensors", block=block)  # pyrefly: ignore[bad-argument-type]


def widen(x: np.ndarray) -> np.ndarray:
    """8-bit numbers as f32."""
    table = np.arange(256, dtype=np.uint8).view(x.dtype).astype(np.float32)
    return table[x.view(np.uint8)]


def dequantized(
    part: np.ndarray, scales: np.ndarray, shape: tuple[int, int], rows: slice, columns: slice, quantization: Any
) -> np.ndarray:
    """A part of a weight of 8 bits, in f32.

    Args:
      part: `[rows, columns]` of a weight [out, in].
      scales: all of them: of one number, [out], [out, 1], or [out / block, in / block], rounded up.
      shape: of the whole weight.
      rows, columns: where the part lies.
      quantization: says how large a block is, if blocks have scales.

    Raises:
      ValueError: if the scales do not fit.
    """
    scales = np.asarray(scales, np.float32)
    wide = widen(part)
    if scales.size == 1:
        return wide * scales.reshape(())
    if scales.shape in ((shape[0],), (shape[0], 1)):
        return wide * scales.reshape(-1, 1)[rows]
    block = quantization.block if quantization else None
    if block and scales.shape == (-(-shape[0] // block[0]), -(-shape[1] // block[1])):
        down, across = (np.arange(at.start, at.stop) // size for at, size in zip((rows, columns), block))
        return wide * scales[down][:, across]
    raise ValueError(f"scales {list(scales.shape)} do not fit a weight {list(shape)} with blocks of {block}")


def is_narrow(dtype: np.dtype) -> bool:
    """Whether numbers of this dtype need a scale."""
    return dtype in NARROW
