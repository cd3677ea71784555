"""The shapes at which `moe` is timed, layers of published models; tiny ones without a GPU."""

from jaxtaxfree.ops.shapes import MoeShape, evenly_and_unevenly

_EVEN = (
    MoeShape(name="qwen3-30b-a3b/4k", tokens=4096, d=2048, f=768, experts=128, top_k=8),
    MoeShape(name="mixtral-8x7b/4k", tokens=4096, d=4096, f=14336, experts=8, top_k=2),
    MoeShape(name="towards-deepseek-v3/4k", tokens=4096, d=7168, f=2048, experts=32, top_k=8),
    MoeShape(name="qwen3-30b-a3b/decode-64", tokens=64, d=2048, f=768, experts=128, top_k=8),
    MoeShape(name="qwen3-30b-a3b/decode-8", tokens=8, d=2048, f=768, experts=128, top_k=8),
)
SHAPES = evenly_and_unevenly(_EVEN)

TINY_SHAPES = (
    MoeShape(name="tiny", tokens=6, d=16, f=32, experts=8, top_k=4),
    MoeShape(name="tiny/dirichlet", tokens=6, d=16, f=32, experts=8, top_k=2, routing="dirichlet"),
)
