"""Exact top-k: the highest scores, the lowest positions among equal ones, in order of position."""

from __future__ import annotations

import torch


def select_topk(scores: torch.Tensor, limit: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the ``k`` highest of the first ``limit`` scores of every row, ascending, -1 at the end of short rows.

    ``scores`` [N, L] float, ``limit`` [N] int64 in 0..L; int64 [N, k] out. Scores past the limit may hold anything.
    Equal scores (0.0 and -0.0 are equal, -inf is a score like any other) are decided for the lower position.
    NaN counts as -inf, so that a broken request still selects keys of its own.
    """
    length = scores.shape[1]
    every = torch.arange(length, device=scores.device)
    if length <= k:
        chosen = torch.where(every < limit[:, None], every, -1)
        return torch.nn.functional.pad(chosen, (0, k - length), value=-1)
    low = float("-inf")
    scores = scores.nan_to_num(nan=low, posinf=float("inf"), neginf=low).masked_fill_(every >= limit[:, None], low)
    border = scores.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above = scores > border
    tied = scores == border
    keep = above | (tied & (tied.cumsum(1) <= k - above.sum(1, keepdim=True)))
    # Exactly k are kept in every row. They go to columns 1..k in order of position, the others to column 0.
    column = torch.where(keep, keep.cumsum(1), 0)
    out = torch.empty(scores.shape[0], k + 1, dtype=torch.int64, device=scores.device)
    chosen = out.scatter_(1, column, every.expand_as(column))[:, 1:]
    # In a row with fewer than k candidates the rest is the -inf past its limit, which order of position puts last.
    return torch.where(chosen < limit[:, None], chosen, -1)
