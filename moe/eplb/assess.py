"""A plan from a map of slots: what it is worth for a load, and what it costs to get there."""

from __future__ import annotations

import numpy as np

from .cost import CostModel
from .metrics import imbalance
from .plan import Floats, Plan, rank_loads
from .planner.bounds import Bounds, bounds
from .planner.objective import step_seconds
from .topology import Ints, Topology


def assess(
    slot_to_expert: Ints,
    load: Floats,
    topology: Topology,
    *,
    cost: CostModel | None = None,
    steps: float = 1.0,
    previous: Ints | None = None,
    split: Floats | None = None,
    known_bounds: Bounds | None = None,
    kept: Ints | None = None,
    reason: str = "",
) -> Plan:
    """The plan that a map of slots is.

    Args:
        slot_to_expert: [layers, slots], -1: empty.
        load: [layers, experts] tokens routed to each expert, of all ranks.
        topology: of the slots.
        cost: of a step; the defaults of ``CostModel`` without one.
        steps: steps that the load sums over.
        previous: [layers, slots] map that the ranks hold now; None: nothing, and nothing is counted as moved.
        split: [layers, slots] load of each slot; None: even over the replicas of an expert. The bound of
            any other split is that of the largest replica alone.
        known_bounds: of this load and topology, where they are known already.
        kept: [layers] 1 where the layer is left as it was; None: nowhere.
        reason: for a log.
    """
    cost = cost or CostModel()
    layers, experts = load.shape
    loads = rank_loads(slot_to_expert, load, topology, split)
    least = known_bounds or bounds(load, topology)
    moved = np.zeros((layers, topology.n_ranks), dtype=np.int64)
    if previous is not None:
        moved = arrivals(previous, slot_to_expert, experts, topology)
    return Plan(
        slot_to_expert=slot_to_expert,
        n_experts=experts,
        topology=topology,
        imbalance=imbalance(loads, topology),
        bound=least.partner if split is None else least.replica,  # what shares a rank with it may be as light as one likes
        seconds=float(step_seconds(slot_to_expert, load / steps, topology, cost, None if split is None else split / steps).sum()),
        moved=moved,
        expert_bytes=cost.expert_bytes,
        kept=np.zeros(layers, dtype=np.int64) if kept is None else kept,
        reason=reason,
    )


def holds(slot_to_expert: Ints, n_experts: int, topology: Topology) -> np.ndarray:
    """[layers, ranks, experts] bool: whether a rank holds an expert."""
    layers = len(slot_to_expert)
    held = np.zeros((layers, topology.n_ranks, n_experts + 1), dtype=bool)
    held[np.arange(layers)[:, None], topology.rank_of_slot, slot_to_expert] = True  # -1 is noted in the column that is cut off
    return held[:, :, :n_experts]


def arrivals(before: Ints, after: Ints, n_experts: int, topology: Topology) -> Ints:
    """[layers, ranks] experts that each rank holds after and did not hold before."""
    gone = holds(after, n_experts, topology) & ~holds(before, n_experts, topology)
    counted: Ints = gone.sum(2)
    return counted
