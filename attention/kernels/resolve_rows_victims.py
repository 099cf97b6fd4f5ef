"""Which hot rows give way: keys of a slot's hot rows, and the search for the lowest ones, inside one program."""

from __future__ import annotations

import triton
import triton.language as tl

from .resolve_rows_sums import combine, ranks, result
from .resolve_rows_torch import LEAST_SPAN, LEVELS

#: key of a hot row that holds nothing: goes first
EMPTY = tl.constexpr(-1)
#: above every key: hot rows that may not go
KEPT = tl.constexpr(2**31 - 1)
_LEVELS = tl.constexpr(LEVELS)
_LEAST_SPAN = tl.constexpr(LEAST_SPAN)
_LARGEST = tl.constexpr(3e38)
# cells of the search
_COUNTS, _LOW, _HIGH, _ROUNDS = tl.constexpr(3), tl.constexpr(60), tl.constexpr(62), tl.constexpr(8)


@triton.jit
def _ordered(x):
    """fp32 without NaN to int32 in the same order, and back."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def score_levels(x, finite, low, high):
    """int32 levels 0 to ``LEVELS - 1`` of fp32 scores, linear between ``low`` and ``high``, the bounds of what is ``finite``.

    NaN and -inf are at level 0, inf at the highest. Every operation is one correctly rounded fp32 operation, so that any device
    finds the same levels.
    """
    span = high - low
    wide = (span >= _LEAST_SPAN) & (span < float("inf"))
    unit = tl.where(wide, span, 1.0)
    scale = tl.where(wide, tl.div_rn(unit * 0.0 + (_LEVELS - 1), unit), 0.0)
    above = tl.where(finite, tl.minimum(x - low, _LARGEST), 0.0)
    return tl.where(finite, (above * scale).to(tl.int32), tl.where(x == float("inf"), _LEVELS - 1, 0))


@triton.jit
def victims_of(
    value, full, empty, now, n_wanted, cells, totals,
    BY_SCORE: tl.constexpr, SIZE: tl.constexpr, THREADS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The ``n_wanted`` hot rows to give way: ``empty`` ones, then ``full`` ones with the lowest ``value``, the first among equals.

    ``value`` [SIZE] are fp32 scores, or int32 stamps, of which those after ``now`` count as ``now``. At most 2^15 - 1 hot rows.
    Returns whether each is taken, its number among the taken in order of place, and how many there are: fewer than wanted where
    fewer are full or empty. The search counts the keys up to two probes a round, ending as soon as a probe parts them exactly.
    """
    counts = combine((full | empty).to(tl.int32) + (empty.to(tl.int32) << 16), cells, _COUNTS, "add", SIZE, THREADS, FAST)
    if BY_SCORE:
        finite = full & (value > float("-inf")) & (value < float("inf"))
        order = _ordered(value)
        least = combine(tl.where(finite, order, 2**31 - 1), cells, _LOW, "min", SIZE, THREADS, FAST)
        most = combine(tl.where(finite, order, -(2**31)), cells, _HIGH, "max", SIZE, THREADS, FAST)
        tl.debug_barrier()
        least, most = result(least, cells, FAST), result(most, cells, FAST)
        any_finite = least <= most
        least, most = tl.where(any_finite, least, 0), tl.where(any_finite, most, 0)
        key = score_levels(value, finite, _ordered(least).to(tl.float32, bitcast=True), _ordered(most).to(tl.float32, bitcast=True))
        low = n_wanted * 0
        high = low + _LEVELS - 1
    else:
        key = tl.minimum(value, now)
        least = combine(tl.where(full, key, now), cells, _LOW, "min", SIZE, THREADS, FAST)
        tl.debug_barrier()
        low = result(least, cells, FAST)
        high = now
    key = tl.where(full, key, tl.where(empty, EMPTY, KEPT))
    both = result(counts, cells, FAST)
    n = tl.minimum(n_wanted, both & 0xFFFF)
    below = both >> 16  # keys lower than ``low``
    if n <= below:
        low = n * 0 + EMPTY
        high = low
        below = n * 0
    cell = n * 0 + _ROUNDS
    while low < high:
        third = ((high - low).to(tl.uint32, bitcast=True) // 3).to(tl.int32, bitcast=True)
        first, second = low + third, low + third + third
        found = combine((key <= first).to(tl.int32) + ((key <= second).to(tl.int32) << 16), cells, cell, "add", SIZE, THREADS, FAST)
        tl.debug_barrier()
        found = result(found, cells, FAST)
        cell += 1
        few, many = found & 0xFFFF, found >> 16
        if few >= n:
            high = first
        elif many >= n:
            low = first + 1
            high = second
            below = few
        else:
            low = second + 1
            below = many
        if few == n:
            low = first + 1
            high = low
            below = few
        elif many == n:
            low = second + 1
            high = low
            below = many
    less = key < low
    tie = key == low
    before, _ = ranks(less.to(tl.int32) + (tie.to(tl.int32) << 16), totals, SIZE, THREADS, FAST)
    number = (before & 0xFFFF) + tl.minimum(before >> 16, n - below)
    return less | (tie & ((before >> 16) < n - below)), number, n
