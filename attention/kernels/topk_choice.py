"""Building blocks of the exact top-k: order-preserving keys, a sampled pivot, bisection by counting, and output in order.

Scores are compared as int32 keys in the order of the floats. The k-th highest key is found by bisection: each round counts
the keys that reach two probes. It ends early when exactly k reach one; otherwise equal keys are left, of which the first win.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: below the key of every score, -inf included: what lies past a row's limit
_NOTHING = tl.constexpr(-(2**31))
_KEY_OF_NEG_INF = tl.constexpr(-(2**31) + 0x7FFFFF)
_PAST_INF = tl.constexpr(0x7F800001)


@triton.jit
def order_keys(x):
    """int32 in the order of fp32 scores: NaN like -inf, -0.0 like 0.0."""
    x = tl.where(x != x, float("-inf"), x)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(key == -1, 0, key)


@triton.jit
def load_scores(scores, start, end, SIZE: tl.constexpr):
    """``SIZE`` scores from ``start`` on, -inf from ``end`` on. Only the last ones of a row pay for a mask with narrow loads."""
    at = start + tl.arange(0, SIZE)
    if start + SIZE <= end:
        x = tl.load(scores + at)
    else:
        x = tl.load(scores + at, mask=at < end, other=float("-inf"))
    return x


@triton.jit
def load_keys(scores, start, end, SIZE: tl.constexpr):
    """Keys of ``SIZE`` scores from ``start`` on, ``_NOTHING`` from ``end`` on."""
    return tl.where(start + tl.arange(0, SIZE) < end, order_keys(load_scores(scores, start, end, SIZE)), _NOTHING)


@triton.jit
def scatter(target, slot, x, mask):
    """Store at slots that ascend but have gaps.

    The compiler is told that slots come in fours. It then leaves the elements with the threads that loaded them, four
    neighbours each, instead of exchanging them first. It stores them one by one all the same, for it knows nothing of the mask.
    """
    tl.store(tl.max_contiguous(tl.multiple_of(target + slot, 16), 4), x, mask=mask)


@triton.jit
def bisect(keys, lo, hi, count, k, enough):
    """Narrow lo..hi (int64) until the ``count`` of keys that reach lo, at least k, is at most ``enough``; fewer reach hi.

    Returns (lo, hi, count, count of those that reach hi); lo and hi are neighbours if ``enough`` was not met.
    """
    count_hi = count * 0
    while (hi - lo > 1) & (count > enough):
        step = tl.maximum(((hi - lo) * 21845) >> 16, 1)  # a third
        a = lo + step
        b = tl.maximum(hi - step, a)
        # Two counts of at most 2^14 keys travel in one sum.
        found = tl.sum((keys >= a.to(tl.int32)).to(tl.int32) + ((keys >= b.to(tl.int32)).to(tl.int32) << 16))
        of_a = found & 0xFFFF
        of_b = found >> 16
        hi = tl.where(of_b >= k, hi, tl.where(of_a >= k, b, a))
        count_hi = tl.where(of_b >= k, count_hi, tl.where(of_a >= k, of_b, of_a))
        lo = tl.where(of_b >= k, b, tl.where(of_a >= k, a, lo))
        count = tl.where(of_b >= k, of_b, tl.where(of_a >= k, of_a, count))
    return lo, hi, count, count_hi


@triton.jit
def cut_at(lo, count, count_hi, k):
    """(threshold, ties): the choice is all keys above the threshold and the first ``ties`` that equal it."""
    exact = count == k  # no tie to break: everything from lo on
    return tl.where(exact, lo - 1, lo).to(tl.int32), tl.where(exact, 0, k - count_hi)


@triton.jit
def emit(keys, at, threshold, ties, above_before, tied_before, out):
    """Write the chosen ones of ``keys`` at positions ``at`` (ascending); returns the running counts of above and tied."""
    above = keys > threshold
    tied = keys == threshold
    one = (above.to(tl.int32) << 16) + tied.to(tl.int32)
    upto = tl.cumsum(one, 0)
    total = tl.sum(one, 0)
    tied_upto = tied_before + (upto & 0xFFFF)
    keep = above | (tied & (tied_upto <= ties))
    scatter(out, above_before + (upto >> 16) + tl.minimum(tied_upto, ties) - 1, at, keep)
    return above_before + (total >> 16), tied_before + (total & 0xFFFF)


@triton.jit
def locate(k, out, out_rows, pages, PAGE: tl.constexpr, K_BLOCK: tl.constexpr):
    """Cache rows of the k positions that this program wrote."""
    tl.debug_barrier()
    i = tl.arange(0, K_BLOCK)
    at = tl.load(out + i, mask=i < k, other=0, cache_modifier=".cg")
    page = tl.load(pages + at // PAGE, mask=i < k, other=0)
    tl.store(out_rows + i, page * PAGE + at % PAGE, mask=i < k)


@triton.jit
def emit_row(scores, end, threshold, ties, out, stop, BLOCK: tl.constexpr):
    """Write the chosen ones of a row of scores, until ``stop`` ties are written; returns where it stopped and their number."""
    above = end * 0
    tied = end * 0
    start = end * 0
    while (start < end) & (tied < stop):
        at = start + tl.arange(0, BLOCK)
        above, tied = emit(load_keys(scores, start, end, BLOCK), at, threshold, ties, above, tied, out)
        start += BLOCK
    return start, tied


@triton.jit
def count_row(scores, end, a, b, c, BLOCK: tl.constexpr):
    """How many scores of the whole row reach the keys ``a`` <= ``b`` <= ``c``."""
    of_a = tl.zeros((BLOCK,), tl.int32)
    of_b = tl.zeros((BLOCK,), tl.int32)
    of_c = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, end, BLOCK):
        keys = load_keys(scores, start, end, BLOCK)
        of_a += (keys >= a.to(tl.int32)).to(tl.int32)
        of_b += (keys >= b.to(tl.int32)).to(tl.int32)
        of_c += (keys >= c.to(tl.int32)).to(tl.int32)
    return tl.sum(of_a), tl.sum(of_b), tl.sum(of_c)


@triton.jit
def search_row(scores, end, lo, hi, count, count_hi, k, out, BLOCK: tl.constexpr):
    """Choose by passes over the row in memory: ``count`` >= k scores reach lo, ``count_hi`` < k reach hi."""
    # The first probes lie close to the pivot, which is the bound that is no end of the scale.
    few = count_hi > 0
    a = tl.where(few, tl.maximum(hi - (1 << 22), lo), lo + 1)
    b = tl.where(few, tl.maximum(hi - (1 << 18), lo), tl.minimum(lo + (1 << 18), hi))
    c = tl.where(few, tl.maximum(hi - 1, lo), tl.minimum(lo + (1 << 22), hi))
    while (hi - lo > 1) & (count > k):
        of_a, of_b, of_c = count_row(scores, end, a, b, c, BLOCK)
        # Counts fall from a to c: lo is the last probe that k reach, hi the first that fewer do.
        hi = tl.where(of_a < k, a, tl.where(of_b < k, b, tl.where(of_c < k, c, hi)))
        count_hi = tl.where(of_a < k, of_a, tl.where(of_b < k, of_b, tl.where(of_c < k, of_c, count_hi)))
        lo = tl.where(of_c >= k, c, tl.where(of_b >= k, b, tl.where(of_a >= k, a, lo)))
        count = tl.where(of_c >= k, of_c, tl.where(of_b >= k, of_b, tl.where(of_a >= k, of_a, count)))
        step = (hi - lo) // 4
        a = lo + step
        b = lo + (hi - lo) // 2
        c = hi - tl.maximum(step, 1)
    threshold, ties = cut_at(lo, count, count_hi, k)
    emit_row(scores, end, threshold, ties, out, end + 1, BLOCK)


@triton.jit
def short_row(scores, end, k, out, CAPACITY: tl.constexpr, EMIT: tl.constexpr):
    """Choose in a row of k < ``end`` <= ``CAPACITY`` scores."""
    keys = load_keys(scores, 0, end, CAPACITY)
    lo = tl.full((), _KEY_OF_NEG_INF, tl.int64)
    lo, _, count, count_hi = bisect(keys, lo, tl.max(keys, 0).to(tl.int64) + 1, end, k, k)
    threshold, ties = cut_at(lo, count, count_hi, k)
    if EMIT == CAPACITY:
        emit(keys, tl.arange(0, CAPACITY), threshold, ties, 0, 0, out)
    else:
        emit_row(scores, end, threshold, ties, out, end + 1, EMIT)


@triton.jit
def whole_row(end, k, out, out_rows, pages, PAGE: tl.constexpr, K_BLOCK: tl.constexpr):
    """All of a row of ``end`` <= k scores, then -1."""
    at = tl.arange(0, K_BLOCK)
    page = tl.load(pages + at // PAGE, mask=at < end, other=0)
    tl.store(out + at, tl.where(at < end, at, -1), mask=at < k)
    tl.store(out_rows + at, tl.where(at < end, page * PAGE + at % PAGE, -1), mask=at < k)


@triton.jit
def sample_pivot(scores, end, k, SAMPLE: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr):
    """A key above that of -inf which somewhat more than k of ``end`` > ``CAPACITY`` scores should reach, from ``SAMPLE`` of them.

    One group of ``GROUP`` neighbours comes from each of equal stretches of the row, at a place that a hash decides: spread
    evenly, and in step with no period of the data. k * SAMPLE / end sampled scores are expected among the k highest, give or
    take the root of that number; eight roots more are let through, unless that might be too many for ``CAPACITY``.
    """
    i = tl.arange(0, SAMPLE)
    group = i // GROUP
    step = end // (SAMPLE // GROUP)
    hashed = (group.to(tl.uint32) * 2654435761) >> 16
    jitter = (hashed * (step - GROUP + 1).to(tl.uint32)) >> 16
    keys = order_keys(tl.load(scores + group * step + jitter.to(tl.int32) + i % GROUP))
    share = SAMPLE / end.to(tl.float32)
    expected = k * share
    wanted = tl.minimum(expected + 8.0 * tl.sqrt(expected) + 8.0, 0.6 * CAPACITY * share).to(tl.int32)
    lo = tl.min(keys, 0).to(tl.int64)
    hi = tl.max(keys, 0).to(tl.int64) + 1
    lo, hi, count, _ = bisect(keys, lo, hi, tl.full((), SAMPLE, tl.int32), wanted, wanted + wanted // 8)
    # Many equal scores at lo: what lies above them decides, and if that is fewer than k, they are the ties to choose from.
    pivot = tl.where(count > 0.9 * CAPACITY * share, hi, lo)
    return tl.maximum(pivot, _KEY_OF_NEG_INF + 1).to(tl.int32)


@triton.jit
def value_of(key):
    """The score of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def keep_survivors(low, high, start, pivot, found, places, before, CAPACITY: tl.constexpr, HALF: tl.constexpr):
    """Keep the scores that reach the pivot (a score), of ``low`` from position ``start`` on and of ``high`` ``HALF`` further.

    They go behind the ``before`` that are there, if there is room; returns the new number. NaN does not reach a pivot.
    """
    of_low = low >= pivot
    of_high = high >= pivot
    one = of_low.to(tl.int32) + (of_high.to(tl.int32) << 16)  # running counts of both halves travel in one sum
    upto = tl.cumsum(one, 0)
    total = tl.sum(one, 0)
    middle = before + (total & 0xFFFF)
    after = middle + (total >> 16)
    if after <= CAPACITY:
        at = start + tl.arange(0, HALF)
        slot = before + (upto & 0xFFFF) - 1
        scatter(found, slot, low, of_low)
        scatter(places, slot, at, of_low)
        slot = middle + (upto >> 16) - 1
        scatter(found, slot, high, of_high)
        scatter(places, slot, at + HALF, of_high)
    return after


@triton.jit
def choose(scores, end, pivot, total, found, places, k, out, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, EMIT: tl.constexpr):
    """Choose among the ``total`` scores that reach the pivot, or in the row if they will not do; ``EMIT`` are written at a time."""
    if (total >= k) & (total <= CAPACITY):
        i = tl.arange(0, CAPACITY)
        keys = tl.where(i < total, order_keys(tl.load(found + i, cache_modifier=".cg")), _NOTHING)
        if EMIT == CAPACITY:
            at = tl.load(places + i, cache_modifier=".cg")  # on its way while the bisection runs
        lo, _, count, count_hi = bisect(keys, pivot.to(tl.int64), tl.max(keys, 0).to(tl.int64) + 1, total, k, k)
        threshold, ties = cut_at(lo, count, count_hi, k)
        if EMIT == CAPACITY:
            emit(keys, at, threshold, ties, 0, 0, out)
        else:
            above = total * 0
            tied = total * 0
            for start in range(0, total, EMIT):
                j = start + tl.arange(0, EMIT)
                some = tl.where(j < total, order_keys(tl.load(found + j, cache_modifier=".cg")), _NOTHING)
                above, tied = emit(some, tl.load(places + j, cache_modifier=".cg"), threshold, ties, above, tied, out)
    else:
        few = total < k
        at_pivot = pivot.to(tl.int64)
        lo = tl.where(few, tl.full((), _KEY_OF_NEG_INF, tl.int64), at_pivot)
        hi = tl.where(few, at_pivot - 1, tl.full((), _PAST_INF, tl.int64))
        count = tl.where(few, end, total)
        count_hi = total * 0
        ties = k - total
        if few:
            # Most likely the pivot lies just above a long run of equal scores, and the first of these complete the choice.
            stopped, tied = emit_row(scores, end, pivot - 1, ties, out, ties, BLOCK)
            count_hi = total + tied
            if tied >= ties:
                for start in range(0, total, EMIT):
                    j = start + tl.arange(0, EMIT)
                    at = tl.load(places + j, cache_modifier=".cg")
                    tl.store(out + ties + j, at, mask=(j < total) & (at >= stopped))
        if count_hi < k:
            search_row(scores, end, lo, hi, count, count_hi, k, out, BLOCK)
