"""Between two steps of a launch: which token is likeliest, and its embedding.

Each program looks for the largest of its own logits, and tells all programs of all ranks, in 16 bytes for two
sequences, what it is and where. So all know the next token, and each reads its embedding itself.

The number of a message has 31 bits: the lowest one of a logit travels with its place.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jaxtaxfree.kernels import shmem_gluon as shmem
from jaxtaxfree.kernels.collectives import largest
from jaxtaxfree.kernels.decode_step import ring as rings

LEAST = largest.LEAST
ALL = largest.ALL  # behind all places


@gluon.jit
def first_tokens(SIZES: gl.constexpr):
    """Tokens before the first step, whose own ones are given: there are none."""
    B: gl.constexpr = SIZES.B
    tokens = ()
    for _ in gl.static_range(B):
        tokens = tokens + (gl.program_id(0) * 0,)
    return tokens


@gluon.jit
def embeddings(given, chosen, step, SIZES: gl.constexpr):
    """The stream's parts at first, as `rings.load_vectors` returns them: the embeddings of the tokens that are given, or
    else of those that were chosen. A token that has none is the nearest one that has."""
    DTYPE: gl.constexpr = given.embed.dtype.element_ty
    B: gl.constexpr = SIZES.B
    parts = ()
    for b in gl.static_range(B):
        token = gl.load(given.tokens + step * SIZES.B + b)
        token = gl.where(token < 0, chosen[b], token)
        token = gl.minimum(gl.maximum(token, 0), SIZES.EMBEDDINGS - 1).to(gl.int64)
        for chunk in gl.static_range(rings.chunks_of(SIZES.D, given.query)):
            part = rings.load_part(given.query, given.embed + token * SIZES.D, chunk, SIZES.D).to(gl.float32)
            if SIZES.EMBEDDING_SCALE != 1:
                part = (part * SIZES.EMBEDDING_SCALE).to(DTYPE).to(gl.float32)
            parts = parts + (part,)
    return parts


@gluon.jit
def none_of(like):
    """The largest of no logits, and where it is: i32 blocks like this one."""
    return like * 0 + LEAST, like * 0 + ALL, like


@gluon.jit
def likelier(found, logit, place, there):
    """The larger of those that were found and these logits, each thread for itself, whose places are behind theirs."""
    number, where, b = found
    now = gl.where(there, largest.ordered(logit), LEAST)
    return gl.maximum(number, now), gl.where(now > number, place, where), b


@gluon.jit
def mark(results, which: gl.constexpr, SIZES: gl.constexpr):
    if results.times is not None:
        gl.store(results.times + (gl.program_id(0) * (SIZES.LAYERS + 1) + SIZES.LAYERS) * 24 + 4 + which, shmem.now().to(gl.int32))


@gluon.jit
def choose(me, box, results, found, step, factor, SIZES: gl.constexpr):
    """The likeliest token of each sequence, which all programs of all ranks find out together.

    Args:
      box: messages [B / 2, WORLD, PROGRAMS, 4].
      found: what `phases.unembed` has found.

    Returns: (tokens, factor).
    """
    B: gl.constexpr = SIZES.B
    PAIRS: gl.constexpr = triton.cdiv(B, 2)
    WORDS: gl.constexpr = 4 * SIZES.PROGRAMS  # of a rank
    SIZE: gl.constexpr = triton.next_power_of_2(WORDS)
    for pair in gl.static_range(PAIRS):
        send_pair(me, box + pair * (SIZES.WORLD * WORDS), found, pair, SIZES)
    tokens = ()
    for pair in gl.static_range(PAIRS):
        of_pair = box + pair * (SIZES.WORLD * WORDS)
        mark(results, 0, SIZES)
        words, late = shmem.receive_all(me, of_pair, WORDS, SIZE, WORDS, SIZES.WORLD, True)
        for i in gl.static_range(len(late)):
            factor = gl.where(gl.max(late[i], 0) == 0, factor, float("nan"))
        mark(results, 1, SIZES)
        numbers, places = largest_of(words)
        for i in gl.static_range(min(2, B - 2 * pair)):
            most, token = largest.first_of_largest(numbers[i], places[i])
            at = step * SIZES.B + 2 * pair + i
            gl.store(results.tokens + at, gl.where(factor == factor, token, -1), mask=gl.program_id(0) == 0)
            gl.store(results.likeliest + at, largest.value_of(most) * factor, mask=gl.program_id(0) == 0)
            tokens = tokens + (token,)
        mark(results, 2, SIZES)
        shmem.report_own(me, of_pair, late, SIZE, WORDS, SIZES.WORLD)
        mark(results, 3, SIZES)
    return tokens, factor


@gluon.jit
def send_pair(me, box, found, pair: gl.constexpr, SIZES: gl.constexpr):
    """Sends all ranks what is largest of two sequences."""
    B: gl.constexpr = SIZES.B
    number, place, sequence = found
    lane = gl.arange(0, 32 * gl.num_warps(), shmem.vectors_of(1, gl.num_warps()))
    peer, word = lane // 4, lane % 4
    value = lane * 0
    for i in gl.static_range(min(2, B - 2 * pair)):
        own = gl.where(sequence == 2 * pair + i, number, LEAST)
        most, at = largest.first_of_largest(own, place)
        at = (gl.minimum(at, ALL >> 2) << 2) | ((most & 1) << 1)
        value = gl.where(word == 2 * i, most, gl.where(word == 2 * i + 1, at, value))
    dest = box + (me.rank * SIZES.PROGRAMS + gl.program_id(0)) * 4 + word
    shmem.send(me, dest, value, gl.minimum(peer, SIZES.WORLD - 1), peer < SIZES.WORLD)


@gluon.jit
def largest_of(words):
    """What each thread has received of two sequences: (the largest numbers, and the first places that have them)."""
    N: gl.constexpr = words[0].shape[0] // 4
    for i in gl.static_range(len(words)):
        first, second = gl.split(words[i].reshape([N, 2, 2]))
        # What did not come, or is behind the last program, is -1.
        there = second != -1
        number = gl.where(there, (first & -2) | ((second >> 1) & 1), LEAST)
        place = gl.where(there, second >> 2, ALL)
        if i == 0:
            most, at = number, place
        else:
            at = gl.where(number > most, place, gl.where(number == most, gl.minimum(at, place), at))
            most = gl.maximum(most, number)
    return gl.split(most), gl.split(at)
