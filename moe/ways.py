"""The table that says where tokens meet an expert: its ways, at one address for the life of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .eplb.choice.deal import Table, deal_ways
from .eplb.plan import Floats
from .eplb.topology import Topology
from .placement import Placement

#: entries of an expert where experts have replicas: a rank keeps to shares within 1/64, all R ranks together within 1/(64 R)
N_WAYS = 64
_STEP = 0x9E3779B1  # 2**32 over the golden ratio: multiples of it spread evenly, and any few neighbouring ones do


@dataclass(frozen=True)
class ExpertIds:
    """Logical experts [T, k], any integer dtype; -1 for none. A type of its own, so that nothing is mapped to slots twice."""

    ids: torch.Tensor


@dataclass(frozen=True)
class SlotIds:
    """Physical slots [T, k], any integer dtype; -1 for none."""

    ids: torch.Tensor


def way_of_rows(n_rows: int, n_ways: int, device: torch.device | str) -> torch.Tensor:
    """[n_rows] int64: which of ``n_ways`` entries the token in each row takes. It depends on the row alone."""
    mixed = (torch.arange(n_rows, device=device) * _STEP) & 0xFFFFFFFF
    return (mixed >> 16) * n_ways >> 16


class Ways:
    """Slots of every expert as this rank's tokens go to them: int32 [layers, experts, ways].

    Graphs and launched steps read ``table`` where it is, so it is written in place, between steps and in their order
    (on the stream that they run on), and never replaced. Ranks write different tables: each prefers replicas near to it.
    """

    def __init__(self, *, n_layers: int, n_experts: int, n_ways: int, device: torch.device | str = "cpu") -> None:
        self.table = torch.full((n_layers, n_experts, n_ways), -1, dtype=torch.int32, device=device)

    @classmethod
    def static(
        cls,
        placement: Placement,
        *,
        source: int,
        nodes: Sequence[int] | None = None,
        n_ways: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Ways:
        """The ways of EP rank ``source``: its own replicas first, then those of its node; all ranks together share evenly.

        Args:
            placement: of all layers.
            source: EP rank whose tokens are sent.
            nodes: node of every EP rank; None: one node.
            n_ways: entries of an expert; None: ``N_WAYS``, or 1 where no slot can hold a replica.
            device: where routing runs.

        Raises:
            ValueError: an expert has no slot.
        """
        placement.check()
        most = N_WAYS if placement.n_slots > placement.n_experts else 1
        ways = cls(n_layers=placement.n_layers, n_experts=placement.n_experts, n_ways=most if n_ways is None else n_ways, device=device)
        topology = Topology(slots=(placement.slots_per_rank,) * placement.n_ranks, nodes=tuple(nodes or (0,) * placement.n_ranks))
        ways.write(range(placement.n_layers), ways.deal(placement, topology, source=source))
        return ways

    @property
    def n_ways(self) -> int:
        """Entries of an expert."""
        return self.table.shape[2]

    def deal(
        self, placement: Placement, topology: Topology, *, source: int, layers: Sequence[int] | None = None, shares: Floats | None = None
    ) -> Table:
        """What ``write`` takes for some layers (None: all); see ``deal_ways``. ``shares`` [len(layers), slots]: None is even."""
        table = placement.slot_to_expert if layers is None else placement.slot_to_expert[list(layers)]
        return deal_ways(table.numpy(), placement.n_experts, topology, source=source, n_ways=self.n_ways, shares=shares)

    def write(self, layers: Sequence[int], table: Table | torch.Tensor) -> None:
        """Overwrite the ways of ``layers`` with ``table`` [len(layers), experts, ways].

        On CUDA it is queued on the current stream. A pinned ``table`` on the host must stay as it is until that copy is done.

        Raises:
            ValueError: another shape; nothing was written.
        """
        rows = torch.as_tensor(table)
        wanted = (len(layers), *self.table.shape[1:])
        if tuple(rows.shape) != wanted:
            raise ValueError(f"ways: a table of shape {wanted} is needed for {len(layers)} layers, found {tuple(rows.shape)}")
        if len(layers) > 1 and list(layers) == list(range(layers[0], layers[0] + len(layers))):  # one copy
            self.table[layers[0] : layers[0] + len(layers)].copy_(rows, non_blocking=True)
            return
        for row, layer in zip(rows, layers, strict=True):
            self.table[layer].copy_(row, non_blocking=True)

    def slots(self, layer: int, ids: ExpertIds) -> SlotIds:
        """Where tokens go: logical experts [T, k] of T rows -> slots [T, k] int32.

        Raises:
            TypeError: what is given is no ``ExpertIds``: it may have been mapped already.
        """
        if not isinstance(ids, ExpertIds):
            raise TypeError(f"only ExpertIds are mapped to slots, found {type(ids).__name__}: a layer's exchange maps them once")
        experts = ids.ids.long()
        way = way_of_rows(len(experts), self.n_ways, experts.device)
        found = self.table[layer].view(-1)[experts.clamp(min=0) * self.n_ways + way[:, None]]
        return SlotIds(torch.where(experts < 0, -1, found))
