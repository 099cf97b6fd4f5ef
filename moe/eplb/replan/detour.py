"""Out of a dead end: replicas as many as the load asks for, whatever that does to the ranks at first."""

from __future__ import annotations

import numpy as np

from ..plan import Floats
from ..planner.replicate import share_out
from ..topology import Ints
from .state import SearchState


def share_anew(state: SearchState, row: int) -> Ints:
    """[S] one layer's slots with as many replicas of each expert as make the largest replica smallest.

    Experts with too many give up their slots on the busiest ranks; those with too few get these slots, on the least busy ranks first. All
    other slots keep what they hold.
    """
    topology, ranks, empty = state.topology, state.topology.rank_of_slot, state.n_experts
    slots: Ints = state.slots[row].copy()
    load = state.load[row, :empty]
    seats = int(np.minimum(np.array(topology.slots)[state.alive], empty).sum())
    wanted = np.append(share_out(load[None], seats, most=int(state.alive.sum()))[0][0], 0)
    have = state.counts[row].copy()
    busy = _loads(slots, load, have, ranks, state.pace)
    for expert in np.flatnonzero(have[:empty] > wanted[:empty]).tolist():
        own = np.flatnonzero(slots == expert)
        for slot in own[np.argsort(-busy[ranks[own]], kind="stable")].tolist():
            rest = own[(own != slot) & (slots[own] == expert)]
            stays = not state.spread or len(np.unique(state.groups[rest])) >= 2 or (len(rest) == 1 and not state.everyone)
            if have[expert] > wanted[expert] and stays:
                slots[slot], have[expert] = empty, have[expert] - 1
    given = np.maximum(have, wanted)
    each = load / np.maximum(given[:empty], 1)
    busy = _loads(slots, load, given, ranks, state.pace)
    short = np.repeat(np.arange(empty), (given - have)[:empty])
    for expert in short[np.argsort(-each[short], kind="stable")].tolist():
        free = np.flatnonzero((slots == empty) & topology.usable)
        free = free[~np.isin(ranks[free], ranks[slots == expert])]
        homes = np.unique(state.groups[slots == expert])
        if state.spread and len(homes) == 1:
            free = free[state.groups[free] != homes[0]]
        if len(free):
            slot = int(free[busy[ranks[free]].argmin()])
            slots[slot] = expert
            busy[ranks[slot]] += each[expert] * state.pace[ranks[slot]]
    return slots


def _loads(slots: Ints, load: Floats, counts: Ints, ranks: Ints, pace: Floats) -> Floats:
    """[R] time of each rank."""
    each = np.append(load / np.maximum(counts[:-1], 1), 0.0)
    busy: Floats = np.bincount(ranks, weights=each[slots], minlength=len(pace)) * pace
    return busy
