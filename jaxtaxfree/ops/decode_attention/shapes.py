"""The shapes at which `decode_attention` is tested, tuned and timed, and tiny ones for machines without a GPU."""

from jaxtaxfree.ops.shapes import AttentionShape


def _llama3_70b(b: int, s: int) -> AttentionShape:
    """Named by the context that four ranks hold."""
    return AttentionShape(name=f"llama3-70b/decode-{b}/{4 * s // 1024}k-context", b=b, s=s, n=64, kv_heads=8, h=128)


SHAPES = (
    _llama3_70b(1, 8192),
    _llama3_70b(1, 32768),
    _llama3_70b(1, 131072),
    _llama3_70b(8, 8192),
    _llama3_70b(8, 32768),
    _llama3_70b(16, 8192),
)

TINY_SHAPES = (
    AttentionShape(name="tiny/decode-1", b=1, s=128, n=8, kv_heads=2, h=32),
    AttentionShape(name="tiny/decode-3", b=3, s=64, n=8, kv_heads=4, h=16),
)
