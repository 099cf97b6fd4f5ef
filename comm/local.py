"""All experts on this rank: a sort and a gather, and a weighted sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..parallel.group import Group
from .base import BaseDispatcher
from .caps import Caps
from .dispatcher import EPSpec, Routed
from .fp8 import dequantise
from .grouping import Arrived, group_by_slot, results, weighted_rows
from .rows import DTYPES, rounded


@dataclass(kw_only=True)
class _Flight:
    """One dispatch from its send to its combine."""

    values: torch.Tensor  # [T, hidden] as if they had travelled
    slots: torch.Tensor  # [T, k]
    weights: torch.Tensor  # [T, k]
    epoch: int
    arrived: Arrived | None = None


class LocalDispatcher(BaseDispatcher):
    """The backend of one rank. Tokens are rounded by the payload as if they had travelled."""

    name = "local"
    caps = Caps(graph=True, overlap_without_sm=True, max_ranks=1)

    def __init__(self, spec: EPSpec) -> None:
        super().__init__(Group.solo("ep"), spec)

    def dispatch_send(
        self,
        x: torch.Tensor,
        slot_ids: torch.Tensor,
        weights: torch.Tensor,
        n_valid: torch.Tensor | None = None,
        *,
        tag: int = 0,
        capacity: int | None = None,
        scales: torch.Tensor | None = None,
    ) -> Any:
        """See ``Dispatcher``."""
        slots, weights = self._prepare(x, slot_ids, weights, n_valid, capacity=capacity, scales=scales)
        values = rounded(self.spec, x) if scales is None else dequantise(x, scales, DTYPES[self.spec.dtype])
        return _Flight(values=values, slots=slots, weights=weights, epoch=self._epoch)

    def dispatch_recv(self, ticket: Any, layout: str = "contiguous") -> Routed:
        """See ``Dispatcher``."""
        self._check_recv(layout)
        flight: _Flight = ticket
        origins = torch.arange(len(flight.values), dtype=torch.int32, device=flight.values.device)
        routed, flight.arrived = group_by_slot(self.spec, flight.values, flight.slots, flight.weights, origins, layout)
        routed.handle, routed.epoch = flight, flight.epoch
        return routed

    def combine_send(self, y: torch.Tensor, routed: Routed, *, index: torch.Tensor | None = None) -> Any:
        """See ``Dispatcher``."""
        self._check_open()
        arrived = routed.handle.arrived
        outputs, place = results(self.spec, y, routed, arrived, index)
        if place is not None:
            outputs = outputs.to(DTYPES[self.spec.dtype])
        return weighted_rows(self.spec, outputs, place, arrived.weights)

    def combine_recv(self, ticket: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Dispatcher``."""
        result: torch.Tensor = ticket
        return self._deliver(result, out)
