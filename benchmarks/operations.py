"""All that can be timed: each operation of the register, and programs that are made of several."""

from benchmarks.attention import DecodeAttention
from benchmarks.collectives import AllGather, AllToAll, Psum, PsumScatter
from benchmarks.columns import AllGatherMatmulColumns, MatmulReduceScatterColumns
from benchmarks.decode_step import DecodeStep
from benchmarks.matmuls import AllGatherMatmul, GatedAllGatherMatmul, MatmulAllReduce, MatmulReduceScatter
from benchmarks.mlp import MlpGradients
from benchmarks.moe import Moe, MoeGradients, MoeTensor
from benchmarks.operation import Operation
from benchmarks.qkv import AllGatherMatmulQkv
from benchmarks.ragged import RaggedAllToAll
from benchmarks.ragged_dot import RaggedDot, RaggedDotLhsGradient, RaggedDotRhsGradient
from jaxtaxfree.ops import register

# How each operation of the register is timed, by its name. Another one is a subclass of `Operation`, and an entry here.
TIMED: dict[str, Operation] = {
    timed.name: timed
    for timed in (
        AllGatherMatmul(),
        MatmulReduceScatter(),
        MatmulAllReduce(),
        DecodeAttention(),
        Psum(),
        AllGather(),
        PsumScatter(),
        AllToAll(),
    )
}
PROGRAMS: tuple[Operation, ...] = (
    GatedAllGatherMatmul(),
    AllGatherMatmulQkv(),
    AllGatherMatmulColumns(),
    MatmulReduceScatterColumns(),
    RaggedAllToAll(),
    RaggedDot(),
    RaggedDotLhsGradient(),
    RaggedDotRhsGradient(),
    Moe(),
    MoeGradients(),
    MoeTensor(),
    MlpGradients(),
    DecodeStep(),
)

OPERATIONS: dict[str, Operation] = {
    **{name: TIMED[name] for name in register.OPERATIONS if name in TIMED},
    **{program.name: program for program in PROGRAMS},
}
# What `tune.py` tunes: kernels that the tables know.
TUNED: dict[str, Operation] = {**TIMED, DecodeStep.name: OPERATIONS[DecodeStep.name]}
