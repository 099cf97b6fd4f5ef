"""All experts on this rank: a sort and a gather, and a weighted sum."""

from __future__ import annotations

from typing import Any

import torch

from ..parallel.group import Group
from .base import BaseDispatcher
from .dispatcher import EPSpec, Routed
from .grouping import group_by_slot, weighted_rows
from .rows import DTYPES, rounded


class LocalDispatcher(BaseDispatcher):
    """The backend of one rank. Tokens are rounded by the payload as if they had travelled."""

    name = "local"

    def __init__(self, spec: EPSpec) -> None:
        super().__init__(Group.solo("ep"), spec)

    def dispatch_send(self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor) -> Any:
        """See ``Dispatcher``."""
        slots, weights = self._prepare(x, slot_ids, weights)
        routed, arrived = group_by_slot(self.spec, rounded(self.spec, x), slots, weights)
        routed.handle = arrived
        return routed

    def dispatch_recv(self, ticket: Any) -> Routed:
        """See ``Dispatcher``."""
        routed: Routed = ticket
        return routed

    def combine_send(self, y: torch.Tensor, routed: Routed) -> Any:
        """See ``Dispatcher``."""
        self._check_outputs(y, routed)
        return weighted_rows(self.spec, y.to(DTYPES[self.spec.dtype]), routed.handle)

    def combine_recv(self, ticket: Any) -> torch.Tensor:
        """See ``Dispatcher``."""
        out: torch.Tensor = ticket
        return out
