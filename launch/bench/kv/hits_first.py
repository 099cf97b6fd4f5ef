"""Attention in two parts, over the rows that were there and over those that were fetched, joined by their log-sum-exps.

The result equals that of one attention over all rows up to rounding, not bit by bit.
"""

from __future__ import annotations

import torch


def found_rows(rows: torch.Tensor, target: torch.Tensor, count: torch.Tensor, mark: torch.Tensor, stamp: torch.Tensor) -> torch.Tensor:
    """``rows`` int32 [R, k] with -1 for those that are being fetched: the first ``count`` [R] of ``target`` int32 [R, n].

    ``mark``: int32 [hot rows], any row of the pool that may be a target is below its length; written with ``stamp`` int32 [1].
    """
    if rows.is_cuda:
        from .hits_first_kernels import found_rows as kernel

        return kernel(rows, target, count, mark, stamp)
    live = torch.arange(target.shape[1]) < count[:, None]
    mark[target[live].long()] = stamp
    hot = (rows >= 0) & (rows < len(mark))
    return torch.where(hot & (mark[rows.clamp(0, len(mark) - 1).long()] == stamp), -1, rows)


def join(a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """Attention over two sets of rows, of the attentions ``a`` and ``b`` [T, H, C] over each and their lse fp32 [T, H]."""
    if a.is_cuda:
        from .hits_first_kernels import join as kernel

        return kernel(a, lse_a, b, lse_b)
    total = torch.logaddexp(lse_a, lse_b)
    total = torch.where(total == float("-inf"), 0.0, total)
    return ((lse_a - total).exp()[..., None] * a + (lse_b - total).exp()[..., None] * b).to(a.dtype)
