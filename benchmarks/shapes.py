"""The shapes that tests, tuning and benchmarks share: one list per operation, in global sizes."""

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

    def flops(self, world: int) -> int:
        """Floating-point operations of one rank: [m, k] @ [k, n / world]."""
        return 2 * self.m * self.k * self.n // world


ALL_GATHER_MATMUL = (
    MatmulShape(name="llama3-70b/decode-16/mlp-up", m=16, k=8192, n=28672),
    MatmulShape(name="llama3-70b/decode-128/mlp-up", m=128, k=8192, n=28672),
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
