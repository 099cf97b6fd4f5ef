"""Selections of keys that need no indexer; evaluation plants them in its place to see what a broken one looks like."""

from __future__ import annotations

from typing import Literal

import torch

from .batch import AttentionBatch
from .topk import select_topk

Selection = Literal["indexer", "dense", "recent", "random"]

_MASK = (1 << 31) - 1


def recent_keys(batch: AttentionBatch, k: int) -> torch.Tensor:
    """The last ``k`` visible keys of every token: positions int64 [T, k], ascending, -1 at the end of short rows."""
    first = (batch.positions - (k - 1)).clamp_min(0)
    chosen = first[:, None] + torch.arange(k, device=first.device)
    return torch.where(chosen <= batch.positions[:, None], chosen, -1)


def random_keys(batch: AttentionBatch, k: int, *, layer: int, seed: int = 0) -> torch.Tensor:
    """``k`` visible keys of every token drawn evenly, the same for the same (seed, layer, position) in any batch.

    Positions int64 [T, k], ascending, -1 at the end of short rows. The draw is a hash of seed, layer, token position and
    key position, so that no generator has to be run token by token.
    """
    out: torch.Tensor | None = None
    for group in batch.groups:
        chosen = torch.empty(group.n_tokens, k, dtype=torch.int64, device=batch.positions.device)
        for chunk in group.chunks(pair_cost=4, key_cost=1):
            limit = chunk.limit.reshape(-1, 1)
            start = _mix(_mix(limit.new_full((), seed) * 1_000_003 + layer) + limit)
            draw = _mix(start + _mix(torch.arange(chunk.keys, device=limit.device)))
            chunk.store(chosen, select_topk(draw.double(), limit[:, 0], k))
        out = group.put(out, chosen, batch.n_tokens)
    assert out is not None
    return out


def _mix(values: torch.Tensor) -> torch.Tensor:
    """A 31-bit hash of int64 values of any shape (multiply and shift, twice)."""
    values = ((values & _MASK) * 0x2C1B3C6D) & _MASK
    values = ((values ^ (values >> 15)) * 0x297A2D39) & _MASK
    return values ^ (values >> 13)
