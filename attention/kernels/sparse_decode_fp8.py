"""Attention over selected FP8 rows, with the scales kept out of the matrix operands.

e4m3 values are exact in fp16, so keys go into the matrix units as they are and no key is ever multiplied out: a score is
``sum over chunks c of s_c * (q_c . code_c)``, an output chunk ``sum over keys j of (p_j * s_jc) * code_jc``.
The products of the second sum are divided by the largest scale seen so far, so that any fp32 scale fits fp16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sparse_decode_rows import VARYING, epilogue

_NO_SCORE = tl.constexpr(-1e30)
_SHIFT = tl.constexpr(15.0)  # probabilities are held times 2^15: the largest still fits fp16, small ones keep their bits
_TINY = tl.constexpr(1e-30)


@triton.jit
def head_exponent(amax):
    """Power of two, as fp32, by which a head's queries are multiplied to lie within 2^15; its inverse. Both exact."""
    bits = tl.minimum(tl.maximum(amax, 1e-25), 1e25).to(tl.int32, bitcast=True) & 0x7F800000
    return (0x7F000000 - bits + (14 << 23)).to(tl.float32, bitcast=True), (bits - (14 << 23)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=VARYING)
def sparse_decode_fp8_kernel(
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
    RP: tl.constexpr,
    HB: tl.constexpr,
    NB: tl.constexpr,
    PARTS: tl.constexpr,
    TURN: tl.constexpr,
):
    """One pass of online softmax; C must be a multiple of 128. TURN is the dtype of the RoPE product: bf16, or fp16 for fp16 queries."""
    CHUNKS: tl.constexpr = C // 128
    token = tl.program_id(0)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    split = tl.program_id(2)
    column = tl.arange(0, 128)
    turn = tl.arange(0, RP)
    inside = (head < heads)[:, None]
    q_at = q_latent + token.to(tl.int64) * latent_token + head[:, None].to(tl.int64) * latent_head + column[None, :]
    r_at = q_rope + token.to(tl.int64) * rope_token + head[:, None].to(tl.int64) * rope_head + turn[None, :]
    r = tl.load(r_at, mask=inside & (turn < R)[None, :], other=0.0)
    amax = tl.max(tl.abs(r.to(tl.float32)), 1)
    for c in tl.static_range(CHUNKS):
        amax = tl.maximum(amax, tl.max(tl.abs(tl.load(q_at + c * 128, mask=inside, other=0.0).to(tl.float32)), 1))
    up, down = head_exponent(amax)
    r = (r.to(tl.float32) * up[:, None]).to(TURN)
    q = ()
    acc = ()
    for c in tl.static_range(CHUNKS):
        q = q + ((tl.load(q_at + c * 128, mask=inside, other=0.0).to(tl.float32) * up[:, None]).to(tl.float16),)
        acc = acc + (tl.zeros((HB, 128), tl.float32),)
    largest = ()
    for _ in tl.static_range(CHUNKS):
        largest = largest + (_TINY + 0.0,)
    factors = down * factor
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
        codes = ()
        scales = ()
        for c in tl.static_range(CHUNKS):
            at = (base + c * 128).to(tl.pointer_type(tl.float8e4nv))[:, None] + column[None, :]
            codes = codes + (tl.load(at, mask=valid[:, None], other=0.0).to(tl.float16),)
            scales = scales + (tl.load((base + (C + 4 * c)).to(tl.pointer_type(tl.float32)), mask=valid, other=0.0),)
        turns = (base + (C + 4 * CHUNKS)).to(tl.pointer_type(tl.bfloat16))[:, None] + turn[None, :]
        kr = tl.load(turns, mask=valid[:, None] & (turn < R)[None, :], other=0.0).to(TURN)
        score = tl.dot(r, kr.T)
        for c in tl.static_range(CHUNKS):
            score += tl.dot(q[c], codes[c].T) * scales[c][None, :]
        score = tl.where(valid[None, :], score * factors[:, None], float("-inf"))
        new = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - new[:, None] + _SHIFT)
        decay = tl.exp2(top - new)
        total = total * decay + tl.sum(p, 1)
        top = new
        summed = ()
        grown = ()
        for c in tl.static_range(CHUNKS):
            larger = tl.maximum(largest[c], tl.max(tl.abs(scales[c]), 0))
            weight = (p * (scales[c] / larger)[None, :]).to(tl.float16)
            summed = summed + (tl.dot(weight, codes[c], acc[c] * (decay * (largest[c] / larger))[:, None]),)
            grown = grown + (larger,)
        acc = summed
        largest = grown
    for c in tl.static_range(CHUNKS):
        epilogue(
            acc[c] * largest[c],
            top,
            total,
            _SHIFT,
            c * 128 + column,
            head,
            token,
            split,
            heads,
            sink,
            out,
            lse,
            C,
            splits,
            has_sink,
            PARTS,
            c == 0,
        )
