"""Replicas for slots that a plan leaves empty, for engines in which every slot holds an expert."""

from __future__ import annotations

import numpy as np

from ..assess import holds
from ..plan import Floats, rank_loads, replica_counts
from ..topology import Ints, Topology

_AS_GOOD = 1.001  # a busiest rank within this of the best one is as good


def fill(slots: Ints, load: Floats, topology: Topology, *, previous: Ints | None = None, most_moves: int | None = None) -> Ints:
    """The map [layers, slots] without empty slots on usable ranks.

    Each gets the replica under which the busiest rank of the layer has least. What the rank holds already under ``previous`` is
    taken where it is as good, since it need not be moved. An expert is twice on a rank only where the rank holds all of them, or
    where nothing else can be had without a move too many.

    Args:
        slots: -1: empty. Every expert has a slot.
        load: [layers, experts].
        topology: of the slots.
        previous: [layers, slots] what ranks hold now; None: nothing.
        most_moves: experts that ranks may receive for it; None: any number.
    """
    filled = slots.copy()
    had = None if previous is None else holds(previous, load.shape[1], topology)
    moves = 0
    for layer, slot in np.argwhere((slots < 0) & topology.usable).tolist():
        rank = int(topology.rank_of_slot[slot])
        free = np.zeros(load.shape[1], dtype=bool) if had is None else had[layer, rank]
        after, held = _after(filled[layer], load[layer], topology, rank)
        expert = _chosen(after, held, free)
        if not (free | held)[expert]:
            moves += 1
            if most_moves is not None and moves > most_moves and (free | held).any():
                expert = int(np.where(free | held, after, np.inf).argmin())
        filled[layer, slot] = expert
    return filled


def _after(slots: Ints, load: Floats, topology: Topology, rank: int) -> tuple[Floats, np.ndarray]:
    """Of one layer, for slots [slots] and load [experts]: the busiest rank's load if the rank had one more copy of each expert
    [experts], and whether the rank holds it already [experts].
    """
    experts = len(load)
    copies = replica_counts(slots[None], experts)[0]
    on = np.zeros((topology.n_ranks, experts))  # copies of each expert on each rank
    np.add.at(on, (topology.rank_of_slot[slots >= 0], slots[slots >= 0]), 1.0)
    # of one more copy on this rank: every copy of the expert, on whatever rank, has a smaller part
    change = -on * (load / np.maximum(copies, 1) - load / (copies + 1))
    change[rank] += load / (copies + 1)
    after: Floats = ((rank_loads(slots[None], load[None], topology)[0][:, None] + change) / topology.speed[:, None]).max(0)
    return after, on[rank] > 0


def _chosen(after: Floats, held: np.ndarray, free: np.ndarray) -> int:
    """The best expert that the rank does not hold; one that it need not receive, where that is as good."""
    allowed = ~held if not held.all() else np.ones(len(held), dtype=bool)
    best = np.where(allowed, after, np.inf)
    cheap = np.where(free, best, np.inf)
    return int(cheap.argmin() if cheap.min() <= best.min() * _AS_GOOD else best.argmin())
