"""Flash attention over ragged requests with a RoPE key shared by the heads, and the gather of cached rows before it."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from .sparse_prefill_tile import LN_2, NO_MAX, load_latent


@triton.jit
def _attend(
    q, qr, high, total, acc, k_nope, k_rope, v, begin, end, n_keys, sees, scale,
    k_stride, rope_stride, v_stride,
    D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr, VP: tl.constexpr,
    N: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end): online softmax in base 2. Without MASK every query sees every one of them, and all exist."""
    nope = tl.arange(0, DP)
    rope = tl.arange(0, RP)
    value = tl.arange(0, VP)
    for start in tl.range(begin, end, N, num_stages=STAGES):
        place = start + tl.arange(0, N)
        key = place.to(tl.int64)
        if MASK:
            there = place < n_keys
            k = tl.load(k_nope + (key * k_stride)[:, None] + nope[None, :], mask=there[:, None] & (nope < D)[None, :], other=0.0)
            kr = tl.load(k_rope + (key * rope_stride)[:, None] + rope[None, :], mask=there[:, None] & (rope < R)[None, :], other=0.0)
            x = tl.load(v + (key * v_stride)[:, None] + value[None, :], mask=there[:, None] & (value < V)[None, :], other=0.0)
        elif D == DP and R == RP and V == VP:
            k = tl.load(k_nope + (key * k_stride)[:, None] + nope[None, :])
            kr = tl.load(k_rope + (key * rope_stride)[:, None] + rope[None, :])
            x = tl.load(v + (key * v_stride)[:, None] + value[None, :])
        else:
            k = tl.load(k_nope + (key * k_stride)[:, None] + nope[None, :], mask=(nope < D)[None, :], other=0.0)
            kr = tl.load(k_rope + (key * rope_stride)[:, None] + rope[None, :], mask=(rope < R)[None, :], other=0.0)
            x = tl.load(v + (key * v_stride)[:, None] + value[None, :], mask=(value < V)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = tl.dot(qr, tl.trans(kr), s, input_precision=PRECISION)
        if MASK:
            s = tl.where(place[None, :] < sees[:, None], s, float("-inf"))
        new = tl.maximum(high, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new[:, None])
        factor = tl.exp2(high - new)
        high = new
        total = total * factor + tl.sum(p, 1)
        acc = tl.dot(p.to(x.dtype), x, acc * factor[:, None], input_precision=PRECISION)
    return high, total, acc


@triton.jit
def varlen_attention_kernel(
    q_all, k_nope, k_rope, v, query_start, key_start, out, lse, scale, H,
    q_token, q_head, k_token, k_head, rope_token, v_token, v_head,
    D: tl.constexpr, R: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, RP: tl.constexpr, VP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """M queries of one head of one request; ``scale`` includes log2(e). Late queries, which see most, come first."""
    head = tl.program_id(0)
    request = tl.program_id(2)
    first = tl.load(query_start + request)
    n_queries = tl.load(query_start + request + 1) - first
    block = (tl.num_programs(1) - 1 - tl.program_id(1)) * M
    if block < n_queries:
        first_key = tl.load(key_start + request)
        n_keys = tl.load(key_start + request + 1) - first_key
        query = block + tl.arange(0, M)
        live = query < n_queries
        token = (first + query).to(tl.int64)
        k_nope += first_key.to(tl.int64) * k_token + head.to(tl.int64) * k_head
        k_rope += first_key.to(tl.int64) * rope_token
        v += first_key.to(tl.int64) * v_token + head.to(tl.int64) * v_head
        nope = tl.arange(0, DP)
        rope = tl.arange(0, RP)
        at = q_all + (token * q_token + head.to(tl.int64) * q_head)[:, None]
        q = tl.load(at + nope[None, :], mask=live[:, None] & (nope < D)[None, :], other=0.0)
        qr = tl.load(at + (D + rope)[None, :], mask=live[:, None] & (rope < R)[None, :], other=0.0)
        if CAUSAL:
            sees = tl.minimum(n_keys - n_queries + query + 1, n_keys)
            free = n_keys - n_queries + block + 1  # keys that the first query sees
            last = tl.minimum(n_keys - n_queries + block + M, n_keys)
        else:
            sees = n_keys + query * 0
            free = n_keys
            last = n_keys
        free = tl.maximum(tl.minimum(free, n_keys), 0) // N * N
        high = tl.full([M], NO_MAX, tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, VP], tl.float32)
        high, total, acc = _attend(
            q, qr, high, total, acc, k_nope, k_rope, v, 0, free, n_keys, sees, scale, k_token, rope_token, v_token,
            D, R, V, DP, RP, VP, N, False, PRECISION, STAGES,
        )  # fmt: skip
        high, total, acc = _attend(
            q, qr, high, total, acc, k_nope, k_rope, v, free, last, n_keys, sees, scale, k_token, rope_token, v_token,
            D, R, V, DP, RP, VP, N, True, PRECISION, STAGES,
        )  # fmt: skip
        acc *= tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
        value = tl.arange(0, VP)
        at = token * H + head
        tl.store(out + at[:, None] * V + value[None, :], acc.to(out.dtype.element_ty), mask=live[:, None] & (value < V)[None, :])
        tl.store(lse + at, tl.where(total > 0.0, (high + tl.log2(total)) * LN_2, float("-inf")), mask=live)


@triton.jit(do_not_specialize=["S"])
def gather_latent_kernel(
    codes, scales, tails, rows, out, n_rows, S, code_stride, scale_stride, tail_stride,
    C: tl.constexpr, R: tl.constexpr, TAIL: tl.constexpr, G: tl.constexpr, W: tl.constexpr, RP: tl.constexpr,
    N: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """N rows; arguments as in ``sparse_prefill_tile``."""
    place = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.load(rows + place, mask=place < S, other=-1)
    there = (row >= 0) & (row < n_rows)
    row = row.to(tl.int64)
    dtype: tl.constexpr = out.dtype.element_ty
    latent = load_latent(codes, scales, row, there, code_stride, scale_stride, C, G, W, N, FP8, dtype)
    tail = tl.arange(0, RP)
    turned = tl.load(tails + (row * tail_stride)[:, None] + (TAIL + tail)[None, :], mask=there[:, None] & (tail < R)[None, :], other=0.0)
    column = tl.arange(0, G * W)
    at = out + (place.to(tl.int64) * (C + R))[:, None]
    tl.store(at + column[None, :], latent, mask=(place < S)[:, None] & (column < C)[None, :])
    tl.store(at + (C + tail)[None, :], turned.to(dtype), mask=(place < S)[:, None] & (tail < R)[None, :])
