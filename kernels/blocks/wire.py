"""In which type partial sums travel."""

import triton
import triton.language as tl


@triton.constexpr_function
def type_of(dtype, EXACT):
    """The type of partial sums of operands of this type: f32 if they are exact; else theirs, of 16 bits or more.

    `Call.wire` in jaxtaxfree/ops/product.py says the same to the host.
    """
    if EXACT:
        return tl.float32
    return dtype if dtype.primitive_bitwidth >= 16 else tl.bfloat16
