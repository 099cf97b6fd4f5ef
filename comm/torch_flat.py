"""Expert parallelism over one all-to-all: a token goes straight to every rank that hosts one of its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..parallel.group import Group, Pending
from .base import BaseDispatcher
from .dispatcher import EPSpec, Routed
from .grouping import Arrived, rows_home, unpack_rows
from .hop import Hop, HopTicket
from .order import ordered_sum
from .rows import DTYPES, RowLayout


@dataclass(kw_only=True)
class _Flight:
    """One dispatch from its send to its combine."""

    hop: HopTicket
    weights: torch.Tensor  # [T, k] of this rank's own tokens
    epoch: int
    arrived: Arrived | None = None


class TorchDispatcher(BaseDispatcher):
    """Counts first, then one row per (token, destination rank) in one uneven all-to-all.

    Combine: the expert's rank sums its results of a token in fp32 in ascending slot order, the source adds the ranks'
    sums in ascending rank order in fp32. In deterministic mode every (token, choice) result comes back on its own and
    the source sums them in the order of its choices, as ``LocalDispatcher`` does: neither layout nor placement changes a bit.
    """

    name = "torch"

    def __init__(self, group: Group, spec: EPSpec) -> None:
        super().__init__(group, spec)
        self._layout = RowLayout(spec=spec)
        self._hop = Hop(group, self._sent)

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
        """See ``Dispatcher``. Waits for the other ranks' counts; the rows travel on their own."""
        slots, weights = self._prepare(x, slot_ids, weights, n_valid, capacity=capacity, scales=scales)
        rows = self._layout.pack(x, slots, weights, self.group.index, scales)
        targets = torch.div(slots, self.spec.slots_per_rank, rounding_mode="floor")  # -1 stays -1
        return _Flight(hop=self._hop.send(rows, targets), weights=weights, epoch=self._epoch)

    def dispatch_recv(self, ticket: Any, layout: str = "contiguous") -> Routed:
        """See ``Dispatcher``."""
        self._check_recv(layout)
        flight: _Flight = ticket
        rows = flight.hop.pending.wait()
        routed, flight.arrived = unpack_rows(self._layout, self.group.index, rows, layout)
        routed.handle, routed.epoch = flight, flight.epoch
        return routed

    def combine_send(self, y: torch.Tensor, routed: Routed, *, index: torch.Tensor | None = None) -> Any:
        """See ``Dispatcher``."""
        self._check_open()
        flight: _Flight = routed.handle
        assert flight.arrived is not None
        values = rows_home(self.spec, y, routed, flight.arrived, index)
        return flight, self._hop.send_back(flight.hop, values, singly=self.spec.deterministic)

    def combine_recv(self, ticket: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Dispatcher``."""
        flight: _Flight = ticket[0]
        pending: Pending = ticket[1]
        values = pending.wait()
        if self.spec.deterministic:
            total = ordered_sum(values, flight.hop.choice_index(), flight.weights)
        else:
            total = ordered_sum(values, flight.hop.row_index)
        return self._deliver(total.to(DTYPES[self.spec.dtype]), out)
