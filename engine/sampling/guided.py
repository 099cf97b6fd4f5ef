"""Rows that may sample some tokens only, as a grammar says."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: elements that one block works on; bounds its memory to some 16 bytes an element
_BLOCK_ELEMENTS = 1 << 23


class Guided(NamedTuple):
    """Rows with a grammar, on the device of the logits."""

    rows: torch.Tensor  # int64 [G], ascending
    masks: torch.Tensor  # int32 [G, ceil(V / 32)], a bit for every token, lowest first: it may be sampled


def allow(logits: torch.Tensor, guided: Guided) -> torch.Tensor:
    """``logits`` fp32 [n, V] with -inf for the tokens that a row's mask does not have; other rows stay as they are."""
    bit = torch.arange(32, dtype=torch.int32, device=logits.device)
    vocab = logits.shape[1]
    block = max(1, _BLOCK_ELEMENTS // vocab)
    kept = []
    for rows, masks in zip(torch.split(guided.rows, block), torch.split(guided.masks, block), strict=True):
        allowed = ((masks.unsqueeze(2) >> bit) & 1).bool().flatten(1)[:, :vocab]
        kept.append(torch.where(allowed, logits[rows], -torch.inf))
    return logits.index_copy(0, guided.rows, torch.cat(kept))
