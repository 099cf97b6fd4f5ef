"""Join of the parts that the splits of a sparse decode leave behind."""

from __future__ import annotations

import triton
import triton.language as tl

from ...parallel.kernels.overlap import enter


@triton.jit(do_not_specialize=("sink", "has_sink", "heads", "splits"))
def sparse_decode_combine_kernel(
    part,
    part_lse,
    sink,
    out,
    lse,
    has_sink,
    heads,
    splits,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out [T, H, C] and lse [T, H] of ``part`` fp32 [T, H, splits, C] and base-2 ``part_lse`` [T, H, splits].

    A program joins WIDTH columns of one token and head.

    Parts are summed in one fixed order. Every part is normalised in itself, so that its weight is its share of the whole sum.
    """
    enter(EARLY)
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, PADDED)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    level = tl.load(part_lse + place * splits + split, mask=split < splits, other=float("-inf"))
    mask = (split < splits)[:, None] & (column < C)[None, :]
    values = tl.load(part + (place * splits + split)[:, None] * C + column[None, :], mask=mask, other=0.0)
    top = tl.max(level, 0)
    empty = top == float("-inf")  # every part holds zeros then
    top = tl.where(empty, 0.0, top)
    weight = tl.exp2(level - top)
    total = tl.sum(weight, 0)
    whole = total
    whole += tl.exp2(tl.load(sink + place % heads, mask=has_sink != 0, other=float("-inf")) * 1.4426950408889634 - top)
    found = tl.sum(values * (weight / tl.where(empty, 1.0, whole))[:, None], 0)
    tl.store(out + place * C + column, found.to(out.dtype.element_ty), mask=column < C)
    if tl.program_id(1) == 0:
        natural = (top + tl.log2(tl.where(empty, 1.0, total))) * 0.6931471805599453
        tl.store(lse + place, tl.where(empty, float("-inf"), natural))
