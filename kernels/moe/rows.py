"""Rows that tokens have at their experts: spread, collected, and multiplied.

A token has up to CHOICES rows, at its `places`. With weights w all three are the derivatives of one form, the sum over
tokens t and choices j of w[t, j] * <rows[places[t, j]], y[t]>: by rows, by y, and by w. So each is a part of the
derivatives of the others. Sums are f32, in the order of the choices.
"""

import triton
import triton.language as tl


@triton.jit
def spread_kernel(
    y_ptr,  # [TOKENS, D]
    places_ptr,  # i32 [TOKENS, CHOICES]: the row of each choice, -1 for none; no row twice
    weights,  # f32 [TOKENS, CHOICES], or nothing, for ones
    rows_ptr,  # [ROWS, D]: y by the weight; whatever was there where no choice has its row
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    TILE: tl.constexpr,  # tokens of a program, a power of 2
    BLOCK: tl.constexpr,  # elements of each, a power of 2
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = load_tile(y_ptr, token, token < TOKENS, element, D)
    spread_tile(rows_ptr, y, places_ptr, weights, token, token < TOKENS, element, D, CHOICES)


@triton.jit
def collect_kernel(
    rows_ptr,  # [ROWS, D]
    places_ptr,  # i32 [TOKENS, CHOICES]
    weights,  # f32 [TOKENS, CHOICES], or nothing, for ones
    out_ptr,  # [TOKENS, D]: the sum of a token's rows by their weights
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = collect_tile(rows_ptr, places_ptr, weights, token, token < TOKENS, element, D, CHOICES)
    store_tile(out_ptr, total, token, token < TOKENS, element, D)


@triton.jit
def dots_kernel(
    rows_ptr,  # [ROWS, D]
    y_ptr,  # [TOKENS, D]
    places_ptr,  # i32 [TOKENS, CHOICES]
    out_ptr,  # f32 [TOKENS, CHOICES]: <row, y> of each choice, 0 if it has no row
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = token < TOKENS
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + choice, mask=there, other=-1)
        total = tl.zeros([TILE, BLOCK], tl.float32)
        for first in range(0, D, BLOCK):
            element = first + tl.arange(0, BLOCK)
            row = load_tile(rows_ptr, place, place >= 0, element, D).to(tl.float32)
            total += row * load_tile(y_ptr, token, there, element, D).to(tl.float32)
        # A product with a row that is not there is 0 or NaN.
        total_ = tl.where(place >= 0, tl.sum(total, 1), 0.0)
        tl.store(out_ptr + token * CHOICES + choice, total_, mask=there)


@triton.jit
def load_tile(ptr, row, there, element, D: tl.constexpr):
    """Some elements of some rows of an array [..., D]; 0 of those that are not there."""
    at = ptr + row.to(tl.int64)[:, None] * D + element[None, :]
    return tl.load(at, mask=there[:, None] & (element[None, :] < D), other=0)


@triton.jit
def store_tile(ptr, value, row, there, element, D: tl.constexpr):
    at = ptr + row.to(tl.int64)[:, None] * D + element[None, :]
    tl.store(at, value.to(ptr.dtype.element_ty), mask=there[:, None] & (element[None, :] < D))


@triton.jit
def spread_tile(rows_ptr, y, places_ptr, weights, token, there, element, D: tl.constexpr, CHOICES: tl.constexpr):
    """Stores some elements of some tokens to all of their rows."""
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + choice, mask=there, other=-1)
        value = y
        if len(weights) > 0:
            weight = tl.load(weights[0] + token * CHOICES + choice, mask=there, other=0.0)
            value = y.to(tl.float32) * weight[:, None]
        store_tile(rows_ptr, value, place, place >= 0, element, D)


@triton.jit
def collect_tile(rows_ptr, places_ptr, weights, token, there, element, D: tl.constexpr, CHOICES: tl.constexpr):
    """The sums of some elements of all rows of some tokens, f32."""
    total = tl.zeros([token.shape[0], element.shape[0]], tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + choice, mask=there, other=-1)
        value = load_tile(rows_ptr, place, place >= 0, element, D).to(tl.float32)
        if len(weights) > 0:
            # What was dropped adds nothing, whatever its weight is.
            weight = tl.load(weights[0] + token * CHOICES + choice, mask=place >= 0, other=0.0)
            value *= weight[:, None]
        total += value
    return total
