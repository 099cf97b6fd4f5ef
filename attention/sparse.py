"""Attention over the selected keys of every query."""

from __future__ import annotations

import torch

from .absorbed import attend
from .latents import Latents
from .tiles import ELEMENT_BUDGET, TileGroup


def sparse_attention(queries: torch.Tensor, topk: torch.Tensor, group: TileGroup, cache: Latents, latent: int) -> torch.Tensor:
    """Absorbed queries [n, H, W] of a group over the keys at positions ``topk`` [n, k] -> latents fp32 [n, H, latent].

    -1 in ``topk`` is no key; every query needs at least one key, in its first column. Only selected rows are read.
    """
    tokens, heads, width = queries.shape
    step = max(1, ELEMENT_BUDGET // (topk.shape[1] * (width + heads)))
    full = group.fewest_keys >= topk.shape[1]  # every query has all its keys: nothing to hide
    parts = []
    for start in range(0, tokens, step):
        here = slice(start, start + step)
        hidden = None if full else (topk[here] < 0)[:, None]  # a row that is read anyway stands in for no key
        rows = cache.chosen(group, here, topk[here]).float()
        parts.append(attend(queries[here, None], rows, hidden, latent))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
