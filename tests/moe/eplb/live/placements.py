"""Random placements for tests of moving."""

from __future__ import annotations

import numpy as np

from rorqual.moe.eplb.topology import Ints, Topology


def random_placement(rng: np.random.Generator, n_layers: int, n_experts: int, topology: Topology, *, empty: float = 0.0) -> Ints:
    """Every expert somewhere, the other usable slots with any expert, or empty with probability ``empty``."""
    usable = np.flatnonzero(topology.usable)
    slots = np.full((n_layers, topology.n_slots), -1, dtype=np.int64)
    for row in slots:
        more = rng.integers(0, n_experts, len(usable) - n_experts)
        more[rng.random(len(more)) < empty] = -1
        row[usable] = rng.permutation(np.concatenate([np.arange(n_experts), more]))
    return slots


def changed(rng: np.random.Generator, slots: Ints, n_experts: int, topology: Topology, fraction: float) -> Ints:
    """Some slots of ``slots`` shuffled among themselves, with every expert still somewhere."""
    new = slots.copy()
    usable = np.flatnonzero(topology.usable)
    for row in new:
        some = rng.permutation(usable)[: max(2, int(fraction * len(usable)))]
        row[some] = rng.permutation(row[some])
    assert all(set(range(n_experts)) <= set(row.tolist()) for row in new)
    return new
