"""Experts that tokens choose together, brought together on ranks: a token's row then travels to fewer of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..plan import Floats, rank_loads, replica_counts
from ..planner.seats import Seats
from ..topology import Ints, Topology
from .routing import Routing

Counts = npt.NDArray[np.float32]

SWEEPS = 2  # in each of which every rank meets every other of its node once


def coactivation(routing: Routing) -> Counts:
    """[layers, experts, experts] tokens that chose both; 0 for an expert with itself."""
    layers, tokens, k = routing.ids.shape
    width = routing.n_experts + 1
    ids = np.where(routing.ids < 0, routing.n_experts, routing.ids)
    first, second = np.triu_indices(k, 1)
    together = np.empty((layers, width - 1, width - 1), dtype=np.float32)
    for layer in range(layers):
        pair = ids[layer][:, first] * width + ids[layer][:, second]
        half = np.bincount(pair.ravel(), minlength=width * width).reshape(width, width)[:-1, :-1]
        together[layer] = half + half.T
    return together


def gather(
    slot_to_expert: Ints, together: Counts, load: Floats, topology: Topology, *, split: Floats | None = None, tolerance: float = 0.002
) -> Ints:
    """Swap replicas between ranks of a node so that more experts of a token share a rank, within balance.

    Args:
        slot_to_expert: [layers, slots] with -1 for empty; experts keep their nodes.
        together: as ``coactivation`` gives it, of some thousand tokens.
        load: [layers, experts].
        topology: of the slots.
        split: [layers, slots] load of each slot; None: even over the replicas of an expert. Those on one node share what is there.
        tolerance: of the fair share of a rank: by how much the slowest rank of a layer may get slower.

    Returns:
        [layers, slots].
    """
    layers, experts = load.shape
    usable = np.setdiff1d(np.arange(topology.n_ranks), sorted(topology.failed))
    speeds = np.ones(topology.n_ranks) if topology.speeds is None else np.array(topology.speeds)
    if split is None:
        counts = np.concatenate([np.maximum(replica_counts(slot_to_expert, experts), 1), np.ones((layers, 1), dtype=np.int64)], axis=1)
        at = np.arange(layers)[:, None]
        split = np.where(slot_to_expert < 0, 0.0, load[at, slot_to_expert] / counts[at, slot_to_expert])
    times = rank_loads(slot_to_expert, load, topology, split) / speeds
    limit = times.max(1) + tolerance * load.sum(1) / speeds[usable].sum()
    slots = slot_to_expert.copy()
    for node in range(topology.n_nodes):
        ranks = usable[topology.node_of_rank[usable] == node]
        if len(ranks) < 2:
            continue
        part = Topology(slots=tuple(topology.slots[rank] for rank in ranks), nodes=(0,) * len(ranks))
        seats = Seats(topology=part, n_experts=experts)
        where = np.concatenate([np.arange(topology.first_slot[rank], topology.first_slot[rank + 1]) for rank in ranks])
        each = _each(slots[:, where], split[:, where], experts)
        work = Gathering(seats.from_slots(slots[:, where]), together, each, load, seats, speeds[ranks], limit)
        for turn in range(SWEEPS * (len(ranks) - 1 + len(ranks) % 2)):
            work.meet(*_pairs(len(ranks), turn))
        slots[:, where] = seats.to_slots(work.table)
    return slots


def _each(slots: Ints, split: Floats, experts: int) -> Floats:
    """[layers, experts] load of one of an expert's replicas here."""
    brought = np.zeros((len(slots), experts + 1))
    np.add.at(brought, (np.arange(len(slots))[:, None], slots), split)
    return brought[:, :-1] / np.maximum(replica_counts(slots, experts), 1)


def _pairs(n: int, turn: int) -> tuple[Ints, Ints]:
    """A round of a tournament of n: everyone meets one other, and all others in as many turns as it takes."""
    size = n + n % 2
    ring = np.concatenate([[0], 1 + (np.arange(size - 1) + turn) % (size - 1)])
    left, right = ring[: size // 2], ring[size // 2 :][::-1]
    real = (left < n) & (right < n)
    return left[real], right[real]


class Gathering:
    """Ranks of one node in all layers, and swaps between pairs of them."""

    def __init__(self, table: Ints, together: Counts, each: Floats, load: Floats, seats: Seats, speeds: Floats, limit: Floats) -> None:
        layers = len(table)
        none = np.zeros((layers, 1))
        self.table, self.seats, self.speeds, self.limit, self.together = table, seats, speeds, limit, together
        self.each = np.concatenate([each, none], axis=1)
        self.part = np.concatenate([each / np.maximum(load, 1e-300), none], axis=1)  # of an expert's tokens that a replica sees
        self.held = np.take_along_axis(self.each, table.reshape(layers, -1), axis=1).reshape(table.shape).sum(2)

    def meet(self, left: Ints, right: Ints) -> None:
        """The best swap of each pair of ranks [pairs], where it gains."""
        one, two = self.table[:, left], self.table[:, right]  # [layers, pairs, width]
        across = self._seen(one, two)
        inner, other = self._seen(one, one).sum(-1), self._seen(two, two).sum(-1)
        leave = across.sum(-1)[..., None] + across.sum(-2)[..., None, :] - 2 * across
        stay = inner[..., :, None] + other[..., None, :]
        gain = leave - stay
        at = np.arange(len(one))[:, None, None]
        shift = self.each[at, one][..., :, None] - self.each[at, two][..., None, :]
        low = (self.held[:, left, None, None] - shift) / self.speeds[left, None, None]
        high = (self.held[:, right, None, None] + shift) / self.speeds[right, None, None]
        same = (one[..., :, None] == two[..., None, :]) & (one != self.seats.n_experts)[..., :, None]
        barred = np.maximum(low, high) > self.limit[:, None, None, None]
        barred |= (same.any(-1) | ~self.seats.open[left])[..., :, None] | (same.any(-2) | ~self.seats.open[right])[..., None, :]
        flat = np.where(barred, -np.inf, gain).reshape(*gain.shape[:2], -1)
        best = flat.argmax(-1)
        layer, pair = np.nonzero(np.take_along_axis(flat, best[..., None], -1)[..., 0] > 1e-6)
        i, j = np.divmod(best[layer, pair], one.shape[-1])
        self.table[layer, left[pair], i], self.table[layer, right[pair], j] = two[layer, pair, j], one[layer, pair, i]
        self.held[layer, left[pair]] -= shift[layer, pair, i, j]
        self.held[layer, right[pair]] += shift[layer, pair, i, j]

    def _seen(self, one: Ints, two: Ints) -> Floats:
        """[layers, pairs, width, width] tokens that choose both and meet both replicas."""
        at = np.arange(len(one))[:, None, None, None]
        top = self.seats.n_experts - 1
        a, b = one[..., :, None], two[..., None, :]
        met: Floats = self.together[at, np.minimum(a, top), np.minimum(b, top)] * self.part[at, a] * self.part[at, b]
        return met
