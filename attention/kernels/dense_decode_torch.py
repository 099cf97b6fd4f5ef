"""Absorbed attention over every visible key of a paged cache, in plain PyTorch: what the dense decode kernel computes."""

from __future__ import annotations

import torch

from .sparse_attention_torch import evaluate


def dense_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    *,
    page_size: int,
    scale: float,
    max_context: int,
    max_query: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token attends the first ``limit`` keys of its request: (out [T, H, C] in q's dtype, lse fp32 [T, H]).

    Args:
        q_latent: [T, H, C] bf16, fp16 or fp32, absorbed queries; last dimension contiguous.
        q_rope: [T, H, R] of the same dtype, rotated.
        pool: FP8 rows, uint8 [n_rows, C + 4 * ceil(C / 128) + 2 * R], or [n_rows, C + R] bf16, fp16 or fp32.
        page_table: int32 [R, P]; row p * page_size + o of the pool holds key o of page p. Entries past a request's keys may be
            anything; -1 (or any page outside the pool) holds no keys.
        token_row: int [T], a token's row of ``page_table``; tokens of one request stand together.
        limit: int32 [T], keys a token sees, at most ``max_context``, not falling within a request. 0: output 0.
        page_size: keys of a page, any.
        scale: factor of the scores, positive.
        max_context: host bound of ``limit``.
        max_query: host bound of a request's tokens.

    lse is the natural log of the sum of exp(scale * score), -inf for a token without keys.

    Raises:
        ValueError: shapes or dtypes do not fit each other.

    Source: absorbed multi-head latent attention, arXiv:2405.04434 section 2.1.
    """
    check_paging(page_table, token_row, limit, q_latent.shape[0], page_size)
    out, lse = evaluate_dense(q_latent, q_rope, pool, page_table, token_row, limit, page_size, scale, max_context, torch.float32)
    return out.to(q_latent.dtype), lse


def evaluate_dense(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    page_size: int,
    scale: float,
    max_context: int,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``dense_decode`` computed in ``compute`` (float32 or float64), which is also the dtype of both results."""
    width = min(max_context, page_table.shape[1] * page_size)
    place = torch.arange(width, device=pool.device)
    pages = page_table.long()[:, place // page_size]
    row = torch.where(pages >= 0, pages * page_size + place % page_size, -1)
    row = torch.where(row < len(pool), row, -1).int()
    rows = row.index_select(0, token_row.long())
    return evaluate(q_latent, q_rope, pool, rows, scale=scale, sink=None, n_keys=limit, compute=compute)


def check_paging(page_table: torch.Tensor, token_row: torch.Tensor, limit: torch.Tensor, tokens: int, page_size: int) -> None:
    """Refuse page tables and per-token tensors that do not fit ``tokens``; reads shapes and dtypes only.

    Raises:
        ValueError: naming the argument, what was found and what would be valid.
    """
    if page_table.dtype != torch.int32 or page_table.dim() != 2:
        raise ValueError(f"page_table is {page_table.dtype} {list(page_table.shape)}; give int32 [requests, pages]")
    if token_row.dtype not in (torch.int32, torch.int64) or token_row.shape != (tokens,):
        raise ValueError(f"token_row is {token_row.dtype} {list(token_row.shape)}; give int32 or int64 [{tokens}]")
    if limit.dtype != torch.int32 or limit.shape != (tokens,):
        raise ValueError(f"limit is {limit.dtype} {list(limit.shape)}; give int32 [{tokens}]")
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; give the number of keys of a page, 1 or more")
