"""Several right-hand sides for one left-hand side: [K, N] of one K, and of widths of their own.

A kernel takes them as its bundle `weights`, its constant N is the tuple of their widths, and ACTIVATION one of as many
activations. Blocks of columns are numbered over all of them, so that no block has columns of two. With a single one, or
with one and its gate, N is a number, and so is what these functions take.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def count(N):
    """How many right-hand sides there are."""
    return len(N) if isinstance(N, tuple | tl.tuple) else 1


@triton.constexpr_function
def of(VALUE, NUMBER):
    """What a constant says of one of them: its width, or its activation."""
    return VALUE[NUMBER] if isinstance(VALUE, tuple | tl.tuple) else VALUE


@triton.constexpr_function
def blocks_before(N, BLOCK_N, NUMBER):
    """How many blocks of columns come before those of one of them; with NUMBER `count(N)` all."""
    widths = list(N) if isinstance(N, tuple | tl.tuple) else [N]
    return sum(-(-int(width) // BLOCK_N) for width in widths[:NUMBER])


@triton.jit
def block_of(block, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """The number of the right-hand side to which a block of columns belongs, or None if there is one; and which of its
    blocks it is.
    """
    COUNT: tl.constexpr = count(N)
    if COUNT == 1:
        number: tl.constexpr = None
    else:
        number = block * 0
        before = block * 0
        for i in tl.static_range(1, COUNT):
            number = tl.where(block >= blocks_before(N, BLOCK_N, i), i, number)
            before = tl.where(block >= blocks_before(N, BLOCK_N, i), blocks_before(N, BLOCK_N, i), before)
        block -= before
    return number, block


@triton.jit
def is_number(rhs, NUMBER: tl.constexpr):
    """Whether this is the number of the right-hand side, which is None if there is one."""
    if rhs is None:
        found: tl.constexpr = True
    else:
        found = rhs == NUMBER
    return found


@triton.jit
def weights_of(weights, N: tl.constexpr, NUMBER: tl.constexpr):
    """What lhs is multiplied by for one of them: it alone, or with its gate."""
    SEVERAL: tl.constexpr = count(N) > 1
    if SEVERAL:
        found = (weights[NUMBER],)
    else:
        found = weights
    return found
