"""The lightning indexer's logits over a paged cache, in plain PyTorch."""

from __future__ import annotations

import torch

from ..kv import fp4


def indexer_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    *,
    page_size: int,
    max_context: int,
    max_query: int,
    out: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """``I[t, s] = scale[s] * sum_h weights[t, h] * relu(q[t, h] . k[s])`` of every token against the keys it sees.

    The score of arXiv:2512.02556, section 2.1. Position ``s`` of a token's request lives in page ``page_table[row, s // page_size]``.

    Args:
        q: queries [T, H, D], float8_e4m3fn for an FP8 or FP4 pool, else fp32, bf16 or fp16.
        weights: fp32 [T, H], any sign: the query's scale, the head weight and all constant factors.
        pool: FP8 keys as uint8 [n_pages, page_size * (D + 4)], in a page first all e4m3 values, then all fp32 scales;
            FP4 keys as uint8 [n_pages, page_size * (D / 2 + 4)], in a page first all values, then all words of scales (``kv/fp4.py``);
            or float keys [n_rows, D] in fp32, bf16 or fp16 (their scale is 1), row number ``page * page_size + offset``.
        page_table: int32 [R, P], pages of each request; entries past a request's keys are never used.
        token_row: int32 or int64 [T], the request of each token, -1 for none; tokens of a request are consecutive.
        limit: int32 [T], the token sees keys before this position.
        page_size: keys of a page, a power of two from 1 to 256.
        max_context: host upper bound of ``limit``.
        max_query: host upper bound of the tokens of one request.
        out: where to write, fp32 [T, at least max_context], last dimension contiguous.
        start: int32 [T], first key of a token's range, 0 without it.

    Returns:
        fp32 [T, L], L >= max_context, defined for ``start <= s < limit`` only; other entries may hold anything.

    Raises:
        ValueError: shapes, dtypes or sizes do not fit together.
    """
    check(q, weights, pool, page_table, token_row, limit, page_size, max_context, max_query, out, start)
    if out is None:
        out = torch.empty(len(q), max_context, dtype=torch.float32, device=q.device)
    fill(out, q, weights, pool, page_table, token_row, limit, start, page_size, torch.float32)
    return out


def fill(
    out: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    start: torch.Tensor | None,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    """Write the defined entries of ``out`` [T, L], computed in ``dtype`` (tests use fp64)."""
    firsts = start.tolist() if start is not None else [0] * len(q)
    for token, (row, first, end) in enumerate(zip(token_row.tolist(), firsts, limit.tolist(), strict=True)):
        if row < 0 or end <= first:
            continue
        keys, scales = _keys(pool, page_table[row], first, end, page_size, q.shape[2], dtype)
        each = (keys @ q[token].to(dtype).T).relu_()
        out[token, first:end] = (each @ weights[token].to(dtype) * scales).to(out.dtype)


def _keys(
    pool: torch.Tensor, pages: torch.Tensor, first: int, end: int, page_size: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [n, D] and scales [n] of the keys at positions ``first`` to ``end``."""
    position = torch.arange(first, end, device=pool.device)
    page, offset = pages.index_select(0, position // page_size).long(), position % page_size
    if pool.dtype != torch.uint8:
        keys = pool.index_select(0, page * page_size + offset).to(dtype)
        return keys, keys.new_ones(len(keys))
    if is_fp4(pool, page_size, width):
        codes = pool[:, : page_size * width // 2].view(-1, page_size, width // 2)[page, offset]
        values, scales = fp4.decode(codes, pool[:, page_size * width // 2 :].view(torch.int32)[page, offset])
        return values.to(dtype), scales.to(dtype)
    codes = pool[:, : page_size * width].view(-1, page_size, width)[page, offset]
    scales = pool[:, page_size * width :].view(torch.float32)[page, offset]
    return codes.contiguous().view(torch.float8_e4m3fn).to(dtype), scales.to(dtype)


def is_fp4(pool: torch.Tensor, page_size: int, width: int) -> bool:
    """Whether the keys of ``width`` values in ``pool`` are FP4."""
    return pool.dtype == torch.uint8 and width >= 32 and pool.shape[1] == page_size * fp4.key_bytes(width)


def check(
    q: torch.Tensor,
    weights: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    page_size: int,
    max_context: int,
    max_query: int,
    out: torch.Tensor | None,
    start: torch.Tensor | None,
) -> None:
    """Refuse arguments that do not fit together, without looking at device values.

    Raises:
        ValueError: naming the argument, what was found and what is needed.
    """
    tokens, heads, width = q.shape
    if page_size < 1 or page_size > 256 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two from 1 to 256, got {page_size}")
    if width & (width - 1) or heads & (heads - 1):
        raise ValueError(f"q must be [T, H, D] with H and D powers of two, got {tuple(q.shape)}")
    if pool.dtype == torch.uint8:
        fits = pool.shape[1] == page_size * (width + 4) or is_fp4(pool, page_size, width)
        if q.dtype != torch.float8_e4m3fn or not fits:
            raise ValueError(
                f"an FP8 pool is uint8 [n_pages, {page_size * (width + 4)}] with float8_e4m3fn queries, an FP4 pool (32 values or more) "
                f"[n_pages, {page_size * fp4.key_bytes(width)}]; got a pool {tuple(pool.shape)} and {q.dtype}"
            )
    elif not (pool.is_floating_point() and q.is_floating_point()) or q.element_size() == 1 or pool.shape[1] != width:
        raise ValueError(
            f"a float pool is [n_rows, {width}] with fp32, bf16 or fp16 queries, got {pool.dtype} {tuple(pool.shape)} and {q.dtype}"
        )
    if weights.shape != (tokens, heads) or token_row.shape != (tokens,) or limit.shape != (tokens,):
        raise ValueError(
            f"{tokens} tokens of {heads} heads need weights [{tokens}, {heads}], token_row and limit [{tokens}], "
            f"got {tuple(weights.shape)}, {tuple(token_row.shape)} and {tuple(limit.shape)}"
        )
    if max_context > page_table.shape[1] * page_size:
        raise ValueError(f"max_context {max_context} needs a page table of more than {page_table.shape[1]} pages of {page_size} keys")
    if max_query < 1:
        raise ValueError(f"max_query must be 1 or more, got {max_query}")
    if out is not None and (out.shape[0] != tokens or out.shape[1] < max_context or out.dtype != torch.float32 or out.stride(1) != 1):
        raise ValueError(f"out must be fp32 [{tokens}, {max_context} or more] with contiguous rows, got {out.dtype} {tuple(out.shape)}")
    if start is not None and start.shape != (tokens,):
        raise ValueError(f"start must be [{tokens}], got {tuple(start.shape)}")
