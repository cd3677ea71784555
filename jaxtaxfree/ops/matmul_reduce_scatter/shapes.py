"""The shapes at which `matmul_reduce_scatter` is tested, tuned and timed, and tiny ones for machines without a GPU."""

from jaxtaxfree.ops.shapes import MatmulShape

# The other half of the layers of `all_gather_matmul`.
SHAPES = (
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

TINY_SHAPES = (
    MatmulShape(name="tiny/decode", m=16, k=512, n=128),
    MatmulShape(name="tiny/prefill", m=1024, k=1024, n=256),
)
