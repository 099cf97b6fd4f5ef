"""Expert parallelism with exchanges of a fixed size: every rank gets every token, padded to the most there may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..parallel.group import Group, Pending
from .base import BaseDispatcher
from .caps import Caps
from .dispatcher import EPSpec, Routed
from .grouping import Arrived, results, unpack_rows, weighted_rows
from .order import ordered_sum
from .rows import DTYPES, RowLayout


@dataclass(kw_only=True)
class _Flight:
    """One dispatch from its send to its combine."""

    pending: Pending
    slots: torch.Tensor  # [T, k] of this rank's own tokens
    weights: torch.Tensor  # [T, k]
    room: int  # rows of a rank that travel
    epoch: int
    arrived: Arrived | None = None


class TorchStaticDispatcher(BaseDispatcher):
    """All-gather of max_tokens rows a rank, experts on the rows that chose them, exchange of all sums.

    What travels has the same shape whatever the routing and however many tokens there are, and no counts are
    exchanged: one round less than ``TorchDispatcher`` for more bytes. Sums run in the same order as there.
    """

    name = "torch_static"
    caps = Caps(graph=True, needs=("torch.distributed",))

    def __init__(self, group: Group, spec: EPSpec) -> None:
        super().__init__(group, spec)
        self._layout = RowLayout(spec=spec)

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
        """See ``Dispatcher``. What travels is padded to ``capacity``."""
        slots, weights = self._prepare(x, slot_ids, weights, n_valid, capacity=capacity, scales=scales)
        room = self.spec.max_tokens if capacity is None else capacity
        rows = self._layout.empty_rows(room, x.device)
        rows[: x.shape[0]] = self._layout.pack(x, slots, weights, self.group.index, scales)
        self._count(room, self._layout.row_bytes)
        return _Flight(pending=self.group.all_gather_async(rows), slots=slots, weights=weights, room=room, epoch=self._epoch)

    def dispatch_recv(self, ticket: Any, layout: str = "contiguous") -> Routed:
        """See ``Dispatcher``."""
        self._check_recv(layout)
        flight: _Flight = ticket
        rows = flight.pending.wait()
        routed, flight.arrived = unpack_rows(self._layout, self.group.index, rows, layout)
        routed.handle, routed.epoch = flight, flight.epoch
        return routed

    def combine_send(self, y: torch.Tensor, routed: Routed, *, index: torch.Tensor | None = None) -> Any:
        """See ``Dispatcher``."""
        self._check_open()
        flight: _Flight = routed.handle
        assert flight.arrived is not None
        spec = self.spec
        outputs, place = results(spec, y, routed, flight.arrived, index)
        if spec.deterministic:
            assert place is not None
            values = self._spread(outputs, place)
        else:
            values = weighted_rows(spec, outputs, place, flight.arrived.weights)
            if place is None:  # rows that nobody wanted are anything
                values = values.masked_fill((flight.arrived.index < 0).all(dim=1, keepdim=True), 0)
        splits = [values.shape[0] // self.group.size] * self.group.size
        self._count(flight.room, values.element_size() * spec.hidden * (spec.top_k if spec.deterministic else 1))
        return flight, self.group.all_to_all_async(values, splits, splits)

    def _spread(self, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """y [N, hidden] -> [rows * k, hidden], zeros where the choice is another rank's."""
        flat = index.reshape(-1)
        if len(y) == 0:
            return torch.zeros((flat.numel(), self.spec.hidden), dtype=DTYPES[self.spec.dtype], device=y.device)
        values = y.to(DTYPES[self.spec.dtype]).index_select(0, flat.clamp(min=0))
        return values.masked_fill((flat < 0).unsqueeze(1), 0)

    def combine_recv(self, ticket: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Dispatcher``."""
        flight: _Flight = ticket[0]
        pending: Pending = ticket[1]
        values, spec, tokens, room = pending.wait(), self.spec, flight.slots.shape[0], flight.room
        token = torch.arange(tokens, device=values.device).unsqueeze(1)
        if spec.deterministic:
            rank = torch.div(flight.slots, spec.slots_per_rank, rounding_mode="floor")
            column = torch.arange(spec.top_k, device=values.device)
            index = torch.where(rank < 0, -1, (rank * room + token) * spec.top_k + column)
            total = ordered_sum(values, index, flight.weights)
        else:
            total = ordered_sum(values, token + room * torch.arange(self.group.size, device=values.device))
        return self._deliver(total.to(values.dtype), out)

    def _count(self, tokens: int, bytes_per_token: int) -> None:
        for rank in range(self.group.size):
            if rank != self.group.index:
                self._sent[rank] += tokens * bytes_per_token
