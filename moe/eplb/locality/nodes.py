"""Nodes of a machine as a planner fills them: what each may carry, replicas within it, and its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..plan import Floats, replica_counts
from ..planner.pack import pack
from ..planner.seats import Seats
from ..planner.swap import refine
from ..topology import Ints, Topology


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Nodes that have a usable rank, numbered 0.. in the order of their first rank."""

    topology: Topology
    ranks: tuple[Ints, ...]  # of each node, usable ones
    seats: tuple[Seats, ...]  # of each node's ranks, as a machine of their own
    share: Floats  # [nodes] of the load: the node's part of the speed of all usable ranks
    slots: Ints  # [nodes] that may be filled

    @classmethod
    def of(cls, topology: Topology, n_experts: int) -> Nodes:
        """The nodes of a topology."""
        usable = np.setdiff1d(np.arange(topology.n_ranks), sorted(topology.failed))
        node = topology.node_of_rank[usable]
        ranks = tuple(usable[node == n] for n in np.unique(node))
        speeds = np.ones(topology.n_ranks) if topology.speeds is None else np.array(topology.speeds, dtype=np.float64)
        seats = tuple(Seats(topology=_part(topology, few), n_experts=n_experts) for few in ranks)
        power = np.array([speeds[few].sum() for few in ranks])
        total = np.array([part.total for part in seats], dtype=np.int64)
        return cls(topology=topology, ranks=ranks, seats=seats, share=power / power.sum(), slots=total)

    @property
    def n(self) -> int:
        """Nodes."""
        return len(self.ranks)

    @property
    def n_ranks(self) -> int:
        """Usable ranks."""
        return sum(len(ranks) for ranks in self.ranks)

    @cached_property
    def of_slot(self) -> Ints:
        """[slots] node, as numbered here; 0 for slots of failed ranks."""
        result = np.zeros(self.topology.n_slots, dtype=np.int64)
        for node in range(self.n):
            result[self.to_slots(node)] = node
        return result

    def to_slots(self, node: int) -> Ints:
        """[slots of the node's usable ranks] slots of the machine, rank by rank."""
        first = self.topology.first_slot
        return np.concatenate([np.arange(first[rank], first[rank + 1]) for rank in self.ranks[node]])


def _part(topology: Topology, ranks: Ints) -> Topology:
    speeds = None if topology.speeds is None else tuple(topology.speeds[rank] for rank in ranks)
    return Topology(slots=tuple(topology.slots[rank] for rank in ranks), nodes=(0,) * len(ranks), speeds=speeds)


def replicate_within(load: Floats, copies: Ints, nodes: Nodes) -> Ints:
    """Give each node's spare slots to the replicas that carry most in it.

    Args:
        load: [layers, nodes, experts] that an expert brings to each node.
        copies: [layers, nodes, experts] replicas that must be: one or more where an expert lives.
        nodes: with their slots.

    Returns:
        [layers, nodes, experts] replicas; at most one for each rank of the node.
    """
    copies = copies.copy()
    most = np.array([len(ranks) for ranks in nodes.ranks])
    spare = nodes.slots - copies.sum(2)
    each = np.where((copies > 0) & (copies < most[:, None]), load / np.maximum(copies, 1), -1.0)
    for turn in range(int(spare.max(initial=0))):
        layer, node = np.nonzero(spare > turn)
        expert = each[layer, node].argmax(1)
        fits = each[layer, node, expert] >= 0
        layer, node, expert = layer[fits], node[fits], expert[fits]
        copies[layer, node, expert] += 1
        now = copies[layer, node, expert]
        each[layer, node, expert] = np.where(now < most[node], load[layer, node, expert] / now, -1.0)
    return copies


def pack_nodes(load: Floats, copies: Ints, nodes: Nodes, *, tolerance: float = 3e-4) -> Ints:
    """Replicas of each node onto its ranks, for balance.

    Args:
        load: [layers, nodes, experts] that an expert brings to each node, split evenly over its replicas there.
        copies: [layers, nodes, experts] replicas in each node.
        nodes: with their ranks.
        tolerance: over the fair share of a rank that is good enough.

    Returns:
        [layers, slots] experts, -1: empty.
    """
    slots = np.full((len(load), nodes.topology.n_slots), -1, dtype=np.int64)
    fair = load.sum((1, 2)) / nodes.n_ranks
    for node, seats in enumerate(nodes.seats):
        table = pack(load[:, node], copies[:, node], seats)
        placed = replica_counts(table.reshape(len(table), -1), seats.n_experts + 1)[:, :-1]
        own = load[:, node].sum(1) / seats.n_rows
        refine(table, load[:, node] / np.maximum(placed, 1), seats, goal=np.maximum(fair, own) * (1 + tolerance))
        slots[:, nodes.to_slots(node)] = seats.to_slots(table)
    return slots
