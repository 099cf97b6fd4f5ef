"""What tokens of this rank are told when experts have moved."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...moe.eplb.choice.deal import Table, deal_ways
from ...moe.eplb.plan import Floats
from ...moe.eplb.topology import Ints, Topology
from ...moe.ways import Ways


class WaysWriter:
    """Deals the ways of layers that change, in the worker's thread, and writes them between two steps, in the order of the steps.

    Layers here are MoE layers, 0 .. M-1; ``layer_ids`` are their rows in the table.
    """

    def __init__(self, ways: Ways, topology: Topology, *, n_experts: int, source: int, layer_ids: Sequence[int], near: bool = True) -> None:
        """``source``: EP rank whose tokens read the table. ``near``: they prefer copies near to them."""
        self._ways, self._topology, self._n_experts, self._source = ways, topology, n_experts, source
        self._ids, self._near = list(layer_ids), near
        self._written: list[torch.Tensor] = []  # the last ones, which the device may still read
        self.writes = 0  # of moves, so far

    def deal(self, layers: Sequence[int], rows: Ints, *, shares: Floats | None = None) -> torch.Tensor:
        """The ways of ``layers`` when their slots hold ``rows`` [n, slots]: int32 [n, experts, ways], pinned where a device reads it.

        ``shares`` [n, slots]: parts of their experts' tokens, None for even ones.
        """
        table: Table = deal_ways(
            rows, self._n_experts, self._topology, source=self._source, n_ways=self._ways.n_ways, near=self._near, shares=shares
        )  # fmt: skip
        found = torch.from_numpy(table)
        return found.pin_memory() if self._ways.table.device.type == "cuda" else found

    def write(self, layers: Sequence[int], dealt: torch.Tensor) -> None:
        """Experts of ``layers`` have moved: overwrite their ways on the current stream."""
        self._write(layers, dealt)
        self.writes += 1

    def refill(self, dealt: torch.Tensor) -> None:
        """Overwrite the ways of all layers on the current stream; experts are where they were."""
        self._write(range(len(self._ids)), dealt)

    def _write(self, layers: Sequence[int], dealt: torch.Tensor) -> None:
        self._ways.write([self._ids[layer] for layer in layers], dealt)
        self._written = [*self._written[-3:], dealt]
