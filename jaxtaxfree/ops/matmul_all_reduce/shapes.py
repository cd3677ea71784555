"""The shapes at which `matmul_all_reduce` is tested, tuned and timed, and tiny ones for machines without a GPU."""

from jaxtaxfree.ops.shapes import MatmulShape

# A row-parallel layer whose result every rank needs.
SHAPES = tuple(
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

TINY_SHAPES = (
    MatmulShape(name="tiny/decode-1", m=1, k=512, n=128),
    MatmulShape(name="tiny/decode-64", m=64, k=512, n=128),
    MatmulShape(name="tiny/prefill", m=512, k=1024, n=256),
)
