"""The shapes at which `ragged_all_to_all` is timed, and tiny ones for machines without a GPU."""

from jaxtaxfree.ops.shapes import RaggedShape

SHAPES = (
    RaggedShape(name="decode-64", rows=64, d=2048),
    RaggedShape(name="qwen3-30b-a3b/4k", rows=32768, d=2048),
    RaggedShape(name="qwen3-30b-a3b/4k/skewed", rows=32768, d=2048, routing="skewed"),
    RaggedShape(name="mixtral-8x7b/4k", rows=8192, d=4096),
    RaggedShape(name="towards-deepseek-v3/4k", rows=32768, d=7168),
)

TINY_SHAPES = (
    RaggedShape(name="tiny", rows=24, d=16),
    RaggedShape(name="tiny/skewed", rows=24, d=16, routing="skewed"),
)
