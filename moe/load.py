"""Exact counts of the tokens routed to each expert."""

from __future__ import annotations

import torch


class ExpertLoad:
    """Per-layer counts of routed tokens, over logical experts. Ids of -1 (padding) are not counted."""

    def __init__(self, n_layers: int, n_experts: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(n_layers, n_experts, dtype=torch.int64, device=device)  # [layers, experts]
        self.enabled = True
        #: chosen experts [t, k] int16 of each layer's tokens since ``take_kept``, in order; None: they are not kept
        self.kept: list[list[torch.Tensor]] | None = None

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

    def keep(self, layer: int, ids: torch.Tensor) -> None:
        """Keep the logical expert ids [T, k] of one layer's tokens, if they are wanted. For steps that run eagerly."""
        if self.kept is not None and ids.numel():
            self.kept[layer].append(ids.to(torch.int16))

    def take_kept(self) -> list[torch.Tensor]:
        """Ids [T, k] that were kept since the last call, one tensor for each layer; empty where there were none."""
        assert self.kept is not None, "ids are not kept"
        empty = torch.zeros(0, 0, dtype=torch.int16, device=self.counts.device)
        found = [torch.cat(parts) if parts else empty for parts in self.kept]
        self.kept = [[] for _ in found]
        return found

    def reset(self) -> None:
        """Forget all counts."""
        self.counts.zero_()
