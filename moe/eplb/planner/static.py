"""A plan from nothing: the best placement of experts for one load, wherever they are now."""

from __future__ import annotations

import numpy as np

from ..assess import assess
from ..cost import CostModel
from ..plan import Floats, Plan
from ..topology import Ints, Topology
from .bounds import bounds_from
from .exchange import exchange
from .replicate import share_out
from .search import place, search
from .seats import Seats


def plan_static(
    load: Floats,
    topology: Topology,
    *,
    cost: CostModel | None = None,
    steps: float = 1.0,
    previous: Ints | None = None,
    least_replicas: int = 1,
    tolerance: float = 2e-4,
    may_empty: bool = True,
    effort: int = 1,
) -> Plan:
    """Place the experts of all layers such that the slowest rank of each layer is as fast as can be.

    Replicas are shared out greedily (optimal for the largest replica), seated heaviest first, and swapped between ranks until the
    slowest rank cannot be relieved. An expert is never twice on one rank: a slot that could only repeat stays empty.

    Args:
        load: [layers, experts] tokens routed to each expert, of all ranks; finite, none negative.
        topology: ranks with any numbers of slots and speeds; failed ranks get nothing.
        cost: for the predicted seconds and bytes.
        steps: steps that the load sums over, for the predicted seconds of one.
        previous: [layers, slots] map that the ranks hold now. It does not change who holds what: ``moved`` counts against it, and
            experts that stay on a rank keep their slots.
        least_replicas: of each expert, for coverage when ranks fail.
        tolerance: a layer this near its bound (as a fraction) is left alone.
        may_empty: whether a slot may stay empty where that is better than any further replica. Slots that could only repeat an
            expert of their rank stay empty in any case.
        effort: times as long a search, for plans that are made once: 1 takes some 50 ms for 58 layers of 256 experts.

    Raises:
        ValueError: load of the wrong shape or with impossible values; fewer slots than experts.
    """
    load = checked_load(load)
    seats = Seats(topology=topology, n_experts=load.shape[1])
    check_room(seats, least_replicas)
    counts, peaks = share_out(load, seats.total, most=seats.n_rows)
    least = bounds_from(load, peaks, seats)
    if least_replicas > 1:
        counts, _ = share_out(load, seats.total, most=seats.n_rows, least=least_replicas)
    mean = load.sum(1) / seats.n_rows
    goal = least.partner * (1.0 + tolerance) * mean
    counts = exchange(load, counts, seats, goal=goal, least=least_replicas, may_empty=may_empty, effort=effort)
    table = place(load, counts, seats, goal=goal, effort=effort)
    table = search(load, table, seats, goal=goal, least=least_replicas, may_empty=may_empty, effort=effort)
    slots = seats.to_slots(table)
    if previous is not None:
        slots = keep_slots(previous, slots, topology)
    return assess(slots, load, topology, cost=cost, steps=steps, previous=previous, known_bounds=least, reason="planned from nothing")


def checked_load(load: Floats) -> Floats:
    """The load as float64 [layers, experts]. ValueError: another shape, or values that no load has."""
    load = np.ascontiguousarray(load, dtype=np.float64)
    if load.ndim != 2 or 0 in load.shape:
        raise ValueError(f"load must be [layers, experts] with one of each at least, found shape {load.shape}")
    if not np.isfinite(load).all() or load.min() < 0:
        layer, expert = np.argwhere(~np.isfinite(load) | (load < 0))[0]
        raise ValueError(f"load must be finite and not negative, found {load[layer, expert]} for layer {layer} expert {expert}")
    return load


def check_room(seats: Seats, least_replicas: int = 1) -> None:
    """ValueError: the seats are too few for this many replicas of each expert."""
    experts = seats.n_experts
    if not 1 <= least_replicas <= seats.n_rows:
        raise ValueError(f"least_replicas must be 1 to {seats.n_rows}, the usable ranks, found {least_replicas}")
    if seats.total < experts * least_replicas:
        need = experts * least_replicas
        each = -(-need // seats.n_rows)
        raise ValueError(
            f"{seats.total} slots of {seats.n_rows} usable ranks cannot hold {experts} experts {least_replicas} times; "
            f"give at least {need}, for example {each} for each rank ({each * seats.n_rows})"
        )


def keep_slots(before: Ints, after: Ints, topology: Topology) -> Ints:
    """The map ``after`` with slots changed within ranks only: experts that a rank held before stay in the slots they had."""
    result = np.full_like(after, -1)
    for rank in range(topology.n_ranks):
        part = slice(int(topology.first_slot[rank]), int(topology.first_slot[rank + 1]))
        old, new = before[:, part], after[:, part]
        same = (old[:, :, None] == new[:, None, :]) & (new >= 0)[:, None, :]
        same &= same.cumsum(1) == 1  # an expert that was there twice stays in the first
        same &= same.cumsum(2) == 1
        kept, moves = same.any(2), ~same.any(1)
        chosen = np.where(kept, old, -1)
        order = np.argsort(kept, axis=1, kind="stable")  # free slots first
        newcomers = np.argsort(~moves, axis=1, kind="stable")
        for turn in range(int(moves.sum(1).max(initial=0))):
            layers = np.flatnonzero(moves.sum(1) > turn)
            chosen[layers, order[layers, turn]] = new[layers, newcomers[layers, turn]]
        result[:, part] = chosen
    return result
