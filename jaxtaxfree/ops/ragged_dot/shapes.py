"""The shapes at which `ragged_dot` is timed, a share of two ranks in published models; tiny ones without a GPU."""

from jaxtaxfree.ops.shapes import GroupedShape, evenly_and_unevenly

_EVEN = (
    GroupedShape(name="qwen3-30b-a3b/4k", tokens=4096, d=2048, f=768, groups=64, top_k=8),
    GroupedShape(name="qwen3-30b-a3b/decode-64", tokens=64, d=2048, f=768, groups=64, top_k=8),
    GroupedShape(name="mixtral-8x7b/4k", tokens=4096, d=4096, f=14336, groups=4, top_k=2),
    GroupedShape(name="towards-deepseek-v3/4k", tokens=4096, d=7168, f=2048, groups=16, top_k=8),
)
SHAPES = evenly_and_unevenly(_EVEN)

TINY_SHAPES = (
    GroupedShape(name="tiny", tokens=12, d=16, f=32, groups=4, top_k=2),
    GroupedShape(name="tiny/dirichlet", tokens=12, d=16, f=32, groups=4, top_k=2, routing="dirichlet"),
)
