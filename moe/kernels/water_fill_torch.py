"""What ``water_fill`` computes, in plain PyTorch, and the placement as both versions take it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..eplb.choice.seats import Seats
from ..eplb.topology import Ints, Topology

#: experts of a row that are filled at once; they have no rank in common
ROW = 8
Small = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class DeviceSeats:
    """Experts with replicas, in C rows of ``ROW`` a layer, at addresses that stay: ``write`` puts another placement there.

    The ranks have the same speed. Where a rank holds an expert several times, its first slot is used.
    """

    slot: torch.Tensor  # int32 [layers, C, ROW, ranks] slot of the expert on each rank, -1 for none
    expert: torch.Tensor  # int32 [layers, C, ROW] logical expert, -1 for none
    single: torch.Tensor  # int32 [layers, experts] rank of an expert that is on one rank only, else -1
    n_rows: torch.Tensor  # int32 [layers] rows in use

    @classmethod
    def empty(
        cls, *, n_layers: int, n_experts: int, n_ranks: int, n_slots: int, n_rows: int | None = None, device: torch.device | str = "cpu"
    ) -> DeviceSeats:
        """Room for any placement of ``n_slots`` slots, or for those that need ``n_rows`` rows a layer at most."""
        most = min(n_experts, n_slots - n_experts) if n_rows is None else n_rows  # experts with replicas, each in a row of its own
        shape = (n_layers, max(most, 1), ROW)
        return cls(
            slot=torch.full((*shape, n_ranks), -1, dtype=torch.int32, device=device),
            expert=torch.full(shape, -1, dtype=torch.int32, device=device),
            single=torch.full((n_layers, n_experts), -1, dtype=torch.int32, device=device),
            n_rows=torch.zeros(n_layers, dtype=torch.int32, device=device),
        )

    @classmethod
    def of(cls, slot_to_expert: Ints, n_experts: int, topology: Topology, *, device: torch.device | str = "cpu") -> DeviceSeats:
        """Those of one placement [layers, slots], with room for it alone."""
        slot, expert, single, n_rows = (torch.from_numpy(part).to(device) for part in _arranged(slot_to_expert, n_experts, topology))
        return cls(slot=slot, expert=expert, single=single, n_rows=n_rows)

    def write(self, slot_to_expert: Ints, topology: Topology) -> None:
        """Put another placement in place, queued on the current stream.

        Raises:
            ValueError: it needs more rows than there are.
        """
        slot, expert, single, n_rows = (torch.from_numpy(part) for part in _arranged(slot_to_expert, self.single.shape[1], topology))
        rows, room = expert.shape[1], self.expert.shape[1]
        if rows > room:
            raise ValueError(f"water filling: the placement needs {rows} rows of {ROW} experts a layer, there is room for {room}")
        self.slot[:, rows:], self.expert[:, rows:] = -1, -1
        self.slot[:, :rows].copy_(slot)
        self.expert[:, :rows].copy_(expert)
        self.single.copy_(single)
        self.n_rows.copy_(n_rows)


def _arranged(slot_to_expert: Ints, n_experts: int, topology: Topology) -> tuple[Small, Small, Small, Small]:
    """Slots, experts, lone ranks and rows in use as ``DeviceSeats`` has them."""
    seats = Seats.find(slot_to_expert, n_experts, topology)
    layers, ranks = len(slot_to_expert), topology.n_ranks
    first = np.zeros(len(seats.cell) + 1, dtype=np.int64)  # slot of each seat
    numbers = np.broadcast_to(np.arange(topology.n_slots)[::-1], slot_to_expert.shape)
    first[seats.slot_seat[:, ::-1]] = numbers  # the last one written is the first slot
    owner = np.concatenate([group.expert for group in seats.groups] or [np.zeros(0, dtype=np.int64)])
    layer = owner // n_experts
    block, place = _numbered(np.concatenate([np.full(len(group.expert), group.colour) for group in seats.groups] or [layer]), layer)
    used, row_id = place % ROW, np.unique(block * (n_experts + 1) + place // ROW, return_inverse=True)[1]  # by layer, then colour
    first_id = np.full(layers, len(owner))
    np.minimum.at(first_id, layer, row_id)
    row = row_id - first_id[layer]
    depth = int(row.max(initial=0)) + 1
    slot = np.full((layers, depth, ROW, ranks), -1, dtype=np.int32)
    expert = np.full((layers, depth, ROW), -1, dtype=np.int32)
    expert[layer, row, used] = owner % n_experts
    begin = 0
    for group in seats.groups:
        some = slice(begin, begin + len(group.expert))
        begin += len(group.expert)
        column, at = np.nonzero(group.cell < seats.n_cells)
        cell, seat = group.cell[column, at], group.seat[column, at]
        slot[layer[some][at], row[some][at], used[some][at], cell % ranks] = first[seat]
    single = np.full(layers * n_experts, -1, dtype=np.int32)
    single[seats.present[seats.alone]] = seats.cell[seats.first[seats.alone]] % ranks
    return slot, expert, single.reshape(layers, n_experts), (expert[:, :, 0] >= 0).sum(1).astype(np.int32)


def _numbered(colour: Ints, layer: Ints) -> tuple[Ints, Ints]:
    """Number of each member's (layer, colour), ascending in layers, and its place among the members of that."""
    block = layer * (int(colour.max(initial=0)) + 1) + colour
    order = np.argsort(block, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.searchsorted(block[order], block[order])
    return block, place


def fill_ranks(counts: torch.Tensor, seats: DeviceSeats, *, n_ranks: int, sweeps: int = 16) -> torch.Tensor:
    """Tokens that each rank gets of every expert with replicas.

    Args:
        counts: int64 [layers, experts] of all source ranks together.
        seats: the placement.
        n_ranks: ranks of the placement.
        sweeps: rounds over all experts; ``WaterFill`` of ``eplb/choice`` says how far from the best a split is.

    Returns:
        float32 [layers, C, ROW, ranks]; 0 where there is no replica.
    """
    there = seats.slot >= 0
    layer = torch.arange(len(counts), device=counts.device)[:, None, None]
    tokens = torch.where(seats.expert < 0, 0, counts[layer, seats.expert.clamp(min=0).long()]).float()[..., None]
    x = torch.where(there, tokens / there.sum(-1, keepdim=True).clamp(min=1), 0.0)
    alone = torch.zeros((len(counts), n_ranks + 1), dtype=torch.float32, device=counts.device)
    alone.scatter_add_(1, torch.where(seats.single < 0, n_ranks, seats.single).long(), counts.float())
    loads = alone[:, :n_ranks] + x.sum((1, 2))
    for _ in range(sweeps):
        for row in range(seats.slot.shape[1]):
            mask, others = there[:, row], loads[:, None] - x[:, row]
            level = _level(torch.where(mask, others, torch.inf), tokens[:, row])
            new = torch.where(mask, (level - others).clamp(min=0.0), 0.0)
            loads = loads + (new - x[:, row]).sum(1)
            x[:, row] = new
    return x


def _level(others: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Levels [.., 1] to which tokens [.., 1] fill ranks that hold ``others`` [.., ranks], inf where there is no replica."""
    low = others.sort(-1).values
    return ((low.cumsum(-1) + tokens) / torch.arange(1, low.shape[-1] + 1, device=low.device)).amin(-1, keepdim=True)


def write_ways(x: torch.Tensor, seats: DeviceSeats, table: torch.Tensor, *, phase: float = 0.0) -> None:
    """Ways of experts with replicas, in the parts of ``fill_ranks``; the other experts' stay.

    Args:
        x: float32 [layers, C, ROW, ranks]; an expert without tokens gets even parts.
        seats: the placement that x is for.
        table: int32 [layers, experts, ways], written in place (``moe.ways.Ways.table``).
        phase: 0 to below 1, another on each source rank, so that what one rounds up another rounds down. Ranks deal alike, near
            replicas or not.
    """
    there, ways = seats.slot >= 0, table.shape[2]
    part = torch.where(x.sum(-1, keepdim=True) > 0, x, there.float())
    part = part / part.sum(-1, keepdim=True).clamp(min=1e-20)
    place = (torch.arange(ways, device=x.device) + phase) / ways
    stop = part.cumsum(-1)
    last = there.shape[-1] - 1 - there.flip(-1).int().argmax(-1, keepdim=True)
    rank = torch.minimum((stop[..., None, :] <= place[:, None]).sum(-1), last)  # [layers, C, ROW, ways]
    layer, row, used = (seats.expert >= 0).nonzero(as_tuple=True)
    table[layer, seats.expert[layer, row, used].long()] = seats.slot[layer, row, used].gather(1, rank[layer, row, used])
