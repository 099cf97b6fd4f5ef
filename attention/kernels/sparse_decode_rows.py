"""Attention over selected rows for any widths and dtypes: the general kernel, one program a token, head block and split."""

from __future__ import annotations

import triton
import triton.language as tl

# arguments that vary from step to step: no compile for a value that is 1, or for another alignment
VARYING = ("n_rows", "k", "heads", "splits", "keys_per_split", "rows_token", "has_sink", "has_count", "n_keys", "sink")
_NO_SCORE = tl.constexpr(-1e30)  # the running maximum starts here, not at -inf: blocks without a key must not give NaN


@triton.jit
def epilogue(
    values,
    top,
    total,
    shift,
    column,
    head,
    token,
    split,
    heads,
    sink,
    out,
    lse,
    C: tl.constexpr,
    splits,
    has_sink,
    PARTS: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Store normalised ``values`` [HB, W] at ``column`` and (if FIRST) lse. ``top`` and ``total`` are in powers of two.

    With PARTS, ``out`` is fp32 [T, H, splits, C] and ``lse`` the base-2 logarithm, fp32 [T, H, splits].
    """
    inside = head < heads
    empty = total == 0.0  # and not `total > 0`: a NaN in a selected row must show in the output
    level = tl.where(empty, float("-inf"), top - shift + tl.log2(tl.where(empty, 1.0, total)))
    whole = total
    if not PARTS:
        extra = tl.load(sink + head, mask=inside & (has_sink != 0), other=float("-inf")) * 1.4426950408889634
        whole = total + tl.exp2(tl.where(empty, 0.0, extra - top + shift))
    weight = 1.0 / tl.where(empty, 1.0, whole)
    place = (token * heads + head).to(tl.int64) * splits + split
    if FIRST:
        tl.store(lse + place, level if PARTS else level * 0.6931471805599453, mask=inside)
    found = tl.where(empty[:, None], 0.0, values * weight[:, None])
    mask = inside[:, None] & (column[None, :] < C)
    tl.store(out + place[:, None] * C + column[None, :], found.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def sparse_decode_rows_kernel(
    q_latent,
    q_rope,
    pool,
    rows,
    n_keys,
    sink,
    out,
    lse,
    has_sink,
    has_count,
    n_rows,
    k,
    heads,
    splits,
    keys_per_split,
    factor,
    latent_token,
    latent_head,
    rope_token,
    rope_head,
    pool_row,
    rows_token,
    C: tl.constexpr,
    R: tl.constexpr,
    CP: tl.constexpr,
    RP: tl.constexpr,
    HB: tl.constexpr,
    NB: tl.constexpr,
    PARTS: tl.constexpr,
    FP8: tl.constexpr,
    DOT: tl.constexpr,
):
    """One pass of online softmax. ``factor`` is scale * log2(e); CP and RP are C and R padded to powers of two."""
    token = tl.program_id(0)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    split = tl.program_id(2)
    column = tl.arange(0, CP)
    turn = tl.arange(0, RP)
    in_column = column < C
    in_turn = turn < R
    in_head = head < heads
    q_at = q_latent + token.to(tl.int64) * latent_token + head[:, None].to(tl.int64) * latent_head + column[None, :]
    q = tl.load(q_at, mask=in_head[:, None] & in_column[None, :], other=0.0).to(DOT)
    r_at = q_rope + token.to(tl.int64) * rope_token + head[:, None].to(tl.int64) * rope_head + turn[None, :]
    r = tl.load(r_at, mask=in_head[:, None] & in_turn[None, :], other=0.0).to(DOT)
    acc = tl.zeros((HB, CP), tl.float32)
    top = tl.full((HB,), _NO_SCORE, tl.float32)
    total = tl.zeros((HB,), tl.float32)
    first = split * keys_per_split
    end = tl.minimum(first + keys_per_split, k)
    end = tl.minimum(end, tl.load(n_keys + token, mask=has_count != 0, other=k))
    for start in range(first, end, NB):
        key = start + tl.arange(0, NB)
        row = tl.load(rows + token.to(tl.int64) * rows_token + key, mask=key < end, other=-1)
        valid = (row >= 0) & (row < n_rows)
        base = pool + row.to(tl.int64) * pool_row
        if FP8:
            codes = base.to(tl.pointer_type(tl.float8e4nv))[:, None] + column[None, :]
            wide = tl.load(codes, mask=valid[:, None] & in_column[None, :], other=0.0).to(tl.float32)
            at = (base + C).to(tl.pointer_type(tl.float32))[:, None] + (column // 128)[None, :]
            v = (wide * tl.load(at, mask=valid[:, None] & in_column[None, :], other=0.0)).to(DOT)
            turns = (base + (C + 4 * ((C + 127) // 128))).to(tl.pointer_type(tl.bfloat16))[:, None] + turn[None, :]
        else:
            v = tl.load(base[:, None] + column[None, :], mask=valid[:, None] & in_column[None, :], other=0.0).to(DOT)
            turns = base[:, None] + C + turn[None, :]
        kr = tl.load(turns, mask=valid[:, None] & in_turn[None, :], other=0.0).to(DOT)
        score = tl.dot(q, v.T, input_precision="ieee")
        score = tl.dot(r, kr.T, score, input_precision="ieee") * factor
        score = tl.where(valid[None, :], score, float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - new[:, None])
        decay = tl.exp2(top - new)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(DOT), v, acc * decay[:, None], input_precision="ieee")
        top = new
    epilogue(acc, top, total, 0.0, column, head, token, split, heads, sink, out, lse, C, splits, has_sink, PARTS, True)
