"""Log-probabilities of tokens from raw logits."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TopLogprobs(NamedTuple):
    """Log-probabilities of n rows; K may be 0."""

    logprob: torch.Tensor  # fp32 [n], of the row's token
    rank: torch.Tensor  # int64 [n], 1 for the likeliest token; ties by lowest id
    top_ids: torch.Tensor  # int64 [n, K], the likeliest tokens, best first, ties by lowest id
    top_logprobs: torch.Tensor  # fp32 [n, K]


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, width: int) -> TopLogprobs:
    """Log-softmax of ``logits`` (fp32 [n, V]) at ``tokens`` (int64 [n]) and at the ``width`` likeliest ids.

    Used for sampled tokens and, with the prompt's next tokens, for prompt log-probabilities.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    picked = tokens.unsqueeze(1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    value = logits.gather(1, picked)
    rank = 1 + ((logits > value) | ((logits == value) & (ids < picked))).sum(dim=-1)
    top = torch.topk(sort_keys(logits), min(width, logits.shape[1]), dim=-1).indices
    return TopLogprobs(logprobs.gather(1, picked).squeeze(1), rank, top, logprobs.gather(1, top))


def sort_keys(x: torch.Tensor) -> torch.Tensor:
    """Distinct int64 keys that order fp32 values, equal ones by lowest column: ``torch.topk`` itself leaves ties open."""
    bits = (x + 0.0).view(torch.int32).long()  # adding 0 turns -0.0 into 0.0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return (ordered << 32) - torch.arange(x.shape[1], device=x.device)
