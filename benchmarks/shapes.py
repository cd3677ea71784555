"""The shapes that tests, tuning and benchmarks share: one list per operation."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MatmulShape:
    """One product [m, k] @ [k, n]. The sizes are those of the whole arrays, before they are sharded."""

    name: str
    m: int
    k: int
    n: int

    def wire_bytes(self, world: int, itemsize: int = 2) -> int:
        """Bytes of lhs that each rank of an all-gather receives from its peers."""
        return self.m * self.k * itemsize * (world - 1) // world

    def scattered_bytes(self, world: int, itemsize: int = 2) -> int:
        """Bytes of the result that each rank of a reduce-scatter sends to its peers."""
        return self.m * self.n * itemsize * (world - 1) // world

    def flops(self, world: int) -> int:
        """Floating-point operations of one rank: [m, k] @ [k, n / world], or [m, k / world] @ [k / world, n]."""
        return 2 * self.m * self.k * self.n // world


ALL_GATHER_MATMUL = (
    MatmulShape(name="llama3-70b/decode-16/mlp-up", m=16, k=8192, n=28672),
    MatmulShape(name="llama3-70b/decode-128/mlp-up", m=128, k=8192, n=28672),
    MatmulShape(name="llama3-70b/decode-256/mlp-up", m=256, k=8192, n=28672),
    MatmulShape(name="llama3-70b/prefill-512/mlp-up", m=512, k=8192, n=28672),
    MatmulShape(name="llama3-70b/prefill-2k/mlp-up", m=2048, k=8192, n=28672),
    MatmulShape(name="llama3-70b/prefill-8k/mlp-up", m=8192, k=8192, n=28672),
    MatmulShape(name="llama3-70b/prefill-8k/attention-q", m=8192, k=8192, n=8192),
    MatmulShape(name="llama3-8b/prefill-4k/mlp-up", m=4096, k=4096, n=14336),
    MatmulShape(name="gpt-6.7b/prefill-4k/mlp-up", m=4096, k=4096, n=16384),
)

ALL_GATHER_MATMUL_TINY = (
    MatmulShape(name="tiny/decode", m=16, k=128, n=512),
    MatmulShape(name="tiny/prefill", m=256, k=256, n=1024),
)

# Of each of the two products.
GATED_ALL_GATHER_MATMUL = tuple(
    MatmulShape(name=f"llama3-70b/{name}/mlp-gate-up", m=m, k=8192, n=28672)
    for name, m in (
        ("decode-16", 16),
        ("decode-128", 128),
        ("decode-256", 256),
        ("prefill-2k", 2048),
        ("prefill-8k", 8192),
    )
)

# The other half of the same layers.
MATMUL_REDUCE_SCATTER = (
    MatmulShape(name="llama3-70b/decode-16/mlp-down", m=16, k=28672, n=8192),
    MatmulShape(name="llama3-70b/decode-128/mlp-down", m=128, k=28672, n=8192),
    MatmulShape(name="llama3-70b/decode-256/mlp-down", m=256, k=28672, n=8192),
    MatmulShape(name="llama3-70b/prefill-512/mlp-down", m=512, k=28672, n=8192),
    MatmulShape(name="llama3-70b/prefill-2k/mlp-down", m=2048, k=28672, n=8192),
    MatmulShape(name="llama3-70b/prefill-8k/mlp-down", m=8192, k=28672, n=8192),
    MatmulShape(name="llama3-70b/prefill-8k/attention-out", m=8192, k=8192, n=8192),
    MatmulShape(name="llama3-8b/prefill-4k/mlp-down", m=4096, k=14336, n=4096),
    MatmulShape(name="gpt-6.7b/prefill-4k/mlp-down", m=4096, k=16384, n=4096),
)

MATMUL_REDUCE_SCATTER_TINY = (
    MatmulShape(name="tiny/decode", m=16, k=512, n=128),
    MatmulShape(name="tiny/prefill", m=1024, k=1024, n=256),
)

# A row-parallel layer whose result every rank needs.
MATMUL_ALL_REDUCE = tuple(
    MatmulShape(name=f"llama3-70b/{name}/mlp-down", m=m, k=28672, n=8192)
    for name, m in (
        ("decode-1", 1),
        ("decode-16", 16),
        ("decode-64", 64),
        ("decode-128", 128),
        ("decode-256", 256),
        ("prefill-512", 512),
        ("prefill-2k", 2048),
    )
)

MATMUL_ALL_REDUCE_TINY = (
    MatmulShape(name="tiny/decode-1", m=1, k=512, n=128),
    MatmulShape(name="tiny/decode-64", m=64, k=512, n=128),
    MatmulShape(name="tiny/prefill", m=512, k=1024, n=256),
)

# A whole MLP: M tokens, K model and N hidden dimensions.
MLP_GRADIENTS = (
    MatmulShape(name="llama3-70b/train-4k/mlp", m=4096, k=8192, n=28672),
    MatmulShape(name="llama3-8b/train-4k/mlp", m=4096, k=4096, n=14336),
)

MLP_GRADIENTS_TINY = (MatmulShape(name="tiny/mlp", m=64, k=128, n=256),)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Attention of one new token over a cache that is sharded along the sequence.

    Attributes:
      b: sequences.
      s: keys of a sequence that each rank keeps, so that world * s are attended to.
      n: query heads.
      kv_heads: key/value heads, K in docstrings.
      h: head size of queries, keys and values.
    """

    name: str
    b: int
    s: int
    n: int
    kv_heads: int
    h: int

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Bytes of keys and values that one rank reads."""
        return 2 * self.b * self.s * self.kv_heads * self.h * itemsize


def _llama3_70b(b: int, s: int) -> AttentionShape:
    """Named by the context that four ranks hold."""
    return AttentionShape(name=f"llama3-70b/decode-{b}/{4 * s // 1024}k-context", b=b, s=s, n=64, kv_heads=8, h=128)


DECODE_ATTENTION = (
    _llama3_70b(1, 8192),
    _llama3_70b(1, 32768),
    _llama3_70b(1, 131072),
    _llama3_70b(8, 8192),
    _llama3_70b(8, 32768),
    _llama3_70b(16, 8192),
)

# Microseconds that a call is to take on 4 H200, by (b, s).
DECODE_ATTENTION_TARGETS_US = {
    (1, 8192): 16,
    (1, 32768): 40,
    (1, 131072): 140,
    (8, 8192): 75,
    (8, 32768): 275,
    (16, 8192): 140,
}

DECODE_ATTENTION_TINY = (
    AttentionShape(name="tiny/decode-1", b=1, s=128, n=8, kv_heads=2, h=32),
    AttentionShape(name="tiny/decode-3", b=3, s=64, n=8, kv_heads=4, h=16),
)


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """A decoder-only transformer that makes one token of each sequence.

    Attributes:
      b: sequences.
      context: tokens that each of them has, over all ranks.
      layers, d_model, n, kv_heads, h, d_mlp, vocab: of the model; n query heads of size h.
    """

    name: str
    b: int
    context: int
    layers: int
    d_model: int
    n: int
    kv_heads: int
    h: int
    d_mlp: int
    vocab: int

    def weight_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the matrices that a step multiplies by."""
        attention = self.d_model * self.h * (2 * self.n + 2 * self.kv_heads)
        return itemsize * (self.layers * (attention + 3 * self.d_model * self.d_mlp) + self.d_model * self.vocab)

    def cache_bytes(self, itemsize: int = 2) -> int:
        """Bytes of all keys and values."""
        return 2 * itemsize * self.layers * self.b * self.context * self.kv_heads * self.h


def _tenth_of_llama3_70b(b: int, context: int) -> DecoderShape:
    """Of its layers, and of its vocabulary of 128256."""
    return DecoderShape(
        name=f"llama3-70b/10/decode-{b}/{context // 1024}k-context", b=b, context=context,
        layers=8, d_model=8192, n=64, kv_heads=8, h=128, d_mlp=28672, vocab=12800,
    )  # fmt: skip


DECODE_STEP = (
    _tenth_of_llama3_70b(1, 32768),
    _tenth_of_llama3_70b(16, 4096),
)

DECODE_STEP_TINY = (
    DecoderShape(
        name="tiny/decode-4", b=4, context=128, layers=2, d_model=64, n=8, kv_heads=4, h=16, d_mlp=96, vocab=128
    ),
)


@dataclass(frozen=True, kw_only=True)
class CollectiveShape:
    """A collective of arrays of so many bytes a rank."""

    name: str
    nbytes: int


COLLECTIVE = (
    CollectiveShape(name="2 B", nbytes=2),
    CollectiveShape(name="2 KB", nbytes=2 << 10),
    CollectiveShape(name="16 KB", nbytes=16 << 10),
    CollectiveShape(name="64 KB", nbytes=64 << 10),
    CollectiveShape(name="256 KB", nbytes=256 << 10),
    CollectiveShape(name="1 MB", nbytes=1 << 20),
    CollectiveShape(name="2 MB", nbytes=2 << 20),
    CollectiveShape(name="4 MB", nbytes=4 << 20),
)

COLLECTIVE_TINY = (CollectiveShape(name="tiny/2 B", nbytes=2), CollectiveShape(name="tiny/6 KB", nbytes=6 << 10))
