"""Sparse MLA attention in plain Triton: one token and a tile of its heads a program, over the rows the token names.

Works for every width, dtype and cache format; with few heads the tile is 16 heads high, so that no work goes to padding.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NO_MAX = tl.constexpr(-1.0e30)  # finite, so that a block without keys gives exp2(-inf - NO_MAX) = 0 and no NaN


@triton.jit
def load_latent(
    codes, scales, row, there, code_stride, scale_stride,
    C: tl.constexpr, G: tl.constexpr, W: tl.constexpr, N: tl.constexpr, FP8: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Latent values of N rows, [N, G * W] in DTYPE: G groups of W columns. Rows that are not there give zeros."""
    if FP8:
        group = tl.arange(0, G)
        column = group[None, :, None] * W + tl.arange(0, W)[None, None, :]
        at = codes + (row * code_stride)[:, None, None] + column
        value = tl.load(at, mask=there[:, None, None] & (column < C), other=0.0)
        known = there[:, None] & (group * W < C)[None, :]
        factor = tl.load(scales + (row * scale_stride)[:, None] + (C // 4 + group)[None, :], mask=known, other=0.0)
        return tl.reshape((value.to(tl.float32) * factor[:, :, None]).to(DTYPE), [N, G * W])
    column = tl.arange(0, G * W)
    at = codes + (row * code_stride)[:, None] + column[None, :]
    if C == G * W:
        return tl.load(at, mask=there[:, None], other=0.0).to(DTYPE)
    return tl.load(at, mask=there[:, None] & (column < C)[None, :], other=0.0).to(DTYPE)


@triton.jit
def sparse_prefill_tile_kernel(
    q_latent, q_tail, codes, scales, tails, rows, n_keys, sink, out, lse, units, parts, part_lse,
    n_rows, width, scale, H, q_token, q_head, tail_token, tail_head, code_stride, scale_stride, tail_stride,
    C: tl.constexpr, R: tl.constexpr, TAIL: tl.constexpr, G: tl.constexpr, W: tl.constexpr, RP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FP8: tl.constexpr, SINK: tl.constexpr, COUNTS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, PAGE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """``scale`` includes log2(e). The RoPE values of a row start at its element TAIL in ``tails``; strides are in elements.

    PAGE 0: one token a program, ``rows`` [T, width] are its keys, ``n_keys`` how many of them count (if COUNTS). Else ``rows``
    is a page table [R, width], and a program serves a unit of ``dense_decode_plan``: up to B tokens, which see their first
    ``n_keys`` keys.
    """
    DTYPE: tl.constexpr = q_latent.dtype.element_ty
    groups = tl.cdiv(H * B, M)
    program = tl.program_id(0)
    unit = (program // groups).to(tl.int64)
    m = (program % groups) * M + tl.arange(0, M)
    j = m // H
    head = m - j * H
    if PAGE == 0:
        live = j == 0
        token = unit + tl.zeros([M], tl.int64)
        begin = 0
        end = width
        if COUNTS:
            end = tl.minimum(tl.load(n_keys + unit), width)
        rows += unit * width
    else:
        units += unit * 8
        live = j < tl.load(units + 1)
        token = tl.load(units).to(tl.int64) + j
        begin = tl.load(units + 2)
        end = tl.load(units + 3)
        rows += tl.load(units + 5).to(tl.int64) * width
        sees = tl.load(n_keys + token, mask=live, other=0)

    column = tl.arange(0, G * W)
    tail = tl.arange(0, RP)
    at = q_latent + (token * q_token + head.to(tl.int64) * q_head)[:, None] + column[None, :]
    q = tl.load(at, mask=live[:, None] & (column < C)[None, :], other=0.0)
    at = q_tail + (token * tail_token + head.to(tl.int64) * tail_head)[:, None] + tail[None, :]
    qt = tl.load(at, mask=live[:, None] & (tail < R)[None, :], other=0.0)
    high = tl.full([M], NO_MAX, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, G * W], tl.float32)
    for start in tl.range(begin, end, N, num_stages=STAGES):
        place = start + tl.arange(0, N)
        if PAGE == 0:
            row = tl.load(rows + place, mask=place < end, other=-1)
        else:
            page = tl.load(rows + place // PAGE, mask=place < end, other=-1)
            row = tl.where(page >= 0, page * PAGE + place % PAGE, -1)
        there = (row >= 0) & (row < n_rows)
        row = row.to(tl.int64)
        k = load_latent(codes, scales, row, there, code_stride, scale_stride, C, G, W, N, FP8, DTYPE)
        kt = tl.load(
            tails + (row * tail_stride)[:, None] + (TAIL + tail)[None, :], mask=there[:, None] & (tail < R)[None, :], other=0.0
        ).to(DTYPE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.dot(qt, tl.trans(kt), s, input_precision=PRECISION)
        seen = there[None, :]
        if B > 1:
            seen = seen & (place[None, :] < sees[:, None])
        s = tl.where(seen, s * scale, float("-inf"))
        new = tl.maximum(high, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        factor = tl.exp2(high - new)
        high = new
        total = total * factor + tl.sum(p, 1)
        acc = tl.dot(p.to(DTYPE), k, acc * factor[:, None], input_precision=PRECISION)
    weight = total
    if SINK:
        weight += tl.exp2(tl.load(sink + head, mask=live, other=0.0) * LOG2_E - high)
    acc *= tl.where(total > 0.0, 1.0 / weight, 0.0)[:, None]
    own = live
    if PAGE > 0:
        part = tl.load(units + 6)
        own = live & (part < 0)
        cut = live & (part >= 0)
        at = part.to(tl.int64) * (B * H) + m
        tl.store(parts + at[:, None] * C + column[None, :], acc, mask=cut[:, None] & (column < C)[None, :])
        tl.store(part_lse + at, tl.where(total > 0.0, high + tl.log2(total), float("-inf")), mask=cut)
    at = token * H + head
    tl.store(out + at[:, None] * C + column[None, :], acc.to(out.dtype.element_ty), mask=own[:, None] & (column < C)[None, :])
    tl.store(lse + at, tl.where(total > 0.0, (high + tl.log2(total)) * LN_2, float("-inf")), mask=own)
