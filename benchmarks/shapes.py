"""The shapes of programs that are made of several operations; an operation has its own in `shapes.py` of its folder."""

from dataclasses import dataclass

from jaxtaxfree.ops.shapes import MatmulShape

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


@dataclass(frozen=True, kw_only=True)
class QkvShape(MatmulShape):
    """The products of query, key and value: n columns of queries, kv of keys and as many of values."""

    kv: int
    sizes = ("m", "k", "n", "kv")

    @property
    def columns(self) -> int:
        """Of all three."""
        return self.n + 2 * self.kv

    def flops(self, world: int) -> int:
        """Floating-point operations of one rank."""
        return 2 * self.m * self.k * self.columns // world


ALL_GATHER_MATMUL_QKV = tuple(
    QkvShape(name=f"{model}/{name}/attention-qkv", m=m, k=d_model, n=d_model, kv=1024)
    for model, d_model in (("llama3-70b", 8192), ("llama3-8b", 4096))
    for name, m in (("decode-16", 16), ("prefill-2k", 2048))
)
ALL_GATHER_MATMUL_QKV_TINY = (
    QkvShape(name="tiny/decode-qkv", m=16, k=128, n=256, kv=64),
    QkvShape(name="tiny/prefill-qkv", m=256, k=128, n=256, kv=64),
)

# A whole MLP: M tokens, K model and N hidden dimensions.
MLP_GRADIENTS = (
    MatmulShape(name="llama3-70b/train-4k/mlp", m=4096, k=8192, n=28672),
    MatmulShape(name="llama3-8b/train-4k/mlp", m=4096, k=4096, n=14336),
)

MLP_GRADIENTS_TINY = (MatmulShape(name="tiny/mlp", m=64, k=128, n=256),)


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


def _of_llama3(name: str, b: int, context: int, **sizes: int) -> DecoderShape:
    """Eight layers (of 8B a quarter, "/4"), a quarter of the vocabulary: of this two of eight GPUs have a quarter."""
    context_name = f"{context // 1024}k-context"
    return DecoderShape(
        name=f"{name}/decode-{b}/{context_name}", b=b, context=context, layers=8, h=128, vocab=32064, **sizes
    )


def _whole(name: str, b: int, context: int, **sizes: int) -> DecoderShape:
    return DecoderShape(name=f"{name}/decode-{b}/{context // 1024}k-context", b=b, context=context, h=128, **sizes)


# What two of eight GPUs have to do, where the model is sharded over eight.
_TWO_OF_EIGHT_8B = {"d_model": 4096, "n": 8, "kv_heads": 2, "d_mlp": 3584}
_TWO_OF_EIGHT_70B = {"d_model": 8192, "n": 16, "kv_heads": 2, "d_mlp": 7168}
_LLAMA3_8B = {"d_model": 4096, "n": 32, "kv_heads": 8, "d_mlp": 14336}
# All layers and the whole vocabulary; an eighth of both, without the norms of queries and keys.
_WHOLE_8B = {"layers": 32, "vocab": 128256} | _LLAMA3_8B
_QWEN3_32B = {"layers": 8, "vocab": 18992, "d_model": 5120, "n": 64, "kv_heads": 8, "d_mlp": 25600}

DECODE_STEP = (
    _tenth_of_llama3_70b(1, 32768),
    _tenth_of_llama3_70b(16, 4096),
    _of_llama3("llama3-8b/2-of-8-gpus", 1, 8192, **_TWO_OF_EIGHT_8B),
    _of_llama3("llama3-8b/2-of-8-gpus", 4, 2048, **_TWO_OF_EIGHT_8B),
    _of_llama3("llama3-8b/2-of-8-gpus", 8, 2048, **_TWO_OF_EIGHT_8B),
    _of_llama3("llama3-70b/10/2-of-8-gpus", 1, 8192, **_TWO_OF_EIGHT_70B),
    _of_llama3("llama3-8b/4", 1, 8192, **_LLAMA3_8B),
    _of_llama3("llama3-8b/4", 16, 2048, **_LLAMA3_8B),
    _whole("llama3-8b", 1, 8192, **_WHOLE_8B),
    _whole("llama3-8b", 16, 2048, **_WHOLE_8B),
    _whole("qwen3-32b/8", 1, 8192, **_QWEN3_32B),
    _whole("qwen3-32b/8", 16, 2048, **_QWEN3_32B),
)

DECODE_STEP_TINY = (
    DecoderShape(
        name="tiny/decode-4", b=4, context=128, layers=2, d_model=64, n=8, kv_heads=4, h=64, d_mlp=256, vocab=128
    ),
)
