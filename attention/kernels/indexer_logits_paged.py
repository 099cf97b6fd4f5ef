"""The lightning indexer's logits in portable Triton: any page size, width and cache format, any GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .indexer_logits_torch import is_fp4


@triton.jit
def _fp4_values(words, scales, column, D: tl.constexpr):
    """e4m3 values [N, D] of FP4 keys (``kv/fp4.py``); ``words`` [N, 1] points to their bytes, ``scales`` is int32 [N, 1]."""
    second = column // 16 % 2
    place = column // 4 % 4 * (D // 32) + column // 32
    word = tl.load(words + place)
    magnitude = (word >> (16 * second + 4 * (column % 4))) & 7
    negative = (word >> (8 * (column % 4) + 7 - 4 * second)) & 1
    number = (scales >> (4 * (column // 4 % 4))) & 15
    normal = ((magnitude // 2 + 131 - number // 3) << 23) | ((magnitude % 2) << 22)  # times 2**5, the first octave
    value = tl.where(magnitude > 1, normal.to(tl.float32, bitcast=True), 0.0)
    half = ((131 - number // 3) << 23).to(tl.float32, bitcast=True)
    value = tl.where(magnitude == 1, half, value) * (1.5 - 0.25 * (number % 3))
    return tl.where(negative == 1, -value, value).to(tl.float8e4nv)


@triton.jit(do_not_specialize=["table_stride", "n_tokens"])
def indexer_logits_paged_kernel(
    q, weights, keys, scales, page_table, table_stride, token_row, limit, start, out, out_stride, n_tokens,
    key_stride, scale_stride,
    H: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    FP8: tl.constexpr, FP4: tl.constexpr, WIDE: tl.constexpr, HAS_START: tl.constexpr,
):  # fmt: skip
    """A program takes TOKENS tokens (those of one request at a time) and BLOCKS blocks of keys.

    ``key_stride`` and ``scale_stride`` are the elements from page to page. The token count of a program and the shape of the
    product never depend on the batch, so neither do the results.
    """
    first = tl.program_id(0) * TOKENS
    part = tl.program_id(1)
    token = first + tl.arange(0, TOKENS)
    real = token < n_tokens
    row = tl.load(token_row + token, mask=real, other=-1).to(tl.int32)
    end = tl.load(limit + token, mask=real, other=0)
    end = tl.where(row >= 0, end, 0)
    begin = tl.load(start + token, mask=real, other=0) if HAS_START else tl.zeros_like(end)
    end = tl.where(begin < end, end, 0)
    if tl.max(end, 0) > part * BLOCKS * BLOCK:
        column = tl.arange(0, TOKENS * H)
        depth = tl.arange(0, D)
        mine = first * H + column < n_tokens * H
        query = tl.load(q + (first.to(tl.int64) * H + column)[None, :] * D + depth[:, None], mask=mine[None, :], other=0.0)
        if WIDE:
            query = query.to(tl.float32)
        weight = tl.load(weights + first.to(tl.int64) * H + column, mask=mine, other=0.0)
        previous = -1
        for j in range(TOKENS):
            request = tl.max(tl.where(token == first + j, row, -1), 0)
            if (request >= 0) & ((j == 0) | (request != previous)):
                stop = tl.where(row == request, end, 0)
                high = tl.max(stop, 0)
                low = tl.min(tl.where(stop > 0, begin, 0x7FFFFFFF), 0)
                for block in range(tl.maximum(low // BLOCK, part * BLOCKS), tl.minimum(tl.cdiv(high, BLOCK), (part + 1) * BLOCKS)):
                    at = block * BLOCK + tl.arange(0, BLOCK)
                    seen = at < high
                    page = tl.load(page_table + request.to(tl.int64) * table_stride + at // PAGE, mask=seen, other=0).to(tl.int64)
                    if FP4:  # a place that is not seen has any page's key
                        words = tl.load(scales + page * scale_stride + at % PAGE)
                        key = _fp4_values((keys + page * key_stride + at % PAGE * (D // 8))[:, None], words[:, None], depth[None, :], D)
                    else:
                        offset = page * key_stride + (at % PAGE) * D
                        key = tl.load(keys + offset[:, None] + depth[None, :], mask=seen[:, None], other=0.0)
                    if WIDE:
                        key = key.to(tl.float32)
                    parts = tl.maximum(tl.dot(key, query, input_precision="ieee"), 0.0) * weight[None, :]
                    logit = tl.sum(tl.reshape(parts, [BLOCK, TOKENS, H]), 2)
                    if FP4:
                        logit = logit * (words & -65536).to(tl.float32, bitcast=True)[:, None]
                    elif FP8:
                        scale = tl.load(scales + page * scale_stride + at % PAGE, mask=seen, other=0.0)
                        logit = logit * scale[:, None]
                    to = out + token.to(tl.int64)[None, :] * out_stride + at[:, None]
                    tl.store(to, logit, mask=(at[:, None] < stop[None, :]) & (at[:, None] >= begin[None, :]))
            previous = request


def launch(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    start: torch.Tensor | None,
    out: torch.Tensor,
    page_size: int,
    max_context: int,
) -> None:
    """Run the kernel; arguments as in ``indexer_logits``, checked and contiguous."""
    tokens, heads, width = q.shape
    fp4 = is_fp4(pool, page_size, width)
    fp8 = pool.dtype == torch.uint8 and not fp4
    if fp4:
        keys = pool.view(torch.int32)
        scales = keys[:, page_size * width // 8 :]
    else:
        keys = pool.view(torch.float8_e4m3fn) if fp8 else pool
        scales = pool.view(torch.float32)[:, page_size * width // 4 :] if fp8 else limit
    together = max(1, 64 // heads)
    block = 64 if q.dtype == torch.float32 or keys.dtype == torch.float32 else 128
    blocks = 8
    grid = (triton.cdiv(tokens, together), triton.cdiv(max_context, block * blocks))
    indexer_logits_paged_kernel[grid](
        q,
        weights,
        keys,
        scales,
        page_table,
        page_table.stride(0),
        token_row,
        limit,
        limit if start is None else start,
        out,
        out.stride(0),
        tokens,
        keys.stride(0) if fp8 or fp4 else page_size * width,
        scales.stride(0),
        H=heads,
        D=width,
        TOKENS=together,
        PAGE=page_size,
        BLOCK=block,
        BLOCKS=blocks,
        FP8=fp8,
        FP4=fp4,
        WIDE=not fp4 and q.dtype != keys.dtype,
        HAS_START=start is not None,
        num_warps=4,
        num_stages=2,
    )
