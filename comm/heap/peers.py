"""A rank's view of a symmetric workspace: its own bytes, and everybody's as this process sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Kernels go by ``pointers``, their twins by ``views``; both name the same memory."""

    rank: int  # of this process in its group
    views: tuple[torch.Tensor | None, ...]  # [R] uint8 [n_bytes] of each rank; None where a peer cannot be mapped
    pointers: torch.Tensor  # int64 [R] on the device, address of each rank's workspace here; 0 where it cannot be mapped
    cut: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # views made before, of ``blocks.blocks_at``

    @property
    def own(self) -> torch.Tensor:
        """uint8 [n_bytes], this rank's workspace."""
        view = self.views[self.rank]
        assert view is not None
        return view

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.views)
