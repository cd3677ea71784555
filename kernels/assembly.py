"""The inline assembly of the device API that is longer than a line or two, as functions that return its text.

`shmem.py` has the meaning, this file the instructions. What polls asks, between two looks, for two words of its
region's header, whose places are those of `shmem.HEADER_FAILED` (4) and `shmem.HEADER_TIMEOUT` (16): a wait ends once
this rank has given up anywhere, or after the heap's timeout. The clock is read after the first look in vain, because
what has arrived already needs none. Labels are local to the braces around them.
"""

import triton
import triton.language as tl

# For AMD's GPUs, where a warp is a wave; these were compiled and never run. A branch counts words of 4 bytes from the
# instruction behind it.

# Results: $2. Operands: a position in a scalar register, which says whether to go on (0 or more), to end the program
# (-1) or to trap; anything.
AMD_LEAVE = tl.constexpr("""
s_cmp_ge_i32 $1, 0
s_cbranch_scc1 4
s_cmp_eq_i32 $1, -1
s_cbranch_scc0 1
s_endpgm
s_trap 2
v_mov_b32 $0, $2
""")
# Traps if the operand, in a scalar register, is 0.
AMD_TRAP = tl.constexpr("""
s_cmp_lg_u32 $1, 0
s_cbranch_scc1 1
s_trap 2
v_mov_b32 $0, $1
""")
# The wave's loads and stores of global memory have been done.
AMD_FINISH = tl.constexpr("""
s_waitcnt vmcnt(0)
v_mov_b32 $0, $1
""")


@triton.constexpr_function
def constraints(results, *operands):
    """The constraints of assembly that writes results before it has read all operands."""
    return ",".join(["=&r"] * results + list(operands))


@triton.constexpr_function
def pace(cycles, behind):
    """Waits for a point in time, on the multiprocessor's clock, and returns the next one.

    It never waits for longer than that many cycles, even if the program goes on at a multiprocessor with another clock.
    """
    return f"""
    {{
    .reg .pred p;
    .reg .b64 now, left;
    AGAIN:
    mov.u64 now, %clock64;
    sub.s64 left, $1, now;
    setp.le.s64 p, left, 0;
    @p bra DUE;
    setp.gt.s64 p, left, {cycles};
    @p bra DUE;
    nanosleep.u32 20;
    bra AGAIN;
    DUE:
    bar.warp.sync 0xffffffff;
    sub.s64 left, now, {behind * cycles};
    max.s64 left, left, $1;
    min.s64 left, left, now;
    add.s64 $0, left, {cycles};
    }}
    """


@triton.constexpr_function
def poll(scope="sys"):
    """Each of the first threads of a block polls a signal of its own; the barrier that lets all go says how it ended.

    Result: 1 if all signals came, and all threads are ready; the same in all of them.
    Operands: the address of the first signal, how many, the count that they have to reach, the region's address, 0 in
    threads that are not ready.
    """
    return f"""
    {{
    .reg .pred p, q;
    .reg .b32 v, failed;
    .reg .b64 signal, now, end;
    mov.u32 v, %tid.x;
    setp.ge.u32 p, v, $2;
    @p bra DONE;
    mad.wide.u32 signal, v, 4, $1;
    ld.volatile.global.b64 end, [$4 + 16];
    {"add.u64 end, end, end;" if scope == "gpu" else ""}
    ld.acquire.{scope}.global.b32 v, [signal];
    sub.s32 v, v, $3;
    setp.ge.s32 p, v, 0;
    @p bra DONE;
    {_until_signal("signal", "DONE", scope)}
    DONE:
    bar.warp.sync 0xffffffff;
    setp.ne.and.s32 p, $5, 0, p;
    barrier.red.and.pred q, 0, p;
    selp.b32 $0, 1, 0, q;
    }}
    """


@triton.constexpr_function
def poll_in_warps(scope="sys"):
    """The first threads of each warp poll signals of their own, without a barrier of the block.

    At scope "gpu" they wait for twice as long: who waits for programs of its own rank leaves it to those who wait for a
    peer to say that one is missing.

    Result: for each thread 1, or 0 if its signal did not come.
    Operands: the address of the thread's signal, how many threads of a warp poll, the count that the signals have to
    reach, the region's address.
    """
    return f"""
    {{
    .reg .pred p, q;
    .reg .b32 v, failed;
    .reg .b64 now, end;
    mov.b32 $0, 1;
    mov.u32 v, %laneid;
    setp.ge.u32 p, v, $2;
    @p bra DONE;
    ld.acquire.{scope}.global.b32 v, [$1];
    sub.s32 v, v, $3;
    setp.ge.s32 p, v, 0;
    @p bra DONE;
    ld.volatile.global.b64 end, [$4 + 16];
    {"add.u64 end, end, end;" if scope == "gpu" else ""}
    {_until_signal("$1", "MISSING", scope)}
    MISSING:
    mov.b32 $0, 0;
    DONE:
    bar.warp.sync 0xffffffff;
    }}
    """


@triton.constexpr_function
def _until_signal(signal, late, scope="sys"):
    """Polls `signal` until it has reached the count $3, and goes to DONE; to `late` if this rank failed, and on if the
    time is over.

    Uses the registers p, which is true at DONE, q, v, failed and now, and end, which holds how long it may last.
    """
    # At the scope of the GPU a look lasts no longer than one load. Peers' signals take longer than two, and there the
    # register is saved.
    early = scope == "gpu"
    return f"""
    mov.u64 now, %globaltimer;
    add.u64 end, end, now;
    AGAIN:
    {"ld.volatile.global.b32 failed, [$4 + 4];" if early else ""}
    ld.acquire.{scope}.global.b32 v, [{signal}];
    sub.s32 v, v, $3;
    setp.ge.s32 p, v, 0;
    @p bra DONE;
    {"" if early else "ld.volatile.global.b32 v, [$4 + 4];"}
    setp.ne.s32 q, {"failed" if early else "v"}, 0;
    @q bra {late};
    mov.u64 now, %globaltimer;
    setp.lt.u64 q, now, end;
    @q bra AGAIN;
    """


@triton.constexpr_function
def linger(cleared):
    """Each thread polls a word until it has arrived, then its next; the barrier at the end says whether all have.

    Result: 1 if all words came.
    Operands: the address of the first word, how many, bytes from one to the next, the bit that messages of this call
    have, the region's address.
    """
    arrived = "setp.ne.u32 q, v, 0;" if cleared else "xor.b32 v, v, $4; and.b32 v, v, 1; setp.eq.u32 q, v, 0;"
    return """
    {
    .reg .pred p, q;
    .reg .b32 i, n, v, failed;
    .reg .b64 message, now, end;
    mov.u32 i, %tid.x;
    mov.u32 n, %ntid.x;
    mov.u64 end, 0;
    EACH:
    setp.ge.u32 p, i, $2;
    @p bra DONE;
    mul.wide.u32 message, i, $3;
    add.u64 message, message, $1;
    AGAIN:
    ld.relaxed.sys.global.b32 v, [message];
    ld.volatile.global.b32 failed, [$5 + 4];
    ARRIVED
    @q bra NEXT;
    setp.ne.u32 q, failed, 0;
    @q bra DONE;
    mov.u64 now, %globaltimer;
    setp.ne.u64 q, end, 0;
    @q bra CLOCK;
    ld.volatile.global.b64 end, [$5 + 16];
    add.u64 end, end, now;
    CLOCK:
    setp.lt.u64 q, now, end;
    @q bra AGAIN;
    bra DONE;
    NEXT:
    add.u32 i, i, n;
    bra EACH;
    DONE:
    bar.warp.sync 0xffffffff;
    barrier.red.and.pred q, 0, p;
    selp.b32 $0, 1, 0, q;
    }
    """.replace("ARRIVED", arrived)


@triton.constexpr_function
def parts(count):
    """Polls, of each part, 16 bytes and 8 others, until all words are of this call.

    Results: the words, those of a part together, and 0 or 1 more than the last part that is missing.
    Operands: two addresses, bytes from one part to the next of each, the last part, whether to wait, the bit that
    messages of this call have, the region's address.
    """
    n = 6 * count + 1
    source, pairs, stride, pair_stride, last, wait, bit, base = (f"${n + i}" for i in range(8))
    words = [[f"${6 * part + i}" for i in range(6)] for part in range(count)]
    missing = f"${6 * count}"
    lines = [
        f".reg .pred p, near, miss<{count}>; .reg .b32 v, polls, late<{count}>;",
        f".reg .b64 now, end, at<{count}>, pair<{count}>;",
        *(f"mov.b32 ${i}, 0;" for i in range(n - 1)),
        f"mov.b32 {missing}, 1;",
        f"setp.eq.s32 p, {wait}, 0;",
        "@p bra DONE;",
        "mov.b64 end, 0;",
        "mov.b32 polls, 0;",
        "setp.ne.u32 near, polls, 0;",
        *(f"setp.eq.u32 miss{part}, polls, 0;" for part in range(count)),
    ]
    for part in range(count):
        lines += [
            f"min.s32 v, {last}, {part};",
            f"mul.wide.s32 at{part}, v, {stride};",
            f"add.s64 at{part}, at{part}, {source};",
            f"mul.wide.s32 pair{part}, v, {pair_stride};",
            f"add.s64 pair{part}, pair{part}, {pairs};",
        ]
    lines += [
        "AGAIN:",
        "@near bra LOOK;",
        *(f"ld.relaxed.sys.global.b32 late{part}, [pair{part}];" for part in range(count)),
        *(f"xor.b32 late{part}, late{part}, {bit};" for part in range(count)),
        "mov.b32 v, 1;",
        *(f"and.b32 v, v, late{part};" for part in range(count)),
        "setp.ne.u32 p, v, 0;",
        "@p bra LATE;",
        "setp.eq.u32 near, v, 0;",
        "LOOK:",
    ]
    for part, (a, b, c, d, top, total) in enumerate(words):
        lines += [
            f"@miss{part} ld.relaxed.sys.global.v2.b32 {{{top}, {total}}}, [pair{part}];",
            f"@miss{part} ld.relaxed.sys.global.v4.b32 {{{a}, {b}, {c}, {d}}}, [at{part}];",
        ]
    lines += ["mov.b32 v, 0;"]
    for part, those in enumerate(words):
        lines += [
            f"xor.b32 late{part}, {those[0]}, {bit};",
            # late | (word ^ bit)
            *(f"lop3.b32 late{part}, late{part}, {word}, {bit}, 0xF6;" for word in those[1:]),
            f"and.b32 late{part}, late{part}, 1;",
            f"setp.ne.u32 miss{part}, late{part}, 0;",
            f"or.b32 v, v, late{part};",
        ]
    lines += [
        "setp.eq.u32 p, v, 0;",
        "@p bra CAME;",
        "LATE:",
        *_bounded(32, base, "BLAME"),
    ]
    for part in range(count):
        lines += [f"and.b32 v, late{part}, 1;", "setp.ne.u32 p, v, 0;", f"@p mov.b32 {missing}, {part + 1};"]
    lines += ["bra DONE;", "CAME:", f"mov.b32 {missing}, 0;", "DONE:", "bar.warp.sync 0xffffffff;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def vectors(ranks, cleared, twice=False, places=None, patience=0):
    """Polls 16 bytes of each rank but one until all words have arrived.

    Results: 4 words of each rank, and 0 or 1 more than the last rank of which words are missing. If words that arrive
    are other than 0 (`cleared`), those that are missing are 0; otherwise all 4 of such a rank are -1.
    With `twice` it waits for twice as long, see `poll_in_warps`.
    Operands: address, bytes from one rank to the next, whether to look, whether the time is over, the rank to leave
    out, the bit that messages of this call have, the region's address.
    With `places` [(operand, bytes behind it, number), ...] these are what it polls, and not ranks: those whose number
    is less than what else would be the rank to leave out. Operand 0 is the address, and the others, behind all
    operands, are more addresses.
    It does not look before so many clock cycles (`patience`).
    """
    missing = 4 * ranks
    source, stride, wait, over, left_out, bit, base = (f"${missing + 1 + i}" for i in range(7))
    at = [f"at{rank}" for rank in range(ranks)]
    if places is not None:
        at = [f"${missing + 1 + (operand + 6 if operand else 0)} + {offset}" for operand, offset, _ in places]
    words = [[f"${4 * rank + i}" for i in range(4)] for rank in range(ranks)]
    absent = 0 if cleared else -1
    lines = [f"mov.b32 ${i}, {absent};" for i in range(missing)]
    lines += [f"mov.b32 ${missing}, 0;"]
    lines += [f"setp.eq.s32 p, {wait}, 0;", "@p bra DONE;", f"cvt.u64.u32 end, {over};", "mov.b32 polls, 0;"]
    for rank in range(ranks):
        if places is None:
            lines += [f"mad.wide.u32 at{rank}, {stride}, {rank}, {source};"]
            lines += [f"setp.ne.s32 looks{rank}, {left_out}, {rank};"]
        else:
            lines += [f"setp.gt.s32 looks{rank}, {left_out}, {places[rank][2]};"]
    if patience:
        # Awake: asleep it took a microsecond of 200 more.
        lines += ["mov.u32 least, %clock;", "EARLY:", "mov.u32 v, %clock;", "sub.u32 v, v, least;"]
        lines += [f"setp.lt.u32 p, v, {patience};", "@p bra EARLY;"]
    lines += ["AGAIN:"]
    for rank in range(ranks):
        lines += [f"@looks{rank} ld.relaxed.sys.global.v4.b32 {{{', '.join(words[rank])}}}, [{at[rank]}];"]
    lines += ["mov.pred p, 0;"]
    for rank, (a, b, c, d) in enumerate(words):
        if cleared:
            lines += [f"min.u32 v, {a}, {b};", f"min.u32 least, {c}, {d};", "min.u32 least, least, v;"]
        else:
            # 0 if a word has another lowest bit
            lines += [f"xor.b32 v, {a}, {bit};"]
            lines += [f"lop3.b32 v, v, {word}, {bit}, 0xF6;" for word in (b, c, d)]
            lines += ["not.b32 v, v;", "and.b32 least, v, 1;"]
        lines += [f"setp.eq.and.u32 looks{rank}, least, 0, looks{rank};", f"or.pred p, p, looks{rank};"]
    lines += ["@!p bra DONE;"]
    lines += _bounded(16, base, "LATE", twice)
    for rank in range(ranks):
        if not cleared:
            lines += [f"@looks{rank} mov.b32 {word}, {absent};" for word in words[rank]]
        lines += [f"@looks{rank} mov.b32 ${missing}, {rank + 1};"]
    lines += ["DONE:", "bar.warp.sync 0xffffffff;"]
    registers = f".reg .pred p, looks<{ranks}>; .reg .b32 v, least, polls; .reg .b64 now, end, at<{ranks}>;"
    return "\n".join(["{", registers, *lines, "}"])


@triton.constexpr_function
def _bounded(polls, base, late, twice=False):
    """The end of a look in vain: back to AGAIN, or on to `late` if this rank failed or the time is over.

    It asks for that only once in so many polls, a power of 2, because that takes as long as a look. Uses the registers
    p, v, now, and polls and end, which are 0 in the beginning.
    """
    return [
        "add.u32 polls, polls, 1;",
        f"and.b32 v, polls, {polls - 1};",
        "setp.ne.u32 p, v, 0;",
        "@p bra AGAIN;",
        f"ld.volatile.global.b32 v, [{base} + 4];",
        "setp.ne.u32 p, v, 0;",
        f"@p bra {late};",
        "mov.u64 now, %globaltimer;",
        "setp.ne.u64 p, end, 0;",
        "@p bra CLOCK;",
        f"ld.volatile.global.b64 end, [{base} + 16];",
        *(["add.u64 end, end, end;"] if twice else []),
        "add.u64 end, end, now;",
        "CLOCK:",
        "setp.lt.u64 p, now, end;",
        "@p bra AGAIN;",
        f"{late}:",
    ]
