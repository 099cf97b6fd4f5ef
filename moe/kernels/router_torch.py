"""What ``router.route`` computes, in plain PyTorch."""

from __future__ import annotations

from typing import Literal

import torch

from ..router import limit_groups, stable_topk
from ..ways import way_of_rows


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    n_group: int,
    topk_group: int,
    top_k: int,
    scoring: Literal["sigmoid", "softmax"],
    method: Literal["noaux_tc", "greedy", "group_limited_greedy"],
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    expert_to_slot: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    n_valid: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts of every token: ids int32 [T, k] ascending, weights fp32 [T, k], physical slots int32 [T, k].

    logits fp32 [T, E]; bias fp32 [E] for ``noaux_tc``; ``expert_to_slot`` [E] or [E, W] (slots are ids without it): of W ways
    each row takes the one of ``way_of_rows``; ``counts`` int64 [E] is added to; rows from ``n_valid`` int32 [1] on are padding:
    ids and slots -1, weights 0, not counted.
    """
    tokens, experts = logits.shape
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    ids = _choose(scores, bias, n_group, topk_group, top_k, method).sort(dim=-1).values
    weights = scores.gather(1, ids)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routed_scaling_factor
    slots = ids
    if expert_to_slot is not None:
        table = expert_to_slot.view(experts, -1).long()
        slots = table[ids, way_of_rows(tokens, table.shape[1], ids.device)[:, None]]
    if n_valid is not None:
        padding = torch.arange(tokens, device=logits.device)[:, None] >= n_valid
        ids, slots = ids.masked_fill(padding, -1), slots.masked_fill(padding, -1)
        weights = weights.masked_fill(padding, 0.0)
    if counts is not None:
        bins = torch.where(ids < 0, experts, ids).flatten()
        found = torch.zeros(experts + 1, dtype=torch.int64, device=logits.device)
        counts += found.scatter_add_(0, bins, torch.ones_like(bins))[:experts]
    return ids.int(), weights, slots.int()


def _choose(scores: torch.Tensor, bias: torch.Tensor | None, n_group: int, topk_group: int, top_k: int, method: str) -> torch.Tensor:
    """scores [T, E] -> chosen ids [T, k], unordered."""
    if method == "greedy":
        return stable_topk(scores, top_k)
    grouped = (scores.shape[0], n_group, scores.shape[1] // n_group)
    if method == "group_limited_greedy":
        return stable_topk(limit_groups(scores, scores.view(grouped).amax(-1), topk_group, 0.0), top_k)
    if bias is None:
        raise ValueError("noaux_tc steers the choice by a bias [E]; none was given")
    biased = scores + bias
    if topk_group < n_group:
        two_best = biased.view(grouped).topk(2, dim=-1).values.sum(-1)
        biased = limit_groups(biased, two_best, topk_group, float("-inf"))
    return stable_topk(biased, top_k)
