"""A published model on several devices: `load`, and the `Model` that it gives."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jaxtaxfree import heap
from jaxtaxfree.models import forward
from jaxtaxfree.models.checkpoint import Checkpoint
from jaxtaxfree.models.config import DTYPES, ModelConfig, read_config
from jaxtaxfree.models.forward import Cache, How
from jaxtaxfree.models.paging import Room, first_tables, more_tables, pool_of
from jaxtaxfree.models.rotary import rotary_tables
from jaxtaxfree.models.sampling import Sampling, next_tokens
from jaxtaxfree.models.weights import Layout, Weights, is_whole_step, layout_of
from jaxtaxfree.ops.decode_step import decode_step
from jaxtaxfree.ops.decode_step.call import EIGHT_BITS, Call, Eight
from jaxtaxfree.ops.decode_step.hopper import Hopper
from jaxtaxfree.ops.kv_cache import Placement
from jaxtaxfree.primitive import check_implementation, check_whole
from jaxtaxfree.target import HOPPER

BLOCK = 64  # neighbouring positions that a rank keeps of a cache along the sequence
GROWTH = 1024  # positions that a cache gets at a time
ROOM = 128  # what a cache by heads is a multiple of, so that not every length has programs of its own
CACHES = ("heads", "sequence", "pages")


def load(
    folder: str | Path,
    mesh: Mesh,
    axis_name: str | Sequence[str] = "tp",
    *,
    dtype: DTypeLike | None = None,
    cache: str | None = None,
    cache_dtype: DTypeLike | None = None,
    weights: DTypeLike | None = None,
    quantize_activations: bool = False,
    implementation: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> "Model":
    """A checkpoint as Hugging Face publishes it, sharded over the devices of a mesh.

    The folder has `config.json` and safetensors. Each weight goes from its file to its devices, part by part; of one at
    most 64 MB are on the host. Weights of 8 bits are dequantised on their way, unless `weights` says that they keep
    8 bits.

    Args:
      folder: of the checkpoint.
      mesh: its devices. Along other axes than `axis_name` all have the same.
      axis_name: the axis, or axes, along which the model is sharded.
      dtype: of weights, activations and cache: f32, f16 or bf16. None: what the checkpoint says.
      cache: "heads": each rank has the cache of its key/value heads. Where there are fewer heads than ranks, neighbours
        have copies of one. "sequence": each rank has a part of the positions, of all heads. "pages": the same in pages,
        of which a sequence has as many as it needs, for a batch of different lengths. None: "heads", where ranks divide
        heads or heads divide ranks, else "sequence".
      cache_dtype: "int8" or "float8_e4m3fn": keys and values lie in 8 bits, with an f32 scale for each position and
        head, as in `decode_step`. A prompt attends to its own ones before they are rounded. None: they have `dtype`.
      weights: "int8" or "float8_e4m3fn": the matrices of layers lie in 8 bits, with a scale for each row, as
        `all_gather_matmul` takes them. Where the checkpoint has the same 8 bits with scales of rows or tensors, or of
        blocks of 128 x 128 which no two ranks share, they are those; anything else is rounded. Experts, embeddings and
        norms have `dtype`. None: all weights have it.
      quantize_activations: activations are rounded to the same 8 bits in front of the matrices, each row by its largest
        value. The kernels of products of 8 bits want it.
      implementation: of the operations, as in `all_gather_matmul`.
      progress: is called with the bytes that are read so far and those that there are.

    Raises:
      ModelError: if the folder is no checkpoint of a family that is covered, in one sentence that names every field or
        tensor that is not as it should be; or if the ranks do not divide the model. Nothing is on the devices then.
      ValueError: if an argument does not exist.
    """
    check_implementation(implementation)
    if cache not in (None, *CACHES):
        raise ValueError(f"load has no cache={cache!r} (choose one of {', '.join(map(repr, CACHES))}).")
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if not axes:
        raise ValueError("load needs an axis of the mesh as axis_name: take a mesh of one device for one alone.")
    if unknown := [axis for axis in axes if axis not in mesh.shape]:
        raise ValueError(f"load has axis_name={unknown[0]!r}, and the mesh has {', '.join(map(repr, mesh.shape))}.")
    world = math.prod(mesh.shape[axis] for axis in axes)
    config = read_config(folder)
    layout = layout_of(config, world, cache)
    narrow_cache = _eight_bits("cache_dtype", cache_dtype)
    if weights is not None:
        layout = dataclasses.replace(layout, eight=_eight_bits("weights", weights))
    elif quantize_activations:
        raise ValueError("quantize_activations=True needs weights of 8 bits: say weights='int8' or 'float8_e4m3fn'.")
    sources = Weights(Checkpoint(folder), config, layout)
    kind = config.dtype if dtype is None else _dtype_of(dtype)
    if kind is None or kind not in DTYPES.values():
        raise ValueError(f"load takes dtype as None or one of {', '.join(DTYPES)}, not {_named(dtype)}.")
    total, done = sources.nbytes, 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    params = sources.place(mesh, axes, kind, count)
    made = Model(params, config, layout, mesh, axes, implementation, quantize_activations, narrow_cache)
    return made.in_pages() if cache == "pages" else made


def _dtype_of(dtype: DTypeLike) -> np.dtype | None:
    """None if there is no such dtype."""
    try:
        return np.dtype(dtype)
    except TypeError:
        return None


def _eight_bits(name: str, dtype: DTypeLike | None) -> np.dtype | None:
    """The dtype of 8 bits that an argument of `load` names; raises ValueError if it names another."""
    if dtype is None:
        return None
    known = _dtype_of(dtype)
    if known is None or known.name not in EIGHT_BITS:
        raise ValueError(f"load takes {name} as None or one of {', '.join(EIGHT_BITS)}, not {_named(dtype)}.")
    return known


def _named(dtype: Any) -> str:
    return repr(dtype) if (known := _dtype_of(dtype)) is None else known.name


class _Program:
    """A program for operands of certain types.

    Attributes:
      lowered, compiled: of JAX's stages.
    """

    def __init__(self, lowered: Any):
        self.lowered, self.compiled = lowered, lowered.compile()


class Model:
    """A decoder on its devices.

    Attributes:
      config: what its `config.json` says.
      spec: what runs: `config.spec` with copies of heads, and a vocabulary that the ranks divide.
      mesh, axes: where it is.
      params: the weights, as `decode_step` takes them, and the embedding.
      implementation: of its operations.
      eight: the dtype of 8 bits of its matrices; None: as the rest.
      cache_dtype: that of its cache; None: as the rest.
      growth: positions that the cache gets when it is full.
      paged: whether the cache is in pages.
    """

    def __init__(
        self, params: Mapping[str, jax.Array], config: ModelConfig, layout: Layout, mesh: Mesh,
        axes: tuple[str, ...], implementation: str | None, quantize_activations: bool = False,
        cache_dtype: np.dtype | None = None,
    ):  # fmt: skip
        self.config, self.spec, self.mesh, self.axes = config, layout.model, mesh, axes
        self.params, self.implementation, self.eight = dict(params), implementation, layout.eight
        self.quantize_activations, self.cache_dtype = quantize_activations, cache_dtype
        self.growth = GROWTH
        self.world = math.prod(mesh.shape[axis] for axis in axes)
        self.by_heads = layout.by_heads
        # Scales may be of rows or of blocks.
        placed: Any = {name: x.sharding for name, x in self.params.items() if name.endswith("_scale")}
        of_scales = {name: sharding.spec for name, sharding in placed.items()}
        self._specs = layout.partition(axes) | of_scales
        of_cache = P(None, None, axes) if layout.by_heads else P(None, None, None, axes)
        self._cache_specs: tuple[P, ...] = (of_cache,) * (2 if cache_dtype is None else 4)
        self.paged = False
        self._positions = 0
        self._tables: tuple[jax.Array, jax.Array] | None = None
        self._programs: dict[Any, Any] = {}

    @property
    def dtype(self) -> np.dtype:
        return self.params["embed"].dtype

    def by(self, implementation: str | None) -> "Model":
        """The same weights by another implementation of the operations."""
        check_implementation(implementation)
        other = copy.copy(self)
        other.implementation, other._programs = implementation, {}
        return other

    def in_pages(self) -> "Model":
        """The same weights with a cache in pages; it has to be one along the sequence."""
        assert not self.by_heads
        other = copy.copy(self)
        other._cache_specs = (P(None, self.axes),) * len(self._cache_specs)
        other.paged, other._programs = True, {}
        return other

    def logits(self, tokens: ArrayLike, lengths: ArrayLike | None = None) -> jax.Array:
        """The logits behind every token.

        Args:
          tokens: i32[B, T], each row the first tokens of a sequence.
          lengths: i32[B], how many of a row there are; None: T. The logits behind them mean nothing.

        Returns: f32[B, T, V], sharded over the vocabulary if the ranks divide it.
        """
        tokens, lengths = self._checked(tokens, lengths, 0)
        t = tokens.shape[1]
        padded = self._put(_padded(tokens, self._bucket(t)))
        program = self._program("logits", self._logits_program)
        logits = heap.block_until_ready(program(self.params, padded, *self._rotation(t)))[:, :t]
        if self.spec.vocab == self.config.spec.vocab:
            return logits
        # Of a sharded dimension of Explicit axes no part can be taken that the ranks do not divide.
        return self._put(logits)[:, :, : self.config.spec.vocab]

    def generate(
        self,
        tokens: ArrayLike,
        steps: int,
        *,
        lengths: ArrayLike | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        stop: Sequence[int] = (),
        seed: int = 0,
    ) -> np.ndarray:
        """The tokens that follow.

        Args:
          tokens, lengths: prompts, as in `logits`.
          steps: how many tokens of each sequence.
          temperature: divides the logits before a token is drawn; 0: the likeliest one.
          top_k: of the likeliest tokens so many are candidates; None: all.
          top_p: of them the fewest, likeliest first, whose probabilities add up to it or more.
          stop: tokens after which a sequence ends. `config.stop` has the model's own.
          seed: of the drawing. The same seed draws the same tokens.

        Returns: i32[B, steps]. Behind a stop token a row repeats it.

        Raises:
          ValueError: if prompts and steps are longer than the model's positions, or an argument is out of its range.
          TypeError: if `steps` or `top_k` is no whole number.
        """
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        made = list(self.stream(tokens, steps, lengths=lengths, sampling=sampling, stop=stop, seed=seed))
        out = np.stack(made, axis=1)
        return np.concatenate([out, np.repeat(out[:, -1:], steps - out.shape[1], axis=1)], axis=1)

    def stream(
        self,
        tokens: ArrayLike,
        steps: int,
        *,
        lengths: ArrayLike | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
        seed: int = 0,
    ) -> Iterator[np.ndarray]:
        """As `generate`, token by token: i32[B] each, as soon as it is there. It ends when all sequences have ended."""
        if check_whole("generate", "steps", steps) < 1:
            raise ValueError(f"steps must be 1 or more, and is {steps}.")
        if isinstance(stop, int | np.integer):
            raise ValueError(f"stop must be several tokens, such as ({stop},), not {stop}.")
        tokens, lengths = self._checked(tokens, lengths, steps)
        return self._stream(tokens, lengths, steps, sampling or Sampling(), tuple(stop), seed)

    def _stream(
        self, tokens: np.ndarray, lengths: np.ndarray, steps: int, sampling: Sampling, stop: tuple[int, ...], seed: int
    ) -> Iterator[np.ndarray]:
        longest, free = int(lengths.max()), min(steps, self.growth)
        room, rotation = self.room(lengths, steps), self._rotation(longest + steps)
        tables = self._tables_of(lengths, steps)
        # What a step takes is on the devices: to put a number there takes the host longer than to launch it.
        of_step, count = self._put(tables), self._put(np.int32(1))
        keys = self._put(jax.random.key(seed))
        padded = self._put(_padded(tokens, self._bucket(tokens.shape[1])))
        at = self._put(lengths)
        read = self._read(room, padded.shape[1], sampling).compiled
        token, cache = read(self.params, padded, at, *rotation, keys, of_step)
        ended, last = np.zeros(len(lengths), bool), np.zeros(len(lengths), np.int32)
        # On GPUs a step is launched before the token of the one before is read. On a CPU two programs with collectives
        # in flight can take each other's threads.
        ahead = self.mesh.devices.flat[0].platform != "cpu"
        for i in range(1, steps + 1):
            now = token
            if not ahead:
                heap.block_until_ready(now)
            if i < steps:
                if i > free:
                    free += self.growth
                    cache, room, tables = self._grown(cache, room, tables)
                    of_step = self._put(tables)
                step = self._step(room, sampling).compiled
                token, at, count, cache = step(self.params, cache, token, at, *rotation, keys, count, of_step)
            found = np.asarray(heap.block_until_ready(now))
            last = np.where(ended, last, found)
            ended |= np.isin(found, stop)
            yield last
            if ended.all():
                return

    def compile(self, lengths: Sequence[int] | np.ndarray, steps: int, sampling: Sampling | None = None) -> None:
        """Compiles the programs that `generate` needs, of the prompts and of a step, each in a thread.

        Without it each is compiled when it is first needed, one after the other. The threads have JAX's global
        configuration, not what a `with` of the caller's says.

        Args:
          lengths: how many tokens each prompt has.
          steps, sampling: as in `stream`.
        """
        sampling, room, longest = sampling or Sampling(), self.room(lengths, steps), max(map(int, lengths))
        self._rotation(longest + steps)
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(self._read, room, self._bucket(longest), sampling)]
            if steps > 1:
                both.append(pool.submit(self._step, room, sampling))
            for each in both:
                each.result()

    def step(self, room: Room, sampling: Sampling) -> Any:
        """The jitted program of a step: (params, cache, token i32[B], lengths i32[B], cos, sin, key, count, tables) ->
        (token, lengths, count, cache). The cache is donated. `tables` are those of pages, i32[B, pages of a sequence],
        or i32[B, 0] where there are none.

        Args:
          room: that `room` gives.
        """
        return self._program(("step", room, sampling), self._step_program, room, sampling)

    def step_bytes(self, batch: int, length: int) -> int:
        """Bytes that a rank has to read for a step: of its weights, and of its cache with so many tokens a sequence."""
        weights, spec = 0, self.spec
        for name, weight in self.params.items():
            nbytes = weight.nbytes // (self.world if self._specs[name] else 1)
            if name == "embed" and not spec.tied:
                nbytes = batch * spec.d_model * weight.dtype.itemsize
            elif spec.experts and name in ("gate_proj", "up_proj", "down_proj"):
                nbytes = nbytes * min(spec.experts, batch * spec.experts_per_token) // spec.experts
            weights += nbytes
        seen = sum(length if window is None else min(length, window + 1) for window in spec.window_by_layer)
        each = spec.head_dim * self.dtype.itemsize if self.cache_dtype is None else spec.head_dim + 4  # and a scale
        return weights + 2 * batch * seen * spec.kv_heads * each // self.world

    def kernels(self, room: Room, sampling: Sampling) -> int:
        """How many fused kernels the program of such a step has, counted once for each place in it."""
        return self._step(room, sampling).lowered.as_text().count("triton_kernel_call")

    def _read(self, room: Room, t: int, sampling: Sampling) -> "_Program":
        """Of prompts that are padded to t tokens."""
        lower = lambda: self._read_program(room, sampling).lower(*self._types(room, t))  # noqa: E731
        return self._program(("read", room, sampling, t, self._positions), lambda: _Program(lower()))

    def _step(self, room: Room, sampling: Sampling) -> "_Program":
        lower = lambda: self.step(room, sampling).lower(*self._types(room))  # noqa: E731
        return self._program(("one", room, sampling, self._positions), lambda: _Program(lower()))

    def _program(self, key: Any, make: Callable[..., Any], *args: Any) -> Any:
        if key not in self._programs:
            self._programs[key] = make(*args)
        return self._programs[key]

    def _on_mesh(self, f: Callable[..., Any], in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()) -> Any:
        mapped = jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donate)

    def _how(self, room: Room) -> How:
        placement = None if self.by_heads else Placement(stretch=BLOCK, slots=room.slots)
        return How(
            model=self.spec, axes=self.axes, placement=placement, pages=room.pages, cache_dtype=self.cache_dtype,
            implementation=self.implementation, quantized=self.quantize_activations,
        )  # fmt: skip

    def _drawn(self, sampling: Sampling) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """The sampler: (logits, key) -> token."""
        how = {"vocab": self.config.spec.vocab, "implementation": self.implementation}
        return functools.partial(next_tokens, axes=self.axes, sampling=sampling, **how)

    def _logits_program(self) -> Any:
        def logits(params: Any, tokens: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
            none = jnp.zeros(tokens.shape[:1], jnp.int32)
            return forward.run(params, tokens, None, none, none, cos, sin, self._how(Room(1, BLOCK)), every=True)[0]

        return self._on_mesh(logits, (self._specs, P(), P(), P()), P(None, None, self.axes))

    def _read_program(self, room: Room, sampling: Sampling) -> Any:
        how, draw = self._how(room), self._drawn(sampling)

        def read(
            params: Any,
            tokens: jax.Array,
            counts: jax.Array,
            cos: jax.Array,
            sin: jax.Array,
            key: jax.Array,
            tables: jax.Array,
        ) -> tuple[jax.Array, Cache]:
            logits, fresh = forward.run(params, tokens, None, jnp.zeros_like(counts), counts, cos, sin, how)
            token = draw(logits, jax.random.fold_in(key, 0))
            return token, forward.placed(fresh, room.slots, tables, how)

        return self._on_mesh(read, (self._specs, *[P()] * 6), (P(), self._cache_specs))

    def _step_program(self, room: Room, sampling: Sampling) -> Any:
        draw = self._drawn(sampling)

        def step(
            by: Callable[..., Any], params: Any, cache: Cache, token: jax.Array, lengths: jax.Array, cos: jax.Array,
            sin: jax.Array, key: jax.Array, count: jax.Array, tables: jax.Array,
        ) -> tuple[jax.Array, jax.Array, jax.Array, Cache]:  # fmt: skip
            logits, cache = by(params, cache, token, lengths, cos, sin, tables)
            token = draw(logits, jax.random.fold_in(key, count))
            return token, lengths + 1, count + 1, cache

        def made(by: Callable[..., Any]) -> Any:
            specs = (self._specs, self._cache_specs, *[P()] * 7)
            return self._on_mesh(functools.partial(step, by), specs, (P(), P(), P(), self._cache_specs), donate=(1,))

        operations = made(functools.partial(self._by_operations, room))
        if self.quantize_activations or self.paged or not is_whole_step(self.spec, self.by_heads):
            return operations
        if (self.eight or self.cache_dtype) and self._refusals(room):
            return operations
        whole = made(self._by_decode_step)
        if self.implementation in ("fused", "simulate"):
            try:
                jax.eval_shape(whole, *self._types(room))
            except NotImplementedError:  # the kernel of the whole step refuses it; those of the operations may not
                return operations
        return whole

    def _refusals(self, room: Room) -> list[str]:
        """Why the kernel of a whole step does not take one of so many sequences on Hopper."""
        scales = {name: self.params.get(f"{name}_scale") for name in self.params}
        eight = tuple(Eight.of(name, self.params[name], each) for name, each in scales.items() if each is not None)
        cache_dtype = self.dtype if self.cache_dtype is None else self.cache_dtype
        call = Call(
            model=self.spec, world=self.world, batch=room.batch, tokens=1, slots=room.slots, positions=self._positions,
            dtype=self.dtype, cache_dtype=cache_dtype, by_heads=self.by_heads, eight=eight, target=HOPPER,
        )  # fmt: skip
        return Hopper().refuses_by_shape(call)

    def _by_decode_step(
        self, params: Any, cache: Any, token: jax.Array, lengths: jax.Array, cos: jax.Array, sin: jax.Array,
        tables: jax.Array,
    ) -> tuple[jax.Array, Cache]:  # fmt: skip
        del tables
        x = forward.sharded_rows(params["embed"], token, self.axes, self.implementation)
        own = {name: w for name, w in params.items() if name != "embed" or self.spec.tied}
        return decode_step(
            own, x, cache, lengths, self.axes, model=self.spec, cos=cos, sin=sin,
            placement="heads" if self.by_heads else "round_robin", block_size=None if self.by_heads else BLOCK,
            implementation=self.implementation,
        )  # fmt: skip

    def _by_operations(
        self, room: Room, params: Any, cache: Cache, token: jax.Array, lengths: jax.Array, cos: jax.Array,
        sin: jax.Array, tables: jax.Array,
    ) -> tuple[jax.Array, Cache]:  # fmt: skip
        ones = jnp.ones_like(lengths)
        return forward.run(params, token[:, None], cache, lengths, ones, cos, sin, self._how(room), tables=tables)

    def _types(self, room: Room, t: int | None = None) -> tuple[Any, ...]:
        """Of the operands of a step, or of reading prompts that are padded to t tokens."""

        def of(shape: tuple[int, ...], dtype: Any, *spec: P) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, *(spec or [P()])))

        batch, slots, spec = room.batch, room.slots, self.spec
        tables = of((batch, slots // BLOCK if self.paged else 0), np.int32)
        i32, key = of((batch,), np.int32), of((), jax.eval_shape(lambda: jax.random.key(0)).dtype)
        cos, sin = self._rotation(self._positions or 1)
        if t is not None:
            return self.params, of((batch, t), np.int32), i32, cos, sin, key, tables
        slots *= 1 if self.by_heads else self.world
        whole = (spec.layers, batch, spec.kv_heads, slots, spec.head_dim)
        if self.paged:
            whole = (spec.layers, room.pages * self.world, spec.kv_heads, BLOCK, spec.head_dim)
        parts = [(whole, self.cache_dtype or self.dtype)] * 2 + [(whole[:-1], np.dtype(np.float32))] * 2
        cache = tuple(of(*part, of_cache) for part, of_cache in zip(parts, self._cache_specs))
        return self.params, cache, i32, i32, cos, sin, key, of((), np.int32), tables

    def _grown(self, cache: Cache, room: Room, tables: np.ndarray) -> tuple[Cache, Room, np.ndarray]:
        """The cache with `growth` more positions of each sequence, of all ranks together if they share them."""
        more = self._slots(self.growth)
        wider = [(0, 0)] * 3 + [(0, more), (0, 0)]
        new = 0
        if self.paged:
            new = pool_of([more // BLOCK] * room.batch)
            tables = more_tables(tables, room.pages, more // BLOCK)
            wider = [(0, 0), (0, new)] + [(0, 0)] * 3
        program = self._program(
            ("grow", more, room),
            lambda: self._on_mesh(
                lambda cache: jax.tree.map(lambda x: jnp.pad(x, wider[: x.ndim]), cache),
                (self._cache_specs,),
                self._cache_specs,
            ),
        )
        return program(cache), Room(room.batch, room.slots + more, room.pages + new), tables

    def room(self, lengths: Sequence[int] | np.ndarray, steps: int) -> Room:
        """Of the cache at first, for prompts of so many tokens and so many steps."""
        counts = self._counts(lengths, steps)
        slots = self._slots(max(map(int, lengths)) + min(steps, self.growth))
        return Room(len(counts), slots, pool_of(counts) if self.paged else 0)

    def _counts(self, lengths: Sequence[int] | np.ndarray, steps: int) -> list[int]:
        """The pages of each sequence on a rank, if there are any."""
        return [self._slots(int(length) + min(steps, self.growth)) // BLOCK for length in lengths]

    def _tables_of(self, lengths: Sequence[int] | np.ndarray, steps: int) -> np.ndarray:
        counts = self._counts(lengths, steps)
        return first_tables(counts) if self.paged else np.zeros((len(counts), 0), np.int32)

    def _slots(self, positions: int) -> int:
        """Positions of the cache that a rank has, if all together have so many or more."""
        if self.by_heads:
            return positions + -positions % ROOM
        return BLOCK * math.ceil(positions / (BLOCK * self.world))

    def _bucket(self, t: int) -> int:
        """To which number of tokens prompts are padded, so that not every length has a program of its own."""
        unit = math.lcm(16 if t <= 2 * forward.QUERIES else forward.QUERIES, self.world)
        return t + -t % unit

    def _rotation(self, positions: int) -> tuple[jax.Array, jax.Array]:
        """cos and sin, of so many positions or more."""
        if self._tables is None or positions > self._positions:
            self._positions = positions + -positions % self.growth
            self._tables = tuple(map(self._put, rotary_tables(self.config.rotaries, self._positions)))  # pyrefly: ignore[bad-assignment]
        assert self._tables is not None
        return self._tables

    def _put(self, x: ArrayLike) -> jax.Array:
        return jax.device_put(x, NamedSharding(self.mesh, P()))

    def _checked(self, tokens: ArrayLike, lengths: ArrayLike | None, steps: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompts and their lengths; raises ValueError if they do not fit."""
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise ValueError("tokens must be i32[B, T]: fill up shorter rows, and say lengths=.") from None
        if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer) or not tokens.size:
            raise ValueError(f"tokens must be i32[B, T], not {tokens.dtype}{list(tokens.shape)}.")
        b, t = tokens.shape
        lengths = np.full(b, t, np.int32) if lengths is None else np.asarray(lengths)
        if (
            lengths.shape != (b,)
            or not np.issubdtype(lengths.dtype, np.integer)
            or lengths.min() < 1
            or lengths.max() > t
        ):
            raise ValueError(f"lengths must be i32[{b}] from 1 to {t}, not {lengths.tolist()}.")
        inside = np.arange(t) < lengths[:, None]
        if bad := sorted({int(token) for token in tokens[inside] if not 0 <= token < self.config.spec.vocab}):
            raise ValueError(f"tokens must be from 0 to {self.config.spec.vocab - 1}, and {bad[0]} is not.")
        if (longest := int(lengths.max()) + steps) > self.config.positions:
            raise ValueError(f"{longest} tokens are more than max_position_embeddings={self.config.positions}.")
        return np.where(inside, tokens, 0).astype(np.int32), lengths.astype(np.int32)


def _padded(tokens: np.ndarray, t: int) -> np.ndarray:
    return np.pad(tokens, [(0, 0), (0, t - tokens.shape[1])])
