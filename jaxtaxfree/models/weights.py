"""Weights from a checkpoint's files to their devices, part by part, in the layout of `decode_step`."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtaxfree.models.checkpoint import Checkpoint, Tensor
from jaxtaxfree.models.config import ModelConfig
from jaxtaxfree.models.errors import ModelError
from jaxtaxfree.models.quantized import SCALES, UNUSED, dequantized, is_narrow
from jaxtaxfree.ops.decode_step.spec import DecoderSpec
from jaxtaxfree.ops.quantize import BLOCK, quantize

# Bytes of a weight, of all ranks together, that are on the host at a time: some layers, or some rows of one.
AT_A_TIME = 64 << 20

_ATTENTION = {
    f"{x}_{kind}": f"self_attn.{x}_proj.{of}" for x in "qkv" for kind, of in (("proj", "weight"), ("bias", "bias"))
}
_NAMES = _ATTENTION | {
    "o_proj": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}
_AROUND_BLOCKS = {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
_EXPERTS = {f"{x}_proj": f"mlp.experts.{{expert}}.{x}_proj.weight" for x in ("gate", "up", "down")}
_EXPERTS |= {"router": "mlp.gate.weight"}
_MIXTRAL = {
    f"{x}_proj": f"block_sparse_moe.experts.{{expert}}.{w}.weight"
    for x, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
} | {"router": "block_sparse_moe.gate.weight"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model lies on its devices.

    Attributes:
      spec: of the whole model as its checkpoint has it.
      copies: how many neighbours each key/value head becomes, so that the ranks divide them.
      vocab: rows of the embedding with those behind its end, so that the ranks divide it.
      by_heads: whether a rank has some of the key/value heads, or all.
      eight: the dtype of 8 bits in which the matrices of layers lie, with a scale for each row, or for each block if
        the checkpoint has them so; None: as the rest.
    """

    spec: DecoderSpec
    copies: int
    vocab: int
    by_heads: bool
    eight: np.dtype | None = None

    @property
    def matrices(self) -> tuple[str, ...]:
        """Those that lie in 8 bits, all of [L, out, in]."""
        mlp = () if self.spec.experts else ("gate_proj", "up_proj", "down_proj")
        return ("q_proj", "k_proj", "v_proj", "o_proj", *mlp) if self.eight else ()

    @property
    def model(self) -> DecoderSpec:
        """The spec of what runs."""
        return dataclasses.replace(self.spec, kv_heads=self.spec.kv_heads * self.copies, vocab=self.vocab)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, the embedding included, of all ranks together."""
        shapes = {"embed": (self.vocab, self.spec.d_model)} | self.model.param_shapes()
        return shapes | {f"{name}_scale": (*shapes[name][:2], 1) for name in self.matrices}

    def partition(self, axis: Any) -> dict[str, P]:
        """How the ranks share each parameter."""
        specs = {"embed": P(axis)} | self.model.partition_specs(axis, self.by_heads)
        of_rows = {name: specs[name][1] if len(specs[name]) > 1 else None for name in self.matrices}
        return specs | {f"{name}_scale": P(None, of) if of else P() for name, of in of_rows.items()}


def layout_of(config: ModelConfig, world: int, cache: str | None) -> Layout:
    """How the model lies on its ranks; raises ModelError if they do not divide it."""
    spec = config.spec
    sizes = {"num_attention_heads": spec.heads}
    sizes["moe_intermediate_size" if config.family == "qwen3_moe" else "intermediate_size"] = spec.d_mlp
    if wrong := [f"{name}={size}" for name, size in sizes.items() if size % world]:
        raise ModelError(f"{world} ranks do not divide {' and '.join(wrong)}: take fewer.")
    divides, repeats = spec.kv_heads % world == 0, world % spec.kv_heads == 0
    by_heads = divides or repeats if cache is None else cache == "heads"
    if by_heads and not (divides or repeats):
        raise ModelError(
            f"{world} ranks and num_key_value_heads={spec.kv_heads} do not divide each other: take cache='sequence'."
        )
    copies = 1 if divides or not by_heads else world // spec.kv_heads
    return Layout(spec=spec, copies=copies, vocab=spec.vocab + -spec.vocab % world, by_heads=by_heads)


def is_whole_step(spec: DecoderSpec, by_heads: bool) -> bool:
    """Whether `decode_step` covers a model with such a cache; else a step is made of operations."""
    return not spec.experts and (by_heads or len(set(spec.windows)) == 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where a parameter comes from.

    Attributes:
      tensors: one for each layer, or each layer and expert, or the one.
      lead: the dimensions that stack them, (), [L] or [L, E].
      shape: of one of them, as it is to be.
      head: rows of a head if heads are copied, else 0.
      copies: of each head.
      transposed: whether `shape` is that of the tensor, transposed.
    """

    tensors: tuple[Tensor, ...]
    lead: tuple[int, ...]
    shape: tuple[int, ...]
    head: int = 0
    copies: int = 1
    transposed: bool = False


class Weights:
    """All that a checkpoint's parameters come from.

    Raises:
      ModelError: with all tensors that are missing, have another shape, or are there and belong to nothing.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, layout: Layout):
        self.checkpoint, self.config, self.layout = checkpoint, config, layout
        self._prefix = next(
            (prefix for prefix in config.prefix if f"{prefix}embed_tokens.weight" in checkpoint.tensors),
            config.prefix[0],
        )
        self._used: set[str] = set()
        self._wrong: list[str] = []
        self._shapes = layout.spec.param_shapes()
        self.sources = {
            name: self._source(name, shape)
            for name, shape in layout.shapes().items()
            if name.removesuffix("_scale") not in layout.matrices or name in layout.matrices
        }
        self._finish()

    def _names(self, name: str, lead: tuple[int, ...]) -> list[str]:
        """The tensors of a parameter."""
        if name == "embed":
            return [f"{self._prefix}embed_tokens.weight"]
        if name == "unembed":
            of_text = self._prefix.removesuffix("model.") if self._prefix.startswith("language_model.") else ""
            return [f"{of_text}lm_head.weight"]
        if name == "final_norm":
            return [f"{self._prefix}norm.weight"]
        names = _NAMES
        if self.layout.spec.post_norms:
            names = names | _AROUND_BLOCKS
        if self.layout.spec.experts:
            names = names | (_MIXTRAL if self.config.family == "mixtral" else _EXPERTS)
        layers = range(lead[0])
        experts = range(lead[1]) if len(lead) > 1 else [0]
        return [
            f"{self._prefix}layers.{layer}.{names[name].format(expert=expert)}"
            for layer, expert in itertools.product(layers, experts)
        ]

    def _source(self, name: str, shape: tuple[int, ...]) -> Source:
        spec = self.layout.spec
        stored = self._shapes.get(name, (spec.vocab, spec.d_model))
        depth = {"embed": 0, "unembed": 0, "final_norm": 0}.get(name, 1)
        if spec.experts and name in ("gate_proj", "up_proj", "down_proj"):
            depth = 2
        # An expert's weights are [in, out] where they are multiplied, and [out, in] in the file.
        lead, wanted, transposed = shape[:depth], stored[depth:], depth == 2
        wanted, found = wanted[::-1] if transposed else wanted, []
        for of in self._names(name, lead):
            self._used.add(of)
            tensor = self.checkpoint.tensors.get(of)
            if tensor is None:
                self._wrong.append(f"{of} is missing")
            elif tensor.shape != wanted:
                self._wrong.append(f"{of} is {list(tensor.shape)} and should be {list(wanted)}")
            else:
                found.append(tensor)
                self._check_dtype(tensor)
        copied = self.layout.copies > 1 and name in ("k_proj", "v_proj", "k_bias", "v_bias")
        head = spec.head_dim if copied else 0
        of_heads = {"head": head, "copies": self.layout.copies}
        return Source(tensors=tuple(found), lead=lead, shape=shape[depth:], transposed=transposed, **of_heads)

    def _check_dtype(self, tensor: Tensor) -> None:
        name = tensor.name
        if is_narrow(tensor.dtype):
            scale = self._scale_of(name)
            if scale is None:
                self._wrong.append(
                    f"{name} is {tensor.dtype} without scales {' or '.join(name + end for end in SCALES)}"
                )
            else:
                self._used.add(scale)
        elif tensor.dtype.kind not in "fV" or tensor.dtype.itemsize not in (2, 4):
            self._wrong.append(
                f"{name} is {tensor.dtype}, which no weight can be (int4 and other packed ones are not read)"
            )

    def _scale_of(self, name: str) -> str | None:
        return next((name + end for end in SCALES if name + end in self.checkpoint.tensors), None)

    def _finish(self) -> None:
        skipped = tuple(beginning for beginning, _ in self.config.skipped)
        tied = (
            ("lm_head.weight", "language_model.lm_head.weight") if self.layout.spec.tied else ()
        )  # the embedding again
        extra = [
            name
            for name in self.checkpoint.tensors
            if name not in self._used
            and not name.startswith(skipped or "\0")
            and not name.endswith((*UNUSED, "rotary_emb.inv_freq"))
            and name not in tied
        ]
        self._wrong += [f"{name} belongs to nothing in the model" for name in extra]
        if self._wrong:
            more = f"; and {len(self._wrong) - 5} more" if len(self._wrong) > 5 else ""
            folder, family = self.checkpoint.folder, self.config.family
            raise ModelError(f"{folder} is no checkpoint of this {family}: {'; '.join(self._wrong[:5])}{more}.")

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(tensor.nbytes for source in self.sources.values() for tensor in source.tensors)

    def _read(
        self, source: Source, tensor: Tensor, index: tuple[slice, ...], dtype: np.dtype, of: str = "weights"
    ) -> np.ndarray:
        """A part of one tensor, as it is to be; or of the scales of its rows, [rows, 1], or of its blocks."""
        at = tuple(slice(*each.indices(size)) for each, size in zip(index, source.shape))
        if of == "blocks":
            return self._scales_of(tensor)[at].astype(dtype)
        at = at[::-1] if source.transposed else at
        rows = np.arange(at[0].start, at[0].stop)
        if source.head:  # of neighbouring copies, those of one head
            rows = rows // (source.head * source.copies) * source.head + rows % source.head
        behind = int(np.sum(rows >= tensor.shape[0]))  # the vocabulary's end
        rows = rows[: len(rows) - behind]
        first, last = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
        if of == "scales":
            scales = self._scales_of(tensor)
            return np.broadcast_to(scales.reshape(-1, 1), (tensor.shape[0], 1))[rows].astype(dtype)
        part = tensor.read((slice(first, last), *at[1:]))
        if is_narrow(tensor.dtype) and tensor.dtype != dtype:
            scales = self._scales_of(tensor)
            shape = (tensor.shape[0], tensor.shape[1])
            try:
                part = dequantized(part, scales, shape, slice(first, last), at[1], self.config.quantization)
            except ValueError as error:
                raise ModelError(f"{self.checkpoint.folder} has {tensor.name} in 8 bits, but its {error}.") from None
        if source.head:
            part = part[rows - first]
        if behind:
            part = np.pad(part, [(0, behind)] + [(0, 0)] * (part.ndim - 1))
        return (part.T if source.transposed else part).astype(dtype, copy=False)

    def _scales_of(self, tensor: Tensor) -> np.ndarray:
        return np.asarray(self.checkpoint.tensors[self._scale_of(tensor.name) or ""].read(), np.float32)

    def _is_stored_so(self, source: Source) -> bool:
        """Whether the file has the matrix in the same 8 bits, with one scale of each row, or of all."""
        return all(
            tensor.dtype == self.layout.eight
            and self._scales_of(tensor).shape in ((), (1,), (1, 1), tensor.shape[:1], (tensor.shape[0], 1))
            for tensor in source.tensors
        )

    def _has_blocks(self, source: Source, sharding: NamedSharding) -> bool:
        """Whether the file has the matrix in the same 8 bits, in blocks as products take them, none on two devices."""
        quantization = self.config.quantization
        own = sharding.shard_shape((1, *source.shape))[1:]
        return (
            quantization is not None
            and quantization.block == (BLOCK, BLOCK)
            and not source.head
            and not any(size % BLOCK for size in own)
            and all(
                tensor.dtype == self.layout.eight
                and self._scales_of(tensor).shape == tuple(size // BLOCK for size in tensor.shape)
                for tensor in source.tensors
            )
        )

    def place(
        self, mesh: Mesh, axis: Any, dtype: np.dtype, progress: Callable[[int], None] | None = None
    ) -> dict[str, jax.Array]:
        """The parameters on their devices. Of one at most AT_A_TIME bytes are on the host at a time.

        Args:
          progress: is told of the bytes that were read since it was told last.
        """
        specs = self.layout.partition(axis)
        params = {}
        tell = progress or (lambda _: None)
        for name, source in self.sources.items():
            sharding = NamedSharding(mesh, specs[name])
            if name not in self.layout.matrices:
                params[name] = self._place(source, sharding, dtype, tell)
                continue
            of_scales = NamedSharding(mesh, specs[f"{name}_scale"])
            params[name], params[f"{name}_scale"] = self._place_in_eight(source, sharding, of_scales, dtype, tell)
        return params

    def _place_in_eight(
        self,
        source: Source,
        sharding: NamedSharding,
        of_scales: NamedSharding,
        dtype: np.dtype,
        progress: Callable[[int], None],
    ) -> tuple[jax.Array, jax.Array]:
        """A matrix in 8 bits and the scales of its rows or blocks: as they are stored, or rounded on the devices."""
        eight = self.layout.eight
        assert eight is not None
        if self._is_stored_so(source):
            scales = dataclasses.replace(source, shape=(source.shape[0], 1))
            values = self._place(source, sharding, eight, progress)
            return values, self._place(scales, of_scales, np.dtype(np.float32), lambda _: None, "scales")
        if self._has_blocks(source, sharding):
            scales = dataclasses.replace(source, shape=tuple(size // BLOCK for size in source.shape))
            values = self._place(source, sharding, eight, progress)
            return values, self._place(scales, sharding, np.dtype(np.float32), lambda _: None, "blocks")
        if any(is_narrow(tensor.dtype) for tensor in source.tensors):
            dtype = np.dtype(np.float32)  # not rounded once more in between
        wide = NamedSharding(sharding.mesh, sharding.spec)
        made, count = [], len(source.tensors)
        step = max(1, AT_A_TIME // (math.prod(source.shape) * dtype.itemsize))
        for first in range(0, count, step):
            last = min(count, first + step)
            piece = dataclasses.replace(source, tensors=source.tensors[first:last], lead=(last - first,))
            made.append(_in_eight(self._place(piece, wide, dtype, progress), eight, sharding, of_scales))
        if len(made) == 1:
            return made[0]
        values, scales = zip(*made, strict=True)
        return _joined(values, sharding), _joined(scales, of_scales)

    def _place(
        self,
        source: Source,
        sharding: NamedSharding,
        dtype: np.dtype,
        progress: Callable[[int], None],
        of: str = "weights",
    ) -> jax.Array:
        count, depth = len(source.tensors), len(source.lead)
        shape = (count, *source.shape) if depth else source.shape
        spec = P(*(sharding.spec[depth - 1 :] if depth else sharding.spec))
        flat = NamedSharding(sharding.mesh, spec)
        lead = min(depth, 1)
        rows = flat.shard_shape(shape)[lead]  # of a device
        pieces = list(_pieces(count, rows, math.prod(source.shape) * dtype.itemsize))
        buffer = None if len(pieces) == 1 else _zeros(shape, dtype, flat)
        for first, last, begin, end in pieces:
            tensors = source.tensors[first:last]

            def part(index: tuple[slice, ...] | None, tensors: Any = tensors, at: Any = (begin, end)) -> np.ndarray:
                inner = list(index or ())[lead:]
                begin, end = at
                own = (inner[0].start or 0) // (end - begin) * rows  # where the device's rows begin
                inner[0] = slice(own + begin, own + end)
                read = [self._read(source, tensor, tuple(inner), dtype, of) for tensor in tensors]
                return np.stack(read) if depth else read[0]

            of_rows = source.shape[0] // rows * (end - begin)
            of_piece = (last - first, of_rows, *source.shape[1:])[1 - lead :]
            made = jax.make_array_from_callback(of_piece, flat, part, dtype=dtype)
            buffer = made if buffer is None else _putter(flat)(buffer, made, *(first, begin)[1 - lead :])
            # Not before it has arrived are the host's bytes free for the next one.
            jax.block_until_ready(buffer)
            self.checkpoint.forget()
            nbytes = sum(tensor.nbytes for tensor in tensors)
            progress(nbytes * end // rows - nbytes * begin // rows)
        assert buffer is not None
        return buffer if depth < 2 else _unflatten(buffer, (*source.lead, *source.shape), sharding)


def _pieces(count: int, rows: int, nbytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Parts of `count` tensors of `nbytes` each: the first and last tensor, and the first and last row on a device."""
    if nbytes > AT_A_TIME:
        step = max(1, rows * AT_A_TIME // nbytes)
        return ((i, i + 1, at, min(rows, at + step)) for i in range(count) for at in range(0, rows, step))
    step = max(1, AT_A_TIME // max(1, nbytes))
    return ((first, min(count, first + step), 0, rows) for first in range(0, count, step))


def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> jax.Array:
    return jax.jit(lambda: jax.numpy.zeros(shape, dtype), out_shardings=sharding)()


@functools.cache
def _putter(sharding: NamedSharding) -> Callable[..., jax.Array]:
    """(buffer, piece, where it lies in the first dimensions of each device's part) -> the buffer with it."""

    def put(buffer: jax.Array, piece: jax.Array, *at: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(buffer, piece, (*at, *[0] * (buffer.ndim - len(at))))

    def on_mesh(buffer: jax.Array, piece: jax.Array, *at: Any) -> jax.Array:
        specs = (sharding.spec, sharding.spec, *[P()] * len(at))
        of = jax.shard_map(put, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
        return of(buffer, piece, *at)

    return jax.jit(on_mesh, donate_argnums=0)


def _in_eight(
    x: jax.Array, dtype: np.dtype, sharding: NamedSharding, of_scales: NamedSharding
) -> tuple[jax.Array, jax.Array]:
    """Values and scales of x [L, out, in], a scale for each row of all ranks' columns."""
    quantized = functools.partial(quantize, dtype=dtype, block=(1, -1))
    return jax.jit(quantized, out_shardings=(sharding, of_scales))(x)


def _joined(parts: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    """Along the layers. Of 8 bits there is room for it twice."""
    return jax.jit(lambda parts: jax.numpy.concatenate(parts), out_shardings=sharding)(parts)


def _unflatten(buffer: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """[L * E, ...] as [L, E, ...], where it lies."""
    return jax.jit(lambda x: x.reshape(shape), out_shardings=sharding, donate_argnums=0)(buffer)
