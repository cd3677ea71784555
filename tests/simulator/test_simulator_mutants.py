"""Faults planted into the real kernels: the simulator must find each, by the right detector, within 50 seeds."""

import dataclasses
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxtaxfree.kernels import shmem
from jaxtaxfree.kernels.blocks import hopper_few
from jaxtaxfree.simulator import (
    DataRaceError,
    DeadlockError,
    EpochMismatchError,
    MbarrierError,
    MessageError,
    MissingFenceError,
    OutOfBoundsError,
    SignalCountError,
    SimulationError,
    UninitializedReadError,
    WaitOrderError,
    WrongPeerError,
)
from tests.helpers.simulator_kernels import KERNELS, load

SEEDS = 10
MOST_SEEDS = 50  # for a fault that few interleavings show
KERNEL = {kernel.name: kernel for kernel in KERNELS}

# What is read too early was written by nobody yet, or is being written.
TOO_EARLY = (DataRaceError, UninitializedReadError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault.

    Attributes:
      name: in the names of tests.
      kernel: in which kernel's calls it shows.
      api: the fault is in the device API, not in the kernel.
      product: it is in `hopper_few`, not in the kernel's own file.
      edits: (text, what to put in its place); each text occurs once, or as often as a third item says.
      errors: of which kind the finding must be.
      shape: of the call; None for all shapes of the kernel.
      world: number of ranks.
    """

    name: str
    kernel: str
    edits: tuple[tuple, ...]
    errors: tuple[type[SimulationError], ...]
    api: bool = False
    product: bool = False
    shape: tuple | None = None
    world: int = 3


SIGNAL = 'tl.atomic_add(_signal_of(me, index, peer), 1, mask=mask & me.ready, sem="release", scope="sys")'
PUSH_LOOP = """            for at in range(begin, tl.minimum(begin + unit_size, size), CHUNK):
                element = at + tl.arange(0, CHUNK)
                shmem.put(me, dest + element, source + element, peer, element < size)
"""
PUSH_SIGNAL = "            shmem.signal(me, arrived + me.rank * row_blocks + row_block, peer)\n"
TILE_WAIT = "shmem.wait(me, arrived + source * tl.cdiv(M, BLOCK_M) + row_block, me.epoch * UNITS, source)"
TILE_STORES = """    if slot < sent:
        # A tile lies whole and in one piece, whatever the sizes: all stores are 16 bytes wide.
        element = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, half)[None, :]
        home = tl.where(waits, place, inbox + slot.to(tl.int64) * size) + element
        tl.debug_barrier()  # all threads have read what was in this place
        shmem.store(me, home, left.to(wire), next_hop)
        shmem.store(me, home + half, right.to(wire), next_hop)
"""
TILE_SIGNALS = """    # One signal for this program's tile and one for the tile that it carried.
    own = tl.arange(0, 2) == 0
    index = arrived + tl.where(own, tl.where(waits, sent, 0) + slot, carried)
    shmem.signal(me, index, tl.where(own, next_hop, receiver), tl.where(own, slot < sent, carries))
"""
CARRY_WAIT = "shmem.wait(me, arrived + sent + carried, me.epoch, me.rank)"
CARRY_REST = """    for at in range(tl.cdiv(K, BLOCK_K) * PART, count, CHUNK):
        word = at + tl.arange(0, CHUNK)
        tl.store(dest + word, tl.load(source + word, mask=word < count), mask=word < count)
"""
PARTIAL_WAIT = "shmem.wait(me, arrived + i * tiles_a_rank + tile, me.epoch, (me.rank + WORLD - 1 - i) % WORLD)"
SMALL_STORES = """    for i in tl.static_range(1, WORLD + 1):
        owner = (me.rank + i) % WORLD
        dest = mine + (m - owner * M)[:, None] * N + n[None, :]
        owned = ((m >= owner * M) & (m < (owner + 1) * M))[:, None]
        shmem.store(me, dest, product.to(inbox.dtype.element_ty), owner, owned & (n[None, :] < N))
"""
SMALL_SIGNAL = """    meeting = arrived + tl.program_id(0) * WORLD
    shmem.signal_all(me, meeting + me.rank, WORLD)
"""
SEND = 'words, mask=mask & me.ready, sem="relaxed", scope="sys")'
SPLIT_SENT = "    send_partial(me, acc * shift[:, None], sent, total * shift, acc_at, sums_at, row, row < rows, HV)\n"
MERGED_SENT = "            shmem.send(me, sums_at, sent, peer, wanted & (h == 0))\n"
FOUR_RECEIVED = "four, came = receive(me, four_ptrs, of[:, :, None], four_mask)\n"
REDUCED_STEP = "    step = tl.program_id(0) // tiles_a_rank\n"
PART_WAIT = "shmem.wait(me, arrived + slot, me.epoch, (me.rank + WORLD - 1 - i) % WORLD)"
SUM_WAIT = "shmem.wait(me, added + place, me.epoch, owner)"
RIGHT_HALF = """                give_out(
                    me, right, last, out, outbox + half, row, rows, column + half,
                    N, WORLD, BLOCK_M, half, BLOCK_N, ACTIVATION,
                )  # fmt: skip
"""
SUM_SIGNAL = "                shmem.signal_all(me, added + place, WORLD)\n"
TILE_SENT = "        send(me, partials, words, within, column, OWNED, COLUMNS, BLOCK_N, peer)\n"
SUMS_SENT = "        send(me, sums, words, within, column, OWNED, COLUMNS, BLOCK_N, (me.rank + i) % WORLD)\n"
CUSTOM_STORES = """    for i in range(WORLD):
        shmem.store(me, inbox_ptr + me.rank * SIZE + element, value, (me.rank + i) % WORLD, mask)
"""
CUSTOM_SIGNALS = """    for i in range(WORLD):
        shmem.signal(me, arrived + me.rank * tl.num_programs(0) + block, (me.rank + i) % WORLD)
"""
# Shapes of kernels for few rows whose tiles four programs share, and all four add up.
SHARED_GATHER = (11, 24, 136, 4, 256, 32, 2, 4)
SHARED_SCATTER = (11, 24, 136, 0, True, None, 2, 4)
MORE_GATHER = (11, 56, 104, 3, 64, 32, 2, 2, 16, 3)
MORE_SCATTER = (19, 40, 72, 0, False, None, 2, 2, 16, 4)
SHARED_WAIT = (
    "            came = shmem.wait(me, left + (number - WHOLE), me.epoch * signals(SPLITS, ADDERS), me.rank)\n"
)
SHARED_SIGNAL = "            shmem.signal(me, left + (number - WHOLE), me.rank)\n"
LEAVING = "        for i in gl.static_range(len(parts)):\n            if adder"
DECODE_WAIT = "            ready = shmem.wait_all(me, arrived + part * WORLD, me.epoch * SIGNALS) & ready\n"
DECODE_FENCE = "            shmem.fence_proxy()\n"
DECODE_SIGNAL = "        shmem.signal_all(me, arrived + part * WORLD + me.rank, WORLD)\n"

CLEARED = "column, WORLD, OWNED, PITCH, BLOCK_N, ADDERS, ADD_ROWS)\n"
IN_TWO_SHOTS = (5, 24, 136, 2, False, 1, 2, 3)
SEVERAL_ROUNDS = (21, 24, 136, 1, False, 1, 2, 2)
MUTANTS = (
    Mutant(
        name="no barrier before the publish",
        kernel="all_gather_matmul",
        api=True,
        edits=((f"    tl.debug_barrier()\n    {SIGNAL}", f"    {SIGNAL}"),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="no barrier before the publish to all",
        kernel="all_gather_matmul_few",
        api=True,
        edits=(("    tl.debug_barrier()\n    peers = tl.arange", "    peers = tl.arange"),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="publish before the last store",
        kernel="all_gather_matmul",
        edits=((PUSH_LOOP + PUSH_SIGNAL, PUSH_SIGNAL + PUSH_LOOP),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="publish before the stores",
        kernel="custom_kernel",
        edits=((CUSTOM_STORES + CUSTOM_SIGNALS, CUSTOM_SIGNALS + CUSTOM_STORES),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="GPU scope",
        kernel="all_gather_matmul",
        api=True,
        edits=((SIGNAL, SIGNAL.replace('"sys"', '"gpu"')),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="relaxed publish",
        kernel="all_gather_matmul",
        api=True,
        edits=((SIGNAL, SIGNAL.replace('"release"', '"relaxed"')),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="relaxed wait",
        kernel="all_gather_matmul_few",
        api=True,
        edits=(('0, sem="acquire", scope=SCOPE)', '0, sem="relaxed", scope=SCOPE)', 2),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="no wait",
        kernel="all_gather_matmul",
        edits=((TILE_WAIT, "me.ready"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no wait in the custom kernel",
        kernel="custom_kernel",
        edits=(("shmem.wait(me, arrived + source * tl.num_programs(0) + block, me.epoch, source)", "me.ready"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        # Of three ranks, whose numbers add up to three: the one that is neither this rank nor the source.
        name="wait for another peer",
        kernel="all_gather_matmul",
        edits=((TILE_WAIT, TILE_WAIT.replace("source * tl", "(me.world - me.rank - source) * tl")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="count of the previous epoch",
        kernel="all_gather_matmul",
        edits=((TILE_WAIT, TILE_WAIT.replace("me.epoch * UNITS", "(me.epoch - 1) * UNITS")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="count of the previous epoch for all",
        kernel="all_gather_matmul_few",
        edits=(("me.epoch * PUSHERS", "(me.epoch - 1) * PUSHERS"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="single buffering",
        kernel="all_gather_matmul",
        api=True,
        edits=(("(me.epoch & 1) * lines", "(me.epoch & 0) * lines"),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="single buffering in the custom kernel",
        kernel="custom_kernel",
        api=True,
        edits=(("(me.epoch & 1) * lines", "(me.epoch & 0) * lines"),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="reset of a signal by a store",
        kernel="all_gather_matmul_few",
        edits=(
            (
                "        ready = shmem.wait_all(me, arrived, me.epoch * PUSHERS)\n",
                "        ready = shmem.wait_all(me, arrived, me.epoch * PUSHERS)\n"
                "        tl.store(shmem._signal_of(me, arrived, me.rank), 0)\n",
            ),
        ),
        errors=(SignalCountError,),
    ),
    Mutant(
        name="reset of a signal by an exchange",
        kernel="custom_kernel",
        edits=(
            (
                "    shmem.finish(me)",
                '    tl.atomic_xchg(shmem._signal_of(me, arrived, me.rank), 0, sem="relaxed", scope="sys")\n'
                "    shmem.finish(me)",
            ),
        ),
        errors=(SignalCountError,),
    ),
    Mutant(
        name="read one tile too far",
        kernel="all_gather_matmul",
        edits=(
            (
                "rows_of = (inbox + source.to(tl.int64) * M * K).to(tl.int64)",
                "rows_of = (inbox + (source.to(tl.int64) * M + BLOCK_M) * K).to(tl.int64)",
            ),
        ),
        errors=(*TOO_EARLY, OutOfBoundsError),
    ),
    Mutant(
        name="push one block too far",
        kernel="custom_kernel",
        edits=(("inbox_ptr + me.rank * SIZE + element, value", "inbox_ptr + me.rank * SIZE + BLOCK + element, value"),),
        errors=(*TOO_EARLY, OutOfBoundsError),
    ),
    Mutant(
        name="pushers last in the grid",
        kernel="all_gather_matmul",
        edits=(
            ("if tl.program_id(0) < PUSHERS:", "if tl.program_id(0) >= tl.num_programs(0) - PUSHERS:"),
            ("tile = tl.program_id(0) - PUSHERS", "tile = tl.program_id(0)"),
            ("pusher = tl.program_id(0)\n", "pusher = tl.program_id(0) - (tl.num_programs(0) - PUSHERS)\n"),
        ),
        errors=(WaitOrderError,),
    ),
    Mutant(
        name="wait for a higher id",
        kernel="custom_kernel",
        edits=(
            (
                "    for source in range(WORLD):\n",
                "    for source in range(WORLD):\n"
                "        above = tl.minimum(block + 1, tl.num_programs(0) - 1)\n"
                "        shmem.wait(me, arrived + source * tl.num_programs(0) + above, me.epoch, source)\n",
            ),
        ),
        errors=(WaitOrderError,),
    ),
    Mutant(
        name="store past the end",
        kernel="all_gather_matmul",
        edits=(
            (
                "dest = inbox + (me.rank.to(tl.int64) * M * K + first)",
                "dest = inbox + (me.rank.to(tl.int64) * 0 + WORLD * M * K + first)",
            ),
        ),
        errors=(OutOfBoundsError,),
    ),
    Mutant(
        name="no mask",
        kernel="all_gather_matmul_few",
        edits=(("mask=element < size)", "mask=element >= 0)"),),
        errors=(OutOfBoundsError,),
        shape=(3, 21, 19, 2, 32),
    ),
    Mutant(
        name="signal once too often",
        kernel="all_gather_matmul",
        edits=((PUSH_SIGNAL, PUSH_SIGNAL + PUSH_SIGNAL),),
        errors=(SignalCountError,),
        shape=(5, 19, 9, 1, 1, 32),
    ),
    Mutant(
        name="signal once too seldom",
        kernel="all_gather_matmul",
        edits=((PUSH_SIGNAL, PUSH_SIGNAL.replace("    shmem", "    if unit > 0:\n                shmem")),),
        errors=(DeadlockError,),
    ),
    Mutant(
        name="no rows for this rank itself",
        kernel="all_gather_matmul_few",
        edits=(("tl.static_range(1, WORLD + 1)", "tl.static_range(1, WORLD)"),),
        errors=(UninitializedReadError,),
    ),
    Mutant(
        name="no finish in the pushers",
        kernel="all_gather_matmul",
        edits=(
            (
                ")  # fmt: skip\n    shmem.finish(me)\n",
                ")  # fmt: skip\n        shmem.finish(me)\n",
            ),
        ),
        errors=(EpochMismatchError,),
    ),
    Mutant(
        name="no wait for the partial sums",
        kernel="matmul_reduce_scatter",
        edits=((PARTIAL_WAIT, "me.ready"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="partial sums of the previous epoch",
        kernel="matmul_reduce_scatter",
        edits=((PARTIAL_WAIT, PARTIAL_WAIT.replace("me.epoch", "me.epoch - 1")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="wait for another tile's partial sums",
        kernel="matmul_reduce_scatter",
        edits=((PARTIAL_WAIT, PARTIAL_WAIT.replace(" + tile", "")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="one peer's partial sums for all",
        kernel="matmul_reduce_scatter",
        edits=((PARTIAL_WAIT, PARTIAL_WAIT.replace("i * tiles_a_rank + ", "")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="publish before the tile is stored",
        kernel="matmul_reduce_scatter",
        edits=((TILE_STORES + TILE_SIGNALS, TILE_SIGNALS + TILE_STORES),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no barrier before a tile is published",
        kernel="matmul_reduce_scatter",
        api=True,
        edits=((f"    tl.debug_barrier()\n    {SIGNAL}", f"    {SIGNAL}"),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="a tile published twice",
        kernel="matmul_reduce_scatter",
        edits=((TILE_SIGNALS, TILE_SIGNALS + TILE_SIGNALS),),
        errors=(SignalCountError, *TOO_EARLY),
    ),
    Mutant(
        name="own tiles first",
        kernel="matmul_reduce_scatter",
        edits=(("slot = tl.program_id(0)", "slot = tl.num_programs(0) - 1 - tl.program_id(0)"),),
        errors=(WaitOrderError,),
    ),
    Mutant(
        name="single buffering of partial sums",
        kernel="matmul_reduce_scatter",
        api=True,
        edits=(("(me.epoch & 1) * lines", "(me.epoch & 0) * lines"),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="partial tiles in the place of another rank's",
        kernel="matmul_reduce_scatter",
        edits=(
            ("inbox + slot.to(tl.int64) * size", "inbox + tile.to(tl.int64) * size"),
            ("inbox + carried.to(tl.int64) * size", "inbox + (carried % tiles_a_rank).to(tl.int64) * size"),
        ),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no wait for the tile to carry",
        kernel="matmul_reduce_scatter",
        edits=((CARRY_WAIT, "me.ready"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="tile to carry of the previous epoch",
        kernel="matmul_reduce_scatter",
        edits=((CARRY_WAIT, CARRY_WAIT.replace("me.epoch", "me.epoch - 1")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="published before the rest is carried",
        kernel="matmul_reduce_scatter",
        edits=((CARRY_REST, ""), (TILE_SIGNALS, TILE_SIGNALS + CARRY_REST)),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="too few places in the outbox",
        kernel="matmul_reduce_scatter",
        edits=(("slot % LAG * size", "slot % (LAG // 2 + 1) * size"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="carried by a program of too high an id",
        kernel="matmul_reduce_scatter",
        edits=(
            (" & (slot <= sent + carried % tiles_a_rank)", ""),
            ("waits = slot + LAG <= sent + tile", "waits = slot + LAG < tl.num_programs(0)"),
        ),
        errors=(WaitOrderError,),
    ),
    Mutant(
        name="publish before the rows are stored",
        kernel="matmul_reduce_scatter_few",
        edits=((SMALL_STORES + SMALL_SIGNAL, SMALL_SIGNAL + SMALL_STORES),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no wait for the ranks' rows",
        kernel="matmul_reduce_scatter_few",
        edits=(("shmem.wait_all(me, meeting, me.epoch)", "me.ready"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="rows of the previous epoch",
        kernel="matmul_reduce_scatter_few",
        edits=(("shmem.wait_all(me, meeting, me.epoch)", "shmem.wait_all(me, meeting, me.epoch - 1)"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no rows for this rank's own sum",
        kernel="matmul_reduce_scatter_few",
        edits=(("tl.static_range(1, WORLD + 1)", "tl.static_range(1, WORLD)"),),
        errors=(UninitializedReadError,),
    ),
    Mutant(
        name="wait before the signal",
        kernel="matmul_reduce_scatter_few",
        edits=(
            ("    shmem.signal_all(me, meeting + me.rank, WORLD)\n", ""),
            (
                "    ready = shmem.wait_all(me, meeting, me.epoch)\n",
                "    ready = shmem.wait_all(me, meeting, me.epoch)\n"
                "    shmem.signal_all(me, meeting + me.rank, WORLD)\n",
            ),
        ),
        errors=(DeadlockError,),
    ),
    Mutant(
        name="single buffering of rows",
        kernel="matmul_reduce_scatter_few",
        api=True,
        edits=(("(me.epoch & 1) * lines", "(me.epoch & 0) * lines"),),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="no block to one peer",
        kernel="psum",
        edits=(
            (
                "for i in tl.static_range(1, WORLD):\n            to = inbox(",
                "for i in tl.static_range(2, WORLD):\n            to = inbox(",
            ),
        ),
        errors=(DeadlockError, UninitializedReadError),
    ),
    Mutant(
        name="sums in the place of another rank",
        kernel="psum",
        edits=(("block = rank * tl.num_programs(0)", "block = rank // 2 * 2 * tl.num_programs(0)"),),
        errors=(MessageError, DataRaceError, UninitializedReadError, DeadlockError),
    ),
    Mutant(
        name="one signal for both shots",
        kernel="psum",
        edits=(("all_arrived = arrived + tl.num_programs(0) * WORLD", "all_arrived = arrived"),),
        errors=(SignalCountError, *TOO_EARLY),
        shape=(70, 1, {"protocol": "signals", "shots": 2, "block": 16}),
    ),
    Mutant(
        name="no wait for what the ranks gather",
        kernel="all_gather",
        edits=(("shmem.wait_all(me, arrived + tl.program_id(0) * WORLD, me.epoch)", "me.ready"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="words taken as they are",
        kernel="all_gather",
        edits=(
            (
                "            blocks = blocks + (unpack(words[rank], dtype),)\n",
                "            blocks = blocks + (unpack(tl.load(inbox(me, region, rank, tl.int32, WORDS)), dtype),)\n",
            ),
        ),
        errors=(MessageError, *TOO_EARLY),
    ),
    Mutant(
        name="no part to one peer",
        kernel="all_to_all",
        edits=(
            (
                "for i in tl.static_range(1, WORLD + 1):\n            to = inbox(",
                "for i in tl.static_range(2, WORLD + 1):\n            to = inbox(",
            ),
        ),
        errors=(DeadlockError, UninitializedReadError),
    ),
    Mutant(
        name="parts of the previous epoch",
        kernel="all_to_all",
        edits=(
            (
                "shmem.wait_all(me, arrived + tl.program_id(0) * WORLD, me.epoch)",
                "shmem.wait_all(me, arrived + tl.program_id(0) * WORLD, me.epoch - 1)",
            ),
        ),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="last word not sent",
        kernel="psum_scatter",
        edits=(
            (
                "send_words(me, to, words, (me.rank + i) % WORLD, there)",
                "send_words(me, to, words, (me.rank + i) % WORLD, tl.arange(0, WORDS) < WORDS - 1)",
            ),
        ),
        errors=(DeadlockError,),
    ),
    Mutant(
        name="wait before the signal of parts",
        kernel="psum_scatter",
        edits=(
            ("        shmem.signal_all(me, arrived + tl.program_id(0) * WORLD + me.rank, WORLD, there)\n", ""),
            (
                "        came = shmem.wait_all(me, arrived + tl.program_id(0) * WORLD, me.epoch)\n",
                "        came = shmem.wait_all(me, arrived + tl.program_id(0) * WORLD, me.epoch)\n"
                "        shmem.signal_all(me, arrived + tl.program_id(0) * WORLD + me.rank, WORLD, there)\n",
            ),
        ),
        errors=(DeadlockError,),
    ),
    Mutant(
        name="single buffering of parts",
        kernel="psum_scatter",
        api=True,
        edits=(("(me.epoch & 1) * lines", "(me.epoch & 0) * lines"),),
        errors=(MessageError, DataRaceError),
    ),
    Mutant(
        name="merged result not sent to one peer",
        kernel="decode_attention",
        edits=(("(first + group < WORLD)", "(first + group > 0) & (first + group < WORLD)"),),
        errors=(DeadlockError,),
    ),
    Mutant(
        name="sums sent into the place of another rank",
        kernel="decode_attention",
        edits=(("sums_from + me.rank * (results * 2)", "sums_from + me.rank // 2 * (results * 2)"),),
        errors=(MessageError, DataRaceError, WrongPeerError),
    ),
    Mutant(
        name="sums received and the rest loaded",
        kernel="decode_attention",
        api=True,
        edits=(
            (FOUR_RECEIVED, "four = tl.load(four_ptrs, mask=four_mask).to(tl.float32, bitcast=True)\n"),
            ("(came & both_came, missing, part + 1)", "(both_came, missing, part + 1)"),
        ),
        errors=(MessageError,),
    ),
    Mutant(
        name="no finish in the attending programs",
        kernel="decode_attention",
        edits=((SPLIT_SENT + "    shmem.finish(me)\n", SPLIT_SENT),),
        errors=(EpochMismatchError,),
    ),
    Mutant(
        name="heads sent to the wrong rank",
        kernel="decode_attention",
        edits=(("(head // N_OUT == peer)", "(head // N_OUT == me.rank)"),),
        errors=(MessageError, DeadlockError, WaitOrderError),
    ),
    Mutant(
        name="wrong call bit",
        kernel="decode_attention",
        api=True,
        edits=(("(((me.epoch + 1) >> 1) & 1)", "((me.epoch >> 1) & 1)"),),
        errors=(MessageError,),
    ),
    Mutant(
        name="single buffering of messages",
        kernel="decode_attention",
        api=True,
        edits=(("(me.epoch & 1) * lines", "(me.epoch & 0) * lines"),),
        errors=(MessageError, DataRaceError),
    ),
    Mutant(
        name="messages at GPU scope",
        kernel="decode_attention",
        api=True,
        edits=((SEND, SEND.replace('"sys"', '"gpu"'), 2),),
        errors=(MessageError,),
    ),
    Mutant(
        name="merging programs first",
        kernel="decode_attention",
        edits=(("program = tl.program_id(0)\n", "program = (tl.program_id(0) + attending) % tl.num_programs(0)\n"),),
        errors=(WaitOrderError,),
    ),
    Mutant(
        name="partial result sent twice",
        kernel="decode_attention",
        edits=((SPLIT_SENT, SPLIT_SENT + SPLIT_SENT),),
        errors=(MessageError,),
    ),
    Mutant(
        name="merged result sent twice",
        kernel="decode_attention",
        edits=((MERGED_SENT, MERGED_SENT + MERGED_SENT),),
        errors=(MessageError,),
    ),
    Mutant(
        name="last row not sent",
        kernel="decode_attention",
        edits=((SPLIT_SENT, SPLIT_SENT.replace("row < rows", "row < rows - 1")),),
        errors=(DeadlockError,),
    ),
    Mutant(
        name="no wait for the parts of a sum",
        kernel="matmul_all_reduce",
        edits=((PART_WAIT, "me.ready"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no wait for a sum",
        kernel="matmul_all_reduce",
        edits=((SUM_WAIT, "me.ready"),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="sums of the previous epoch",
        kernel="matmul_all_reduce",
        edits=((SUM_WAIT, SUM_WAIT.replace("me.epoch", "me.epoch - 1")),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="publish before the right half is stored",
        kernel="matmul_all_reduce",
        edits=((RIGHT_HALF + SUM_SIGNAL, SUM_SIGNAL + RIGHT_HALF),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="a sum published twice",
        kernel="matmul_all_reduce",
        edits=((SUM_SIGNAL, SUM_SIGNAL + SUM_SIGNAL),),
        errors=(SignalCountError, *TOO_EARLY),
    ),
    Mutant(
        name="copies before the products",
        kernel="matmul_all_reduce",
        edits=(
            (
                REDUCED_STEP,
                REDUCED_STEP.replace(
                    "tl.program_id(0) // tiles_a_rank", "(tl.program_id(0) // tiles_a_rank + WORLD) % (2 * WORLD - 1)"
                ),
            ),
        ),
        errors=(WaitOrderError,),
    ),
    Mutant(
        name="sums of all tiles in one place",
        kernel="matmul_all_reduce",
        edits=(("+ place.to(tl.int64) * size", "+ owner.to(tl.int64) * size"),),
        errors=TOO_EARLY,
        shape=(33, 25, 21),
    ),
    Mutant(
        name="tile not sent to one peer",
        kernel="matmul_all_reduce_few",
        edits=((TILE_SENT, "        if i > 1:\n    " + TILE_SENT),),
        shape=(3, 21, 19, 1, True, True, 2),
        errors=(DeadlockError,),
    ),
    Mutant(
        name="tile sent twice",
        kernel="matmul_all_reduce_few",
        edits=((TILE_SENT, TILE_SENT + TILE_SENT),),
        errors=(MessageError,),
        shape=(7, 21, 33, 2, True, False, 1),
    ),
    Mutant(
        name="columns past the end not sent",
        kernel="matmul_all_reduce_few",
        edits=(("& (n >= 0)\n    shmem", "& (column + n < COLUMNS - 1)\n    shmem"),),
        shape=(3, 21, 19, 1, True, True, 2),
        errors=(DeadlockError,),
    ),
    Mutant(
        name="parts of all ranks in one place",
        kernel="matmul_all_reduce_few",
        edits=(("place = me.rank.to(tl.int64) * (", "place = me.rank.to(tl.int64) * (0 * "),),
        errors=(MessageError,),
        shape=(7, 21, 33, 2, True, False, 1),
    ),
    Mutant(
        name="adding programs first",
        kernel="matmul_all_reduce_few",
        edits=(("tl.program_id(0)", "((tl.program_id(0) + multiplying) % tl.num_programs(0))", 4),),
        errors=(WaitOrderError,),
        shape=(5, 17, 9, 2, True, True, 4),
    ),
    Mutant(
        name="the first row block adds",
        kernel="matmul_all_reduce_few",
        edits=(("row_block == row_blocks - 1", "row_block == 0"),),
        errors=(WaitOrderError,),
        shape=(18, 9, 17, 2, False, False, 2),
    ),
    Mutant(
        name="sums sent twice",
        kernel="matmul_all_reduce_few",
        edits=((SUMS_SENT, SUMS_SENT + SUMS_SENT),),
        errors=(MessageError,),
        shape=(5, 9, 5, 2, True, True, 2),
    ),
    Mutant(
        name="rows of another rank sent as well",
        kernel="matmul_all_reduce_few",
        edits=(("(m >= 0) & (m < OWNED)", "(m < OWNED)"),),
        errors=(MessageError, DataRaceError, OutOfBoundsError, WrongPeerError),
        shape=(18, 9, 17, 2, False, False, 2),
    ),
    Mutant(
        name="sums of all parts in one place",
        kernel="matmul_all_reduce_few",
        edits=(("        within = row + tl.arange(0, ADD_ROWS)\n", "        within = tl.arange(0, ADD_ROWS)\n"),),
        errors=(MessageError,),
        shape=(9, 33, 5, 2, False, True, 1),
    ),
    Mutant(
        name="single buffering of parts and sums",
        kernel="matmul_all_reduce_few",
        api=True,
        edits=(("(me.epoch & 1) * lines", "(me.epoch & 0) * lines"),),
        errors=(MessageError, DataRaceError),
    ),
    Mutant(
        name="no wait for the rows",
        kernel="all_gather_matmul_hopper_few",
        edits=((DECODE_WAIT, ""),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="wait for the first part alone",
        kernel="all_gather_matmul_hopper_few",
        edits=((DECODE_WAIT, "            if part == 0:\n    " + DECODE_WAIT),),
        errors=TOO_EARLY,
        shape=(3, 24, 136, 2, 32, 96, 2, 1),
    ),
    Mutant(
        name="wait for one pusher of each rank",
        kernel="all_gather_matmul_hopper_few",
        edits=(("me.epoch * SIGNALS) & ready", "(me.epoch - 1) * SIGNALS + 1) & ready"),),
        errors=TOO_EARLY,
        shape=(3, 24, 136, 2, 32, 96, 2, 1),
    ),
    Mutant(
        name="no proxy fence",
        kernel="all_gather_matmul_hopper_few",
        edits=((DECODE_FENCE, ""),),
        errors=(MissingFenceError,),
    ),
    Mutant(
        name="proxy fence before the wait",
        kernel="all_gather_matmul_hopper_few",
        edits=((DECODE_WAIT + DECODE_FENCE, DECODE_FENCE + DECODE_WAIT),),
        errors=(MissingFenceError,),
    ),
    Mutant(
        name="publish before the rows are stored",
        kernel="all_gather_matmul_hopper_few",
        edits=((DECODE_SIGNAL, ""), ("        for at in", DECODE_SIGNAL + "        for at in")),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="no wait for an empty buffer",
        kernel="all_gather_matmul_hopper_few",
        product=True,
        edits=(("            mbarrier.wait(ring.empty.index(stage), phase)\n", ""),),
        errors=(DataRaceError, MbarrierError),
    ),
    Mutant(
        name="told before it is known",
        kernel="all_gather_matmul_hopper_few",
        edits=(("    mbarrier.wait(rows.told, 0)\n", ""),),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="two copies of the rows in one place",
        kernel="all_gather_matmul_hopper_few",
        edits=(
            (
                "inbox = shmem.scratch(me, gathered, ring.lhs.dtype)",
                "inbox = shmem.scratch(me._replace(epoch=me.epoch + 1), gathered, weights[0].dtype)",
            ),
        ),
        errors=TOO_EARLY,
    ),
    Mutant(
        name="parts that are not cleared",
        kernel="matmul_reduce_hopper_few",
        edits=((f"        clear(me, partials, WIRE, late, row, {CLEARED}", ""),),
        errors=(MessageError,),
    ),
    Mutant(
        name="sums that are not cleared",
        kernel="matmul_reduce_hopper_few",
        edits=((f"            clear(me, sums, OUT, late, row, {CLEARED}", ""),),
        errors=(MessageError,),
        shape=IN_TWO_SHOTS,
    ),
    Mutant(
        name="parts of other rows cleared",
        kernel="matmul_reduce_hopper_few",
        edits=(("clear(me, partials, WIRE, late, row,", "clear(me, partials, WIRE, late, 8 * adder,"),),
        errors=(MessageError,),
        shape=SEVERAL_ROUNDS,
    ),
    Mutant(
        name="words that are cleared to something else",
        kernel="psum_scatter",
        api=True,
        edits=(
            (
                "tl.store(words + rank * stride, tl.zeros([WORDS], tl.int32),",
                "tl.store(words + rank * stride, tl.zeros([WORDS], tl.int32) + 2,",
            ),
        ),
        errors=(MessageError,),
    ),
    Mutant(
        name="words of a collective that are not cleared",
        kernel="psum_scatter",
        edits=(('CLEARED=PROTOCOL == "words")', "CLEARED=False)", 1),),
        errors=(MessageError,),
    ),
    Mutant(
        name="rows past the end not sent",
        kernel="matmul_reduce_hopper_few",
        edits=(("(m < WORLD * OWNED)", "(m < WORLD * OWNED - 1)"),),
        errors=(DeadlockError,),
        shape=(5, 24, 136, 2, False, 1, 2, 3),
    ),
    Mutant(
        name="a tile sent to one rank twice",
        kernel="matmul_reduce_hopper_few",
        edits=(("words, (me.rank + i) % WORLD, (m < OWNED) & (n >= 0))", "words, me.rank, (m < OWNED) & (n >= 0))"),),
        errors=(MessageError,),
        shape=(5, 40, 72, 1, False, 2, 2, 2),
    ),
    Mutant(
        name="sums of all parts in one place",
        kernel="matmul_reduce_hopper_few",
        edits=(("    m = row + shmem.spread(word // ROW, ADDERS)\n", "    m = shmem.spread(word // ROW, ADDERS)\n"),),
        errors=(MessageError,),
        shape=(5, 24, 136, 2, False, 1, 2, 3),
    ),
    Mutant(
        name="words of the first tile",
        kernel="matmul_reduce_hopper_few",
        edits=(
            (
                "source = shmem.messages(me, region) + column // A_WORD\n    words",
                "source = shmem.messages(me, region)\n    words",
            ),
        ),
        errors=(MessageError, WaitOrderError, DeadlockError, DataRaceError),
    ),
    Mutant(
        name="a stage released too early",
        kernel="matmul_reduce_hopper_few",
        product=True,
        edits=(
            (
                "warpgroup_mma_wait(num_outstanding=UNDERWAY, deps=(tile,))",
                "warpgroup_mma_wait(num_outstanding=UNDERWAY + 1, deps=(tile,))",
            ),
        ),
        errors=(DataRaceError,),
    ),
    Mutant(
        name="lhs of one stage alone",
        kernel="matmul_reduce_hopper_few",
        product=True,
        edits=(("ring.full.index(stage), ring.lhs.index(stage).", "ring.full.index(stage), ring.lhs.index(0)."),),
        errors=TOO_EARLY,
    ),
    *(
        Mutant(name=name, kernel=kernel, product=True, edits=edits, errors=TOO_EARLY, shape=shape)
        for kernel, shape in (
            ("all_gather_matmul_hopper_few", SHARED_GATHER),
            ("matmul_reduce_hopper_few", SHARED_SCATTER),
            ("matmul_reduce_hopper_few", (5, 24, 136, 2, False, 1, 2, 3)),
        )
        for name, edits in (
            ("no wait for who shares a tile", ((SHARED_WAIT, "            came = me.ready\n"),)),
            (
                "wait for one who shares a tile",
                (("me.epoch * signals(SPLITS, ADDERS)", "(me.epoch - 1) * signals(SPLITS, ADDERS) + 1"),),
            ),
            (
                "publish before sums are left",
                ((SHARED_SIGNAL, "            pass\n"), (LEAVING, SHARED_SIGNAL[4:] + LEAVING)),
            ),
        )
    ),
    Mutant(
        name="an adder does not wait for the others",
        kernel="all_gather_matmul_hopper_few",
        product=True,
        edits=(("return splits if adders > 1 else splits - 1", "return splits - 1"),),
        errors=(*TOO_EARLY, SignalCountError),
        shape=SHARED_GATHER,
    ),
    Mutant(
        name="what an adder keeps is what others leave",
        kernel="all_gather_matmul_hopper_few",
        product=True,
        edits=(("if adder != i % ADDERS", "if adder == i % ADDERS"),),
        errors=TOO_EARLY,
        shape=SHARED_GATHER,
    ),
    Mutant(
        name="another adder's rows",
        kernel="matmul_reduce_hopper_few",
        product=True,
        edits=(("parts[i * ADDERS].first + adder,", "parts[i * ADDERS].first + (adder + 1) % ADDERS,"),),
        errors=(*TOO_EARLY, MessageError, DeadlockError),
        shape=SHARED_SCATTER,
    ),
    *(
        Mutant(name=name, kernel=kernel, product=True, edits=edits, errors=errors, shape=shape)
        for kernel, shape in (
            ("all_gather_matmul_hopper_few", MORE_GATHER),
            ("matmul_reduce_hopper_few", MORE_SCATTER),
        )
        for name, edits, errors in (
            (
                "whole tiles wait for others",
                (("        if number >= WHOLE:\n", "        if number >= 0:\n"),),
                (OutOfBoundsError, DeadlockError, SignalCountError),
            ),
            (
                "whole tiles take what others leave",
                (("gl.where(number < WHOLE, 1, SPLITS)", "SPLITS"),),
                (OutOfBoundsError, *TOO_EARLY),
            ),
        )
    ),
    Mutant(
        name="other rows of one stage alone",
        kernel="matmul_reduce_hopper_few",
        product=True,
        edits=(("ring.full.index(stage), ring.rest.index(stage).", "ring.full.index(stage), ring.rest.index(0)."),),
        errors=TOO_EARLY,
        shape=(11, 24, 104, 0, True, None, 3, 2, 24),
    ),
    Mutant(
        name="a stage released before its other rows are multiplied",
        kernel="matmul_reduce_hopper_few",
        product=True,
        edits=(("num_outstanding=2 * UNDERWAY", "num_outstanding=2 * UNDERWAY + 1"),),
        errors=(DataRaceError,),
        shape=(23, 24, 72, 1, True, 1, 2, 1, 24),
    ),
    Mutant(
        name="other rows not announced",
        kernel="all_gather_matmul_hopper_few",
        product=True,
        edits=((".nbytes_per_cta + REST + dest", ".nbytes_per_cta + dest"),),
        errors=(MbarrierError, *TOO_EARLY),
        shape=(11, 24, 104, 3, 64, 32, 3, 2, 24),
    ),
    Mutant(
        name="all blocks of rows have the same adders",
        kernel="matmul_reduce_hopper_few",
        edits=(("        adder += place.block * ADDERS\n", ""),),
        errors=(MessageError, DeadlockError, WaitOrderError, DataRaceError),
        shape=(19, 40, 72, 0, False, None, 2, 1, 16),
    ),
    Mutant(
        name="every adder has all rows",
        kernel="matmul_reduce_hopper_few",
        edits=(("for row in range(8 * adder, OWNED, ADD_ROWS * ADDERS)", "for row in range(0, OWNED, ADD_ROWS)", 2),),
        errors=(MessageError, DeadlockError, WaitOrderError, DataRaceError),
        shape=(29, 24, 136, 2, False, 2, 2, 4),
    ),
)


def looked_for(most: int) -> pytest.MarkDecorator:
    """How many runs look for a fault at least: one finding is enough, and `make soak` asks for more of them."""
    return pytest.mark.parametrize("seeds", (2, pytest.param(most, marks=pytest.mark.soak)))


def edit(module: ModuleType, edits: tuple[tuple, ...], folder: Path) -> Path:
    """A copy of a module's file with other text in it."""
    text = inspect.getsource(module)
    for old, new, *times in edits:
        assert text.count(old) == (times[0] if times else 1), f"{module.__name__} has changed: {old!r}"
        text = text.replace(old, new)
    path = folder / Path(module.__file__ or "").name
    path.write_text(text)
    return path


def kernel_of(mutant: Mutant, folder: Path) -> Any:
    kernel = KERNEL[mutant.kernel]
    source = kernel.module
    if mutant.api:
        api = load(edit(shmem, mutant.edits, folder), shmem.__name__)
        module = load(Path(source.__file__ or ""), source.__name__, shmem=api)
    elif mutant.product:
        product = load(edit(hopper_few, mutant.edits, folder), hopper_few.__name__)
        module = load(Path(source.__file__ or ""), source.__name__, hopper_few=product)
    else:
        module = load(edit(source, mutant.edits, folder), source.__name__)
    return getattr(module, kernel.function)


@looked_for(SEEDS)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_the_fault_is_found(mutant: Mutant, seeds: int, tmp_path: Path) -> None:
    """By the right detector under whichever seeds show it, and never as a wrong result without a finding."""
    kernel, function = KERNEL[mutant.kernel], kernel_of(mutant, tmp_path)
    found = 0
    for seed in range(MOST_SEEDS):
        if found and seed >= seeds:
            break
        call, settings = kernel.case(seed, mutant.world, most=5)
        if mutant.shape is not None:
            call = kernel.call(mutant.world, call.arrays[0][0].dtype, mutant.shape)
        try:
            call.run(function, **settings)
        except SimulationError as error:
            found += 1
            assert isinstance(error, mutant.errors), f"found as {type(error).__name__}: {error}"
            assert str(error).startswith(f"{kernel.function}: ")
            assert f"(seed={seed}, " in str(error)
    assert found, f"not found in {MOST_SEEDS} seeds"


def test_there_are_enough_faults() -> None:
    assert len(MUTANTS) >= 12
    assert {mutant.kernel for mutant in MUTANTS} == set(KERNEL)
