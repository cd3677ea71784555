"""Rows that each rank sends to each other one, as many as it says: one launch, and nothing asks the host.

The programs with the lowest ids send, each a part of the rows for every peer. As many others collect, each what the
senders of its number on all ranks have sent. The sender knows where its rows belong in the receiver's result. It puts
them at that place of the receiver's inbox, and tells the receiver so.

What is sent comes in stages, each with one signal to all ranks. While a stage is on its way, the one before it is
copied from the inbox to the result. A peer for which there are no rows costs nothing more than its part of this signal.

Senders wait for nobody, and a GPU starts them first. So nobody waits for a program that has no place to run.

Sizes and offsets are data, so a sender checks them before they address anything. Of a transfer that does not fit into
the operand or the result nothing is sent. The receiver learns that, also where the two disagree about the number of
rows, and then gives no result. The first program that collects tells the host.
"""

import triton
import triton.language as tl

from jaxtaxfree.kernels import shmem

# Places of the kernel's parameters, for reports.
INPUT_OFFSETS = tl.constexpr(2)
SEND_SIZES = tl.constexpr(3)
OUTPUT_OFFSETS = tl.constexpr(4)
RECV_SIZES = tl.constexpr(5)


@triton.jit
def ragged_all_to_all_kernel(
    operand_ptr,  # [ROWS_IN, D]
    output_ptr,  # [ROWS_OUT, D]: the result where nothing arrives
    input_offsets_ptr,  # i32 [WORLD]: the first row for each rank
    send_sizes_ptr,  # i32 [WORLD]: and how many
    output_offsets_ptr,  # i32 [WORLD]: the first row of these in the result of each rank
    recv_sizes_ptr,  # i32 [WORLD]: how many rows come from each rank
    team,
    inbox,  # scratch [ROWS_OUT, D]
    transfers,  # scratch [PROGRAMS, WORLD, 2]: of each rank the first row in the result, and how many there are
    arrived,  # signals [PROGRAMS, WORLD]: STAGES of each rank
    out_ptr,  # [ROWS_OUT, D]
    ROWS_IN: tl.constexpr,
    ROWS_OUT: tl.constexpr,
    D: tl.constexpr,
    WORLD: tl.constexpr,
    PROGRAMS: tl.constexpr,  # that send, and that collect
    CHUNK: tl.constexpr,  # elements that a program moves at a time
    STAGES: tl.constexpr,
):
    me = shmem.start(team)
    box = shmem.scratch(me, inbox, operand_ptr.dtype.element_ty)
    part = tl.program_id(0) % PROGRAMS
    table = shmem.scratch(me, transfers, tl.int32) + part * (2 * WORLD)
    meeting = arrived + part * WORLD
    if tl.program_id(0) < PROGRAMS:
        for stage in range(STAGES):
            for i in range(1, WORLD):
                # In step with the peers, each link carries one stream at a time.
                peer = (me.rank + i) % WORLD
                first, to, count = transfer(
                    input_offsets_ptr, send_sizes_ptr, output_offsets_ptr, peer, ROWS_IN, ROWS_OUT
                )
                if stage == 0:
                    shmem.store(me, table + 2 * me.rank, to, peer)
                    shmem.store(me, table + 2 * me.rank + 1, count, peer)
                dest = shmem.remote(me, box + to.to(tl.int64) * D, peer)
                source = operand_ptr + first.to(tl.int64) * D
                move(dest, source, count * D, part, stage, me.ready, PROGRAMS, STAGES, CHUNK)
            shmem.signal_all(me, meeting + me.rank, WORLD)
    else:
        if part == 0:  # while rows are on their way
            report_transfers(me, input_offsets_ptr, send_sizes_ptr, output_offsets_ptr, ROWS_IN, ROWS_OUT, WORLD)
        ready = me.ready
        fits = me.ready
        _, own_to, own_count = transfer(
            input_offsets_ptr, send_sizes_ptr, output_offsets_ptr, me.rank, ROWS_IN, ROWS_OUT
        )
        for stage in range(STAGES):
            ready &= shmem.wait_all(me, meeting, (me.epoch - 1) * STAGES + stage + 1)
            fits = ready
            for source in range(WORLD):
                _, count = received(me, table, source, own_to, own_count)
                fits &= (count >= 0) & (count == tl.load(recv_sizes_ptr + source))
            if fits:
                for i in range(WORLD):
                    source = (me.rank + WORLD - i) % WORLD
                    to, count = received(me, table, source, own_to, own_count)
                    rows = (box + to.to(tl.int64) * D).to(tl.int64)
                    if source == me.rank:
                        first = tl.load(input_offsets_ptr + me.rank)
                        rows = (operand_ptr + first.to(tl.int64) * D).to(tl.int64)
                    rows = rows.to(operand_ptr.dtype)
                    # The compiler loses that of an address which one of two branches gives, and loads by elements.
                    rows = tl.multiple_of(rows, alignment(D, operand_ptr.dtype.element_ty))
                    move(out_ptr + to.to(tl.int64) * D, rows, count * D, part, stage, True, PROGRAMS, STAGES, CHUNK)

        # The rows that nobody sends; or no result at all.
        for first in range(part * CHUNK, ROWS_OUT * D, PROGRAMS * CHUNK):
            element = first + tl.arange(0, CHUNK)
            rest = element < ROWS_OUT * D
            if fits:
                row = element // D
                for source in range(WORLD):
                    to, count = received(me, table, source, own_to, own_count)
                    rest &= (row < to) | (row >= to + count)
                value = tl.load(output_ptr + element, mask=rest)
            else:
                value = tl.full([CHUNK], nothing(out_ptr.dtype.element_ty), out_ptr.dtype.element_ty)
            tl.store(out_ptr + element, value, mask=rest)

        if ready & (not fits) & (part == 0):
            report_senders(me, table, recv_sizes_ptr, own_to, own_count)
    shmem.finish(me)


@triton.jit
def transfer(
    input_offsets_ptr, send_sizes_ptr, output_offsets_ptr, peer, ROWS_IN: tl.constexpr, ROWS_OUT: tl.constexpr
):
    """What this rank sends to a peer: its first row here, its first row there, and how many; -1 if that cannot be."""
    first = tl.load(input_offsets_ptr + peer)
    count = tl.load(send_sizes_ptr + peer)
    to = tl.load(output_offsets_ptr + peer)
    fits = (count >= 0) & (first >= 0) & (first <= ROWS_IN - count) & (to >= 0) & (to <= ROWS_OUT - count)
    return tl.where(fits, first, 0), tl.where(fits, to, 0), tl.where(fits, count, -1)


@triton.jit
def report_transfers(
    me, input_offsets_ptr, send_sizes_ptr, output_offsets_ptr,
    ROWS_IN: tl.constexpr, ROWS_OUT: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Reports the first peer to which `transfer` sends nothing: of its size and offsets the first that is wrong."""
    peers = tl.arange(0, triton.next_power_of_2(WORLD))
    _, _, counts = transfer(
        input_offsets_ptr, send_sizes_ptr, output_offsets_ptr, tl.minimum(peers, WORLD - 1), ROWS_IN, ROWS_OUT
    )
    peer = tl.min(tl.where(counts < 0, peers, WORLD), 0)
    if peer < WORLD:
        first = tl.load(input_offsets_ptr + peer)
        count = tl.load(send_sizes_ptr + peer)
        to = tl.load(output_offsets_ptr + peer)
        MOST: tl.constexpr = min(ROWS_IN, ROWS_OUT)
        of_size = (count < 0) | (count > MOST)
        of_first = (first < 0) | (first > ROWS_IN - count)
        operand = tl.where(of_size, SEND_SIZES, tl.where(of_first, INPUT_OFFSETS, OUTPUT_OFFSETS))
        value = tl.where(of_size, count, tl.where(of_first, first, to))
        most = tl.where(of_size, MOST, tl.where(of_first, ROWS_IN, ROWS_OUT) - count)
        shmem.report_garbage(me, operand, peer, value, 0, most, 0)


@triton.jit
def received(me, table, source, own_to, own_count):
    """The first row in this rank's result of what a source sends, and how many there are; -1 if it sends nothing."""
    other = source != me.rank
    to = tl.load(table + 2 * source, mask=other, other=0)
    count = tl.load(table + 2 * source + 1, mask=other, other=0)
    return tl.where(other, to, own_to), tl.where(other, count, own_count)


@triton.jit
def report_senders(me, table, recv_sizes_ptr, own_to, own_count):
    """Reports the first source that sends nothing, or another number of rows than this rank awaits."""
    for source in range(me.world):  # which is no constant: unrolled, the loop takes registers of the whole kernel
        _, count = received(me, table, source, own_to, own_count)
        awaited = tl.load(recv_sizes_ptr + source)
        if ((count < 0) & (source != me.rank)) | ((count >= 0) & (count != awaited)):
            shmem.report_garbage(me, tl.where(count < 0, -1, RECV_SIZES), source, awaited, count, count, 1)


@triton.jit
def move(
    dest, source, size, part, stage, there,
    PROGRAMS: tl.constexpr, STAGES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Moves what of `size` elements belongs to a part and to a stage.

    Args:
      size: i32; less than 0 for none.
      there: whether to.
    """
    chunks = tl.cdiv(tl.maximum(size, 0), CHUNK * PROGRAMS)  # of each part
    begin = chunks * stage // STAGES
    end = chunks * (stage + 1) // STAGES
    for chunk in range(begin, end):
        element = (chunk * PROGRAMS + part) * CHUNK + tl.arange(0, CHUNK)
        mask = (element < size) & there
        tl.store(dest + element, tl.load(source + element, mask=element < size), mask=mask)


@triton.constexpr_function
def alignment(elements, dtype):
    """The bytes, up to 16, that divide the places where rows of so many elements begin."""
    nbytes = elements * dtype.primitive_bitwidth // 8
    return min(16, nbytes & -nbytes)


@triton.constexpr_function
def nothing(dtype):
    """What stands for no result: NaN; of integers all bits, which is NaN of the 8-bit floats that travel as such."""
    if dtype.is_floating():
        return float("nan")
    return 2**dtype.primitive_bitwidth - 1 if dtype.is_int_unsigned() else -1
