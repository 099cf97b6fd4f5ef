"""Expert parallelism with exchanges of a fixed size: every rank gets every token, padded to the most there may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..parallel.group import Group, Pending
from .base import BaseDispatcher
from .dispatcher import EPSpec, Routed
from .grouping import Arrived, unpack_rows, weighted_rows
from .order import ordered_sum
from .rows import DTYPES, RowLayout


@dataclass(kw_only=True)
class _Flight:
    """One dispatch from its send to its combine."""

    pending: Pending
    slots: torch.Tensor  # [T, k] of this rank's own tokens
    weights: torch.Tensor  # [T, k]
    arrived: Arrived | None = None


class TorchStaticDispatcher(BaseDispatcher):
    """All-gather of max_tokens rows a rank, experts on the rows that chose them, exchange of all sums.

    What travels has the same shape whatever the routing and however many tokens there are, and no counts are
    exchanged: one round less than ``TorchDispatcher`` for more bytes. Sums run in the same order as there.
    """

    name = "torch_static"

    def __init__(self, group: Group, spec: EPSpec) -> None:
        super().__init__(group, spec)
        self._layout = RowLayout(spec=spec)

    def dispatch_send(self, x: torch.Tensor, slot_ids: torch.Tensor, weights: torch.Tensor) -> Any:
        """See ``Dispatcher``."""
        slots, weights = self._prepare(x, slot_ids, weights)
        rows = self._layout.empty_rows(self.spec.max_tokens, x.device)
        rows[: x.shape[0]] = self._layout.pack(x, slots, weights, self.group.index)
        self._count(self._layout.row_bytes)
        return _Flight(pending=self.group.all_gather_async(rows), slots=slots, weights=weights)

    def dispatch_recv(self, ticket: Any) -> Routed:
        """See ``Dispatcher``."""
        flight: _Flight = ticket
        rows = flight.pending.wait()
        routed, flight.arrived = unpack_rows(self._layout, self.group.index, rows)
        routed.handle = flight
        return routed

    def combine_send(self, y: torch.Tensor, routed: Routed) -> Any:
        """See ``Dispatcher``."""
        self._check_outputs(y, routed)
        flight: _Flight = routed.handle
        assert flight.arrived is not None
        spec = self.spec
        if spec.deterministic:
            values = self._spread(y, flight.arrived.index)
        else:
            values = weighted_rows(spec, y, flight.arrived).view(-1, spec.hidden)
        splits = [values.shape[0] // self.group.size] * self.group.size
        self._count(values.element_size() * spec.hidden * (spec.top_k if spec.deterministic else 1))
        return flight, self.group.all_to_all_async(values, splits, splits)

    def _spread(self, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """y [N, hidden] -> [rows * k, hidden], zeros where the choice is another rank's."""
        flat = index.reshape(-1)
        values = torch.zeros((flat.numel(), self.spec.hidden), dtype=DTYPES[self.spec.dtype], device=y.device)
        here = (flat >= 0).nonzero().view(-1)
        values.index_copy_(0, here, y.to(values.dtype).index_select(0, flat[here]))
        return values

    def combine_recv(self, ticket: Any) -> torch.Tensor:
        """See ``Dispatcher``."""
        flight: _Flight = ticket[0]
        pending: Pending = ticket[1]
        values, spec, tokens = pending.wait(), self.spec, flight.slots.shape[0]
        token = torch.arange(tokens, device=values.device).unsqueeze(1)
        if spec.deterministic:
            rank = torch.div(flight.slots, spec.slots_per_rank, rounding_mode="floor")
            column = torch.arange(spec.top_k, device=values.device)
            index = torch.where(rank < 0, -1, (rank * spec.max_tokens + token) * spec.top_k + column)
            return ordered_sum(values, index, flight.weights).to(values.dtype)
        index = token + spec.max_tokens * torch.arange(self.group.size, device=values.device)
        return ordered_sum(values, index).to(values.dtype)

    def _count(self, bytes_per_token: int) -> None:
        for rank in range(self.group.size):
            if rank != self.group.index:
                self._sent[rank] += self.spec.max_tokens * bytes_per_token
