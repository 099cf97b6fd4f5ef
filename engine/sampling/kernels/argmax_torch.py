"""What ``argmax.greedy_tokens`` computes, in plain PyTorch."""

from __future__ import annotations

import torch


def greedy_tokens(logits: torch.Tensor) -> torch.Tensor:
    """The highest logit of every row of [n, V], the lowest token on ties: int64 [n].

    NaN is above every number, the first NaN wins (as in numpy).
    """
    return torch.argmax(logits, dim=-1)
