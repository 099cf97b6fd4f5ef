"""Choice of experts: scores, group limit, top-k and weights (DeepSeek-V2 section 2.2, DeepSeek-V3 section 2.1.2)."""

from __future__ import annotations

import torch
from torch import nn

from ..parallel.linear import WideWeight
from .config import MoEConfig


def stable_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest scores of each row, largest first; the lowest id wins a tie. scores [T, N] -> [T, k] int64."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def limit_groups(scores: torch.Tensor, group_scores: torch.Tensor, keep: int, fill: float) -> torch.Tensor:
    """Overwrite with ``fill`` the scores of all but the ``keep`` best groups. scores [T, E], group_scores [T, G]."""
    tokens, groups = group_scores.shape
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, stable_topk(group_scores, keep), True)
    return torch.where(allowed.unsqueeze(-1), scores.view(tokens, groups, scores.shape[1] // groups), fill).view_as(scores)


class Router(nn.Module):
    """Scores tokens against experts in float32 and chooses ``top_k`` of them.

    Parameter names follow Hugging Face: ``weight`` [experts, hidden] and, for ``noaux_tc``,
    ``e_score_correction_bias`` [experts]; both float32 whatever the compute dtype.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.hidden, dtype=torch.float32), requires_grad=False)
        self.wide = WideWeight()
        if config.method == "noaux_tc":
            bias = torch.empty(config.n_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def settle(self) -> None:
        """Called once when the weights are in place."""
        self.wide.settle(self.weight)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> fp32 [T, experts]."""
        return self.wide.product(x, self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> logical expert ids [T, k] int64, ascending in each row, and their weights [T, k] float32."""
        logits = self.logits(x)
        scores = logits.sigmoid() if self.config.scoring == "sigmoid" else logits.softmax(-1)
        ids = self._choose(scores).sort(dim=-1).values
        weights = scores.gather(1, ids)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return ids, weights * self.config.routed_scaling_factor

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """scores [T, E] -> chosen ids [T, k], unordered."""
        config = self.config
        if config.method == "greedy":
            return stable_topk(scores, config.top_k)
        grouped = (len(scores), config.n_group, config.n_experts // config.n_group)
        if config.method == "group_limited_greedy":
            limited = limit_groups(scores, scores.view(grouped).amax(-1), config.topk_group, 0.0)
            return stable_topk(limited, config.top_k)
        # The bias steers the choice only; masked groups are -inf because biased scores can be negative.
        biased = scores + self.e_score_correction_bias
        if config.topk_group < config.n_group:
            two_best = biased.view(grouped).topk(2, dim=-1).values.sum(-1)
            biased = limit_groups(biased, two_best, config.topk_group, float("-inf"))
        return stable_topk(biased, config.top_k)
