"""The shapes at which `all_gather_matmul` is tested, tuned and timed, and tiny ones for machines without a GPU."""

from jaxtaxfree.ops.shapes import MatmulShape

SHAPES = (
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

TINY_SHAPES = (
    MatmulShape(name="tiny/decode", m=16, k=128, n=512),
    MatmulShape(name="tiny/prefill", m=256, k=256, n=1024),
)
