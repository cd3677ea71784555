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
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,  # elements that a program moves, a power of 2
):
    token = tl.program_id(0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < D
    y = tl.load(y_ptr + token.to(tl.int64) * D + element, mask=inside)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + choice)
        value = y
        if len(weights) > 0:
            value = y.to(tl.float32) * tl.load(weights[0] + token * CHOICES + choice)
        row = rows_ptr + place.to(tl.int64) * D
        tl.store(row + element, value.to(rows_ptr.dtype.element_ty), mask=inside & (place >= 0))


@triton.jit
def collect_kernel(
    rows_ptr,  # [ROWS, D]
    places_ptr,  # i32 [TOKENS, CHOICES]
    weights,  # f32 [TOKENS, CHOICES], or nothing, for ones
    out_ptr,  # [TOKENS, D]: the sum of a token's rows by their weights
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < D
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + choice)
        row = rows_ptr + place.to(tl.int64) * D
        value = tl.load(row + element, mask=inside & (place >= 0), other=0.0).to(tl.float32)
        if len(weights) > 0:
            # What was dropped adds nothing, whatever its weight is.
            value *= tl.where(place >= 0, tl.load(weights[0] + token * CHOICES + choice), 0.0)
        total += value
    tl.store(out_ptr + token.to(tl.int64) * D + element, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dots_kernel(
    rows_ptr,  # [ROWS, D]
    y_ptr,  # [TOKENS, D]
    places_ptr,  # i32 [TOKENS, CHOICES]
    out_ptr,  # f32 [TOKENS, CHOICES]: <row, y> of each choice, 0 if it has no row
    D: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    y_ptr += token.to(tl.int64) * D
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_ptr + token * CHOICES + choice)
        row = rows_ptr + place.to(tl.int64) * D
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, D, BLOCK):
            element = first + tl.arange(0, BLOCK)
            inside = element < D
            value = tl.load(row + element, mask=inside & (place >= 0), other=0.0).to(tl.float32)
            total += value * tl.load(y_ptr + element, mask=inside, other=0.0).to(tl.float32)
        # A product with a row that is not there is 0 or NaN.
        tl.store(out_ptr + token * CHOICES + choice, tl.where(place >= 0, tl.sum(total, 0), 0.0))
