"""Small cases are searched: many numbers of replicas are tried, each packed and refined, and the best placement is kept."""

from __future__ import annotations

import numpy as np

from ..plan import Floats, replica_counts
from ..topology import Ints
from .pack import deal, pack
from .seats import Seats
from .swap import dealt, refine

_ROOM = 2048  # seats that are packed at a time: more than half of it, and nothing is searched
_GENERATIONS = 4
_TRIAL_ROUNDS = 10  # of refining a try
_MOST_CHANGES = 5  # exchanges of replicas between what is known to be best and a try


def place(load: Floats, counts: Ints, seats: Seats, *, goal: Floats, rounds: int | None = None, effort: int = 1, seed: int = 0) -> Ints:
    """Replicas of each expert [layers, experts] -> table of seats [layers, rows, width], packed and refined."""
    table = (deal if dealt(seats) else pack)(load, counts, seats)
    refine(table, load / np.maximum(placed(table, seats), 1), seats, goal=goal, rounds=rounds, effort=effort, seed=seed)
    return table


def placed(table: Ints, seats: Seats) -> Ints:
    """[layers, experts] replicas in a table of seats."""
    return replica_counts(table.reshape(len(table), -1), seats.n_experts + 1)[:, :-1]


def slowest(table: Ints, load: Floats, seats: Seats) -> Floats:
    """[layers] time of the slowest rank."""
    each = np.concatenate([load / np.maximum(placed(table, seats), 1), np.zeros((len(load), 1))], axis=1)
    loads = np.take_along_axis(each, table.reshape(len(table), -1), axis=1).reshape(table.shape).sum(2)
    worst: Floats = (loads / seats.speed).max(1)
    return worst


def search(
    load: Floats, table: Ints, seats: Seats, *, goal: Floats, least: int = 1, may_empty: bool = True, effort: int = 1, seed: int = 0
) -> Ints:
    """The best of what is known and of random tries near it, where there are so few seats that many tries cost little.

    Args:
        load: [layers, experts].
        table: [layers, rows, width] what is known.
        seats: of the usable ranks.
        goal: [layers] time of the slowest rank that is good enough.
        least: replicas of each expert that stay.
        may_empty: whether a seat may stay empty where that is better.
        effort: times as many tries.
        seed: of the tries.
    """
    best = slowest(table, load, seats)
    random = np.random.default_rng(seed)
    for generation in range(_GENERATIONS * effort):
        busy = np.flatnonzero(best > goal)
        tries = min(_ROOM // max(len(busy) * seats.total, 1), 128)
        if tries < 2 or not len(busy):
            break
        rows = np.repeat(busy, tries)
        counts = _varied(load[rows], placed(table, seats)[rows], seats, least, may_empty, random)
        found = place(load[rows], counts, seats, goal=goal[rows], rounds=_TRIAL_ROUNDS, seed=generation)
        times = slowest(found, load[rows], seats).reshape(len(busy), tries)
        which = times.argmin(1)
        better = times[np.arange(len(busy)), which] < best[busy]
        chosen = busy[better]
        table[chosen] = found[(np.arange(len(busy)) * tries + which)[better]]
        best[chosen] = times[better, which[better]]
    return table


def _varied(load: Floats, counts: Ints, seats: Seats, least: int, may_empty: bool, random: np.random.Generator) -> Ints:
    """Some replicas given up, and the seats given to experts that carry much, or left empty."""
    counts = counts.copy()
    n, experts = counts.shape
    at = np.arange(n)
    changes = random.integers(1, _MOST_CHANGES + 1, n)
    for turn in range(_MOST_CHANGES):
        active = changes > turn
        # the expert that would carry least afterwards is the likeliest to give, the one that carries most the likeliest to take
        spare = np.where(counts > least, load / np.maximum(counts - 1, 1) + 1e-300, np.inf)
        donor = (spare * random.exponential(size=(n, experts))).argmin(1)
        gives = active & (counts[at, donor] > least)
        counts[at[gives], donor[gives]] -= 1
        wants = np.where(counts < seats.n_rows, load / counts, -1.0) * random.random((n, experts))
        taker = wants.argmax(1)
        takes = (
            active & (counts.sum(1) < seats.total) & (counts[at, taker] < seats.n_rows) & (random.random(n) < (0.85 if may_empty else 1.0))
        )
        counts[at[takes], taker[takes]] += 1
    return counts
