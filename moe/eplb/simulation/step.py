"""What one step costs under a placement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..cost import CostModel
from ..metrics import imbalance
from ..plan import Floats, replica_counts
from ..topology import Ints, Topology

#: (counts [layers, experts], slots [layers, slots], topology) -> share [layers, slots] of the counts that each slot gets
Dispatch = Callable[[Ints, Ints, Topology], Floats]


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """One step of all layers."""

    tokens: Floats  # [layers, ranks] routed choices that each rank computes
    activated: Floats  # [layers, ranks] slots with work
    seconds: float  # of all layers' experts, one layer after the other
    imbalance: Floats  # [layers] largest over mean of the ranks' loads; 1 where a layer had none


def even(counts: Ints, slots: Ints, topology: Topology) -> Floats:
    """[layers, slots] share of counts [layers, experts] if every replica gets the same; 0 for empty slots."""
    each = counts / np.maximum(replica_counts(slots, counts.shape[1]), 1)
    return np.where(slots < 0, 0.0, np.take_along_axis(each, np.maximum(slots, 0), axis=1))


def step_cost(counts: Ints, slots: Ints, topology: Topology, cost: CostModel, dispatch: Dispatch = even) -> StepCost:
    """Cost of a step that routed counts [layers, experts] to the experts of slots [layers, slots].

    A slot that gets less than a whole token in the mean is read as often as it gets one. The cost model's prices are
    those of a rank of mean speed; one of half the speed takes twice as long.
    """
    split = dispatch(counts, slots, topology)
    starts = topology.first_slot[:-1]
    tokens = np.add.reduceat(split, starts, axis=1)
    activated = np.add.reduceat(np.minimum(split, 1.0), starts, axis=1)
    seconds = float(cost.layer_seconds(tokens / topology.speed, activated / topology.speed).sum())
    return StepCost(tokens=tokens, activated=activated, seconds=seconds, imbalance=imbalance(tokens, topology))


def floor_seconds(counts: Ints, topology: Topology, cost: CostModel) -> float:
    """Seconds of the same step if every usable rank had its share, by speed, of tokens and of activated experts: no placement is faster.

    Counts [layers, experts] are those of the step.
    """
    ranks = int(topology.alive.sum())  # whose mean speed is 1
    tokens, activated = counts.sum(1, keepdims=True) / ranks, (counts > 0).sum(1, keepdims=True) / ranks
    return float(cost.layer_seconds(tokens.astype(np.float64), activated.astype(np.float64)).sum())


def in_order(n_layers: int, n_experts: int, topology: Topology) -> Ints:
    """The placement without a planner, [layers, slots]: experts in order over the usable ranks, one slot each, spare slots empty.

    Raises:
        ValueError: fewer usable slots than experts.
    """
    usable = np.flatnonzero(topology.usable)
    if len(usable) < n_experts:
        raise ValueError(f"{n_experts} experts do not fit into {len(usable)} usable slots; give at least as many slots as experts")
    sizes = np.array([0 if rank in topology.failed else size for rank, size in enumerate(topology.slots)])
    spare = int(sizes.sum()) - n_experts
    while spare:  # take one slot from each of the fullest ranks, the last of them first, until the experts fill what is left
        fullest = np.flatnonzero(sizes == sizes.max())[::-1][:spare]
        sizes[fullest] -= 1
        spare -= len(fullest)
    slots = np.full(topology.n_slots, -1, dtype=np.int64)
    first = 0
    for rank, size in enumerate(sizes):
        place = int(topology.first_slot[rank])
        slots[place : place + size] = np.arange(first, first + size)
        first += int(size)
    return np.tile(slots, (n_layers, 1))
