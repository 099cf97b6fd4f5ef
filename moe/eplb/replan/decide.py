"""How far along a search's paths it pays to go: bytes against a budget, seconds gained against seconds of moving."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cost import CostModel
from ..plan import Floats
from ..planner.objective import step_seconds
from ..topology import Ints, Topology
from .incremental import Path
from .state import Bools


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The point of each layer's path that was chosen, and why."""

    slots: Ints  # [layers, S]
    moves: int  # experts that arrive on ranks, in all
    needed: int  # of these, those that any valid map needs: the paths begin with them
    move_seconds: float  # until the last of them has arrived
    gain_seconds: float  # that a step gets shorter by
    declined: str  # why nothing (more) moves; empty: the paths are followed to their ends


def decide(
    path: Path,
    load: Floats,
    topology: Topology,
    *,
    had: Bools,
    cost: CostModel,
    budget_bytes: int | None,
    horizon_steps: int | None,
) -> Decision:
    """Choose a point of each layer's path.

    With a horizon the value of a point is the predicted time of a step. Moves are made in the order of seconds gained for each expert that
    moves, as long as gain x horizon less the time of moving gets larger. Without one they are made in the order of the objective's gain
    for each expert that moves, as far as the budget goes.

    Args:
        path: of ``search``.
        load: [layers, experts] routed choices of one step.
        topology: of the slots.
        had: [layers, ranks, experts + 1] what ranks hold now.
        cost: seconds and bytes.
        budget_bytes: that all ranks together may receive; what a valid map needs is received even if that is more.
        horizon_steps: steps that the gain is expected to last; None: moving is not weighed against it.
    """
    arrivals = arrivals_of(path, topology, had)
    first = np.flatnonzero(np.diff(path.layer, prepend=-1))

    def seconds(points: Ints) -> Floats:
        return step_seconds(path.slots[points], load[path.layer[points]], topology, cost)

    if horizon_steps is None and budget_bytes is None:
        chosen, declined = path.best(arrivals.sum(1)), ""
    else:
        value = path.score if horizon_steps is None else seconds(np.arange(len(path)))
        chosen, declined = _choose(path.layer, value, arrivals, first, cost, budget_bytes, horizon_steps)
    return Decision(
        slots=path.slots[chosen],
        moves=int(arrivals[chosen].sum()),
        needed=int(arrivals[first].sum()),
        move_seconds=cost.move_seconds(arrivals[chosen]),
        gain_seconds=float((seconds(first) - seconds(chosen)).sum()),
        declined=declined,
    )


def arrivals_of(path: Path, topology: Topology, had: Bools) -> Ints:
    """[points, ranks] experts that each rank must receive for a point."""
    new = ~had[path.layer[:, None], topology.rank_of_slot, path.slots]  # an empty slot looks up the last column, which is had
    counted: Ints = np.add.reduceat(new.astype(np.int64), topology.first_slot[:-1], axis=1)
    return counted


def _choose(
    layer: Ints, value: Floats, arrivals: Ints, first: Ints, cost: CostModel, budget_bytes: int | None, horizon_steps: int | None
) -> tuple[Ints, str]:
    """Point of each layer, and the reason for not going on."""
    total = arrivals.sum(1)
    base, steps = steps_of(layer, value, total, first)
    chosen = base.copy()
    room = np.inf if budget_bytes is None else budget_bytes // cost.expert_bytes - int(total[base].sum())
    taken, closed, refused = [], np.zeros(len(first), dtype=bool), 0
    for start, end in steps:
        row = layer[end]
        need = total[end] - total[start]
        if closed[row] or need > room:
            closed[row], refused = True, refused + 1
            continue
        room -= need
        taken.append((start, end))
    best, net = len(taken), np.zeros(len(taken) + 1)
    if horizon_steps is not None:
        pairs = np.array(taken, dtype=np.int64).reshape(-1, 2)
        gained = np.concatenate([[0.0], np.cumsum(value[pairs[:, 0]] - value[pairs[:, 1]])])
        loads = arrivals[base].sum(0) + np.concatenate(
            [np.zeros_like(arrivals[:1]), np.cumsum(arrivals[pairs[:, 1]] - arrivals[pairs[:, 0]], axis=0)]
        )
        spent = loads.max(1) * (cost.expert_bytes / cost.copy_bytes_per_second)
        net = gained * horizon_steps - spent
        best = int(net.argmax())
        if best < len(taken):
            more = f"{gained[-1] - gained[best]:.3g} s a step x {horizon_steps} steps against {spent[-1] - spent[best]:.3g} s of moving"
            return _follow(chosen, layer, taken[:best]), f"the rest would not pay: {more}"
    chosen = _follow(chosen, layer, taken[:best])
    return chosen, f"the budget of {budget_bytes} bytes leaves out {refused} steps of improvement" if refused else ""


def _follow(chosen: Ints, layer: Ints, taken: list[tuple[int, int]]) -> Ints:
    for _, end in taken:
        chosen[layer[end]] = end
    return chosen


def steps_of(layer: Ints, value: Floats, total: Ints, first: Ints) -> tuple[Ints, list[tuple[int, int]]]:
    """Where each layer begins, and steps (from point, to point) of all layers, those with the largest gain for an expert moved first.

    Of points [points] in order of their layers: ``layer``, ``value`` (seconds or score, to be made small) and ``total`` experts that
    move; ``first`` [layers] is the first point of each layer. A layer's steps are the edges of the lower convex hull of its points
    (experts moved, value): along it the gain for an expert only falls, so that steps of a layer come in their order.
    """
    base, steps = first.copy(), []
    ends = np.append(first[1:], len(layer))
    for row, (start, end) in enumerate(zip(first, ends, strict=True)):
        points = np.arange(start, end)[total[start:end] >= total[start]]
        points = points[np.lexsort((value[points], total[points]))]
        points = points[np.minimum.accumulate(value[points]) == value[points]]
        hull: list[int] = []
        for point in points.tolist():
            if hull and (total[point] == total[hull[-1]] or value[point] >= value[hull[-1]]):
                continue
            while len(hull) >= 2 and _rate(hull[-1], point, value, total) >= _rate(hull[-2], hull[-1], value, total):
                hull.pop()
            hull.append(point)
        base[row] = hull[0]
        steps += [(_rate(a, b, value, total), a, b) for a, b in zip(hull, hull[1:], strict=False)]
    steps.sort(key=lambda step: -step[0])
    return base, [(a, b) for _, a, b in steps]


def _rate(start: int, end: int, value: Floats, total: Ints) -> float:
    return float((value[start] - value[end]) / (total[end] - total[start]))
