"""What balance costs in bytes: the placements between staying put and the best that can be reached by moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..api import had_by_ranks, held_slots
from ..cost import CostModel
from ..metrics import imbalance
from ..plan import Floats, Plan, rank_loads
from ..planner.objective import Objective, step_seconds
from ..planner.static import checked_load
from ..topology import Ints, Topology
from .coverage import mend
from .decide import arrivals_of, steps_of
from .incremental import search


@dataclass(frozen=True, kw_only=True)
class MoveTrade:
    """A placement between staying put and the best balance that moves reach."""

    moves: int  # experts that arrive on ranks
    bytes: int  # of them
    move_seconds: float  # until the last has arrived
    imbalance: float  # mean over layers
    worst: float  # of the worst layer
    seconds: float  # predicted, of one step
    slots: Ints  # [layers, S] the placement, -1: empty


def tradeoff(
    load: Floats,
    topology: Topology,
    previous: Plan | Ints,
    *,
    objective: str = "tokens",
    steps: float = 1.0,
    coverage: str = "any",
    target: float = 1.003,
    points: int = 16,
    cost: CostModel | None = None,
) -> tuple[MoveTrade, ...]:
    """Placements from what is held now (mended where something is missing) to the target: each moves more and is better balanced.

    Args:
        load: [layers, experts] routed choices.
        topology: of the slots.
        previous: what the slots hold now.
        objective, steps, coverage, cost: as for ``make_plan``.
        target: of the search, which ends there or where no change helps.
        points: placements at most, spread evenly over the bytes.

    Raises:
        ValueError: as ``make_plan``, and for fewer than two points.
    """
    if points < 2:
        raise ValueError(f"tradeoff: needs 2 points or more, found {points}")
    load, cost, aim = checked_load(load), cost or CostModel(), Objective(kind=objective, cost=cost or CostModel())
    before = held_slots(previous, load, topology)
    had = had_by_ranks(before, load.shape[1], topology)
    limit = aim.mean(load / steps, topology) * target
    path = search(load / steps, topology, mend(before, load, topology, coverage), had=had, objective=aim, limit=limit, spread=coverage)
    arrivals = arrivals_of(path, topology, had)
    first = np.flatnonzero(np.diff(path.layer, prepend=-1))
    chosen, order = steps_of(path.layer, path.score, arrivals.sum(1), first)
    moves = np.concatenate([[0], np.cumsum([arrivals[end].sum() - arrivals[start].sum() for start, end in order])])
    stops = {int(np.searchsorted(moves, share)) for share in np.linspace(0, moves[-1], points)}
    found = []
    for count in range(len(order) + 1):
        if count:
            chosen[path.layer[order[count - 1][1]]] = order[count - 1][1]
        if count in stops:
            found.append(_trade(path.slots[chosen], arrivals[chosen], load, topology, steps, cost))
    return tuple(found)


def _trade(slots: Ints, arrivals: Ints, load: Floats, topology: Topology, steps: float, cost: CostModel) -> MoveTrade:
    balance = imbalance(rank_loads(slots, load, topology), topology)
    return MoveTrade(
        moves=int(arrivals.sum()),
        bytes=int(arrivals.sum()) * cost.expert_bytes,
        move_seconds=cost.move_seconds(arrivals),
        imbalance=float(balance.mean()),
        worst=float(balance.max()),
        seconds=float(step_seconds(slots, load / steps, topology, cost).sum()),
        slots=slots,
    )
