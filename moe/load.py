"""Exact counts of the tokens routed to each expert."""

from __future__ import annotations

import torch


class ExpertLoad:
    """Per-layer counts of routed tokens, over logical experts. Ids of -1 (padding) are not counted."""

    def __init__(self, n_layers: int, n_experts: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(n_layers, n_experts, dtype=torch.int64, device=device)  # [layers, experts]
        self.enabled = True

    def add(self, layer: int, ids: torch.Tensor) -> None:
        """Count logical expert ids [T, k] of one layer."""
        if not self.enabled or ids.numel() == 0:
            return
        n_experts = self.counts.shape[1]
        # Padding is counted in one extra bin that is cut off: no data-dependent shape, so it can be captured.
        bins = torch.where(ids < 0, n_experts, ids).flatten()
        found = torch.zeros(n_experts + 1, dtype=torch.int64, device=ids.device)
        found.scatter_add_(0, bins, torch.ones_like(bins))
        self.counts[layer] += found[:n_experts]

    def reset(self) -> None:
        """Forget all counts."""
        self.counts.zero_()
