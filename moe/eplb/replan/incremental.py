"""From one placement to a better one by the changes that gain most for each expert that moves.

Every layer is searched at once. The rank with the highest score is relieved by the best of three kinds of change: two experts change
places; an expert gets one more replica in the slot of one that can spare it; a replica on the rank gives way to a replica of another
expert. Best is the largest fall of the squares of what ranks exceed a limit by, for each expert that has to travel. It ends when no rank
exceeds the limit. Where none that does can be relieved, a detour begins: replicas are shared out anew, or the largest expert gets one from
an expert that can spare it, although that is worse at first. It is undone if it does not end better. Slots that no change names keep
their experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import Floats
from ..planner.objective import Objective
from ..topology import Ints, Topology
from .coverage import can_cover, groups_of
from .detour import share_anew
from .moves import Candidates
from .state import Bools, SearchState, excess

_TRIES = 6  # ranks of a layer that cannot be relieved, one after another, before a detour
_LEAST_GAIN = 1e-3  # of what all ranks of a layer exceed the limit by: a change that gains less is not made
_DETOURS = 3  # in vain one after another, before a layer is given up
_WORTH = 0.9  # of what a layer's ranks exceed the limit by may be left after a detour, or it was in vain


@dataclass(frozen=True, kw_only=True)
class Path:
    """The placements that a search went through, layer by layer. Point 0 of each layer is where it began."""

    layer: Ints  # [points] layer of each point; a layer's points are in order
    slots: Ints  # [points, S] its placement, -1: empty
    score: Floats  # [points] the highest score of a rank

    def __len__(self) -> int:
        """Points of all layers."""
        return len(self.layer)

    def best(self, moves: Ints | None = None) -> Ints:
        """[layers] each layer's point with the lowest score, and of several the one with the fewest moves [points], else the first."""
        order = np.lexsort((np.arange(len(self)) if moves is None else moves, self.score, self.layer))
        return order[np.flatnonzero(np.diff(self.layer, prepend=-1))]


def search(
    load: Floats,
    topology: Topology,
    start: Ints,
    *,
    had: Bools,
    objective: Objective,
    limit: Floats,
    spread: str = "any",
    rounds: int = 1000,
) -> Path:
    """All placements from ``start`` to one in which no rank exceeds the limit, as far as that can be reached.

    Args:
        load: [layers, experts] routed choices of one step.
        topology: of the slots; failed ranks' slots must be empty in ``start``.
        start: [layers, slots] a valid placement, -1: empty.
        had: [layers, ranks, experts + 1] what the ranks hold in memory now: an expert that is there already arrives for nothing.
        objective: what the ranks' scores are.
        limit: [layers] score that no rank shall exceed.
        spread: "ranks" or "nodes": replicas of an expert are on two of them at least, and who has two keeps two where slots allow it for
            all; "any": no such care.
        rounds: changes of one layer at most.
    """
    groups, experts = groups_of(spread, topology), load.shape[1]
    wide, everyone = spread != "any", can_cover(experts, spread, topology)
    state = SearchState(start, load, topology, objective=objective, limit=limit, groups=groups, had=had, spread=wide, everyone=everyone)
    run = _Run(state)
    for _ in range(rounds):
        run.finish()
        if not len(state.layers):
            break
        run.change()
    layer, found, score = (np.concatenate(parts) for parts in zip(*run.points, strict=True))
    order = np.argsort(layer, kind="stable")
    return Path(layer=layer[order], slots=np.where(found == experts, -1, found)[order], score=score[order])


class _Run:
    """A search under way: its layers, what was tried in vain, and where detours began."""

    def __init__(self, state: SearchState) -> None:
        self.state = state
        self.blocked = np.zeros(state.scores.shape, dtype=bool)  # [B, R] ranks that could not be relieved since the last change
        self.vain = np.zeros(len(state.layers), dtype=np.int64)  # [B] detours that ended no better
        self.home, self.home_excess = state.slots.copy(), np.full(len(state.layers), np.inf)  # [B, S], [B] where the last detour began
        self.points: list[tuple[Ints, Ints, Floats]] = []
        self._note(np.ones(len(state.layers), dtype=bool))

    def _note(self, rows: Bools) -> None:
        state = self.state
        self.points.append((state.layers[rows], state.slots[rows], state.scores.max(1)[rows] / state.scale[rows]))

    def _keep(self, rows: Bools) -> None:
        self.state.keep(rows)
        for name in ("blocked", "vain", "home", "home_excess"):
            setattr(self, name, getattr(self, name)[rows])

    def finish(self) -> None:
        """Layers in which no rank exceeds the limit are done; those in which the highest ones cannot be relieved go on a detour."""
        over: Bools = self.state.scores > 1.0
        going = np.asarray(over.any(1))
        if not going.all():
            self._keep(going)
            over = over[going]
        stuck = ~(over & ~self.blocked).any(1) | (self.blocked.sum(1) >= _TRIES)
        if stuck.any():
            self._keep(~self._detour(stuck))

    def _detour(self, stuck: Bools) -> Bools:
        """Begin one in layers that are stuck, or return from one that was in vain; returns the layers that are given up."""
        state = self.state
        overload = self._overload()
        worse = stuck & (overload > self.home_excess * _WORTH)
        self.vain[worse] += 1
        self.vain[stuck & ~worse] = 0
        if worse.any():
            state.replace(worse, self.home[worse])
        better = stuck & ~worse
        self.home[better], self.home_excess[better] = state.slots[better], overload[better]
        anew = stuck & (self.vain == 0) & (state.objective.kind != "activated")  # replicas make no rank have fewer of those
        for row in np.flatnonzero(anew):
            state.replace(np.array([row]), share_anew(state, int(row))[None])
        state.refresh()
        slots, experts = Candidates(state, state.scores.argmax(1)).detour(self.vain - 1)
        given_up: Bools = stuck & ~anew & ((slots < 0) | (self.vain > _DETOURS))
        rows = np.flatnonzero(stuck & ~anew & ~given_up)
        state.put(rows, slots[rows], experts[rows])
        state.refresh()
        self.blocked[stuck] = False
        return given_up

    def _overload(self) -> Floats:
        """[B] what a layer's ranks exceed the limit by, squared."""
        found: Floats = (np.maximum(self.state.scores - 1.0, 0.0) ** 2).sum(1)
        return found

    def change(self) -> None:
        """One change of each layer, or one more rank that cannot be relieved."""
        state = self.state
        rank = np.where(self.blocked, -np.inf, state.scores).argmax(1)
        candidates = Candidates(state, rank)
        best = candidates.swap().better_of(candidates.replicas())
        before, enough = candidates.now.sum(1), _LEAST_GAIN * self._overload()
        rows = np.flatnonzero(best.rating > 0)
        old = [state.put(rows, best.slots[rows, i], best.experts[rows, i]) for i in (0, 1)]
        state.refresh()
        moved = np.zeros(len(rank), dtype=bool)
        moved[rows] = before[rows] - excess(state.parts)[rows].sum(1) > enough[rows]  # an estimate only where a rank holds both experts
        undone = ~moved[rows]
        if undone.any():
            for i in (1, 0):
                state.put(rows[undone], best.slots[rows[undone], i], old[i][undone])
            state.refresh()
        self.blocked[moved] = False
        self.blocked[~moved, rank[~moved]] = True
        self._note(moved)
