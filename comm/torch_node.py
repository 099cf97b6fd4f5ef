"""Expert parallelism over nodes: a token crosses to a node once, and is passed on inside it.

The idea is DeepSeek-V3's node-limited all-to-all (arXiv:2412.19437, section 3.2.2): links between nodes are the
narrow ones, and a token's experts lie on few nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..parallel.group import Group, Pending
from .base import BaseDispatcher
from .dispatcher import EPSpec, Routed
from .grouping import Arrived, rows_home, single_rows, unpack_rows
from .hop import Hop, HopTicket
from .order import ordered_sum
from .rows import DTYPES, RowLayout


def rails(node_of: Sequence[int]) -> list[list[int]]:
    """[node][place in the node] -> EP rank. Raises ValueError unless all nodes have the same number of ranks."""
    nodes: list[list[int]] = [[] for _ in range(max(node_of) + 1)]
    for rank, node in enumerate(node_of):
        nodes[node].append(rank)
    if len({len(ranks) for ranks in nodes}) != 1:
        raise ValueError(f"node-limited dispatch needs the same number of ranks on every node, found {[len(ranks) for ranks in nodes]}")
    return nodes


@dataclass(kw_only=True)
class _Flight:
    """One dispatch from its send to its combine."""

    across: HopTicket  # between nodes
    weights: torch.Tensor  # [T, k] of this rank's own tokens
    epoch: int
    within: HopTicket | None = None  # inside the node
    arrived: Arrived | None = None


class TorchNodeDispatcher(BaseDispatcher):
    """Two hops: to the rank with this rank's place on every node that is needed, then to the experts' ranks there.

    Combine runs the hops backwards: sums per rank (ascending slots), per node (ascending ranks), then over nodes
    (ascending), in fp32, rounded to the spec's dtype at every hop. In deterministic mode every (token, choice) result
    comes back on its own, as in ``TorchDispatcher``.
    """

    name = "torch_node"

    def __init__(self, group: Group, spec: EPSpec, node_of: Sequence[int], device: torch.device | None = None) -> None:
        if len(node_of) != group.size:
            raise ValueError(f"node-limited dispatch: the node map has {len(node_of)} entries, the expert group {group.size} ranks")
        nodes = rails(node_of)
        super().__init__(group, spec)
        mine = node_of[group.index]
        place = nodes[mine].index(group.index)
        self._layout = RowLayout(spec=spec)
        self._hop = Hop(group, self._sent)
        # the last entry, which index -1 finds, stands for "no choice"
        self._across = torch.tensor([nodes[node][place] for node in node_of] + [-1], device=device)
        self._within = torch.tensor([rank if node == mine else -1 for rank, node in enumerate(node_of)] + [-1], device=device)

    def _ranks(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.div(slots, self.spec.slots_per_rank, rounding_mode="floor")

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
        """See ``Dispatcher``. Starts the hop between nodes."""
        slots, weights = self._prepare(x, slot_ids, weights, n_valid, capacity=capacity, scales=scales)
        rows = self._layout.pack(x, slots, weights, self.group.index, scales)
        return _Flight(across=self._hop.send(rows, self._across[self._ranks(slots)]), weights=weights, epoch=self._epoch)

    def dispatch_recv(self, ticket: Any, layout: str = "contiguous") -> Routed:
        """See ``Dispatcher``. Passes on what crossed, and waits for what the others pass on."""
        self._check_recv(layout)
        flight: _Flight = ticket
        crossed = flight.across.pending.wait()
        flight.within = self._hop.send(crossed, self._within[self._ranks(self._layout.slots(crossed))])
        rows = flight.within.pending.wait()
        by_source = self._layout.origins(rows).argsort(stable=True)  # rows came by forwarding rank
        routed, flight.arrived = unpack_rows(self._layout, self.group.index, rows, layout, by_source)
        routed.handle, routed.epoch = flight, flight.epoch
        return routed

    def combine_send(self, y: torch.Tensor, routed: Routed, *, index: torch.Tensor | None = None) -> Any:
        """See ``Dispatcher``. Starts the hop back inside the node."""
        self._check_open()
        flight: _Flight = routed.handle
        assert flight.within is not None and flight.arrived is not None
        values = rows_home(self.spec, y, routed, flight.arrived, index)
        return flight, self._hop.send_back(flight.within, values, singly=self.spec.deterministic)

    def combine_recv(self, ticket: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """See ``Dispatcher``. Sums or sorts what came back inside the node, and takes it across."""
        flight: _Flight = ticket[0]
        pending: Pending = ticket[1]
        assert flight.within is not None
        dtype, singly = DTYPES[self.spec.dtype], self.spec.deterministic
        values = pending.wait()
        if singly:
            values = single_rows(self.spec, values, flight.within.choice_index())
        else:
            values = ordered_sum(values, flight.within.row_index).to(dtype)
        values = self._hop.send_back(flight.across, values, singly=singly).wait()
        if singly:
            total = ordered_sum(values, flight.across.choice_index(), flight.weights)
        else:
            total = ordered_sum(values, flight.across.row_index)
        return self._deliver(total.to(dtype), out)
