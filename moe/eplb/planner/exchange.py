"""Which experts the spare seats go to, where ranks have two or three seats: who shares a rank matters as much as the largest replica."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..plan import Floats
from ..topology import Ints
from .seats import Seats

Flags = npt.NDArray[np.bool_]

_TRIES = 12  # exchanges that a round tries in each layer
# with more than three seats of a rank the packing finds partners for any replica
_ROUNDS = {2: 24, 3: 8}  # by seats; each round makes one exchange in a layer, or none
_POWER = 9  # doublings: ranks count with the 512th power of their load, so that the slowest few count
_PATIENCE = 3  # rounds without an exchange after which a layer is left
_DONORS = 24  # and gives up those of experts that would be least hurt
_HOT = 6  # a round takes replicas from the pairs of the slowest ranks only


def exchange(
    load: Floats, counts: Ints, seats: Seats, *, goal: Floats, least: int = 1, may_empty: bool = True, effort: int = 1, seed: int = 0
) -> Ints:
    """Replicas moved between experts, one at a time, while that lowers what the slowest ranks must carry.

    What that is: with two seats the heaviest replica is with the lightest, the second heaviest with the second lightest and so on, which
    is the best packing. With three, the k heaviest replicas share k ranks with the 2 k lightest, for every k, which is a bound of one.

    Args:
        load: [layers, experts].
        counts: [layers, experts] replicas, as many as there are seats or fewer.
        seats: of the usable ranks.
        goal: [layers] load of the slowest rank that is good enough.
        least: replicas of each expert that stay.
        may_empty: whether a seat may stay empty where that is better.
        effort: times as many rounds; each makes one exchange at most in a layer.
        seed: of the exchanges that are tried.

    Returns:
        [layers, experts] replicas; fewer than there are seats where some stay empty.
    """
    width = seats.open.shape[1]
    if width not in _ROUNDS or not seats.open.all() or not seats.same_speed or seats.n_rows < 2:
        return counts
    experts = load.shape[1]
    # seats that stay empty are the replicas of one more expert, which has no load
    load = np.concatenate([load, np.zeros((len(load), 1))], axis=1)
    counts = np.concatenate([counts, seats.total - counts.sum(1, keepdims=True)], axis=1)
    limits = _limits(experts, least, seats)
    if not may_empty:
        limits[1, experts] = counts[:, experts].min()
    random = np.random.default_rng(seed)
    busy = np.flatnonzero(load.any(1))
    idle = np.zeros(len(load), dtype=np.int64)
    for _ in range(_ROUNDS[width] * effort):
        if not len(busy):
            break
        made, slowest = _round(load[busy], counts, busy, seats, limits, random)
        idle[busy] = np.where(made, 0, idle[busy] + 1)
        busy = busy[(slowest > goal[busy]) & (idle[busy] < _PATIENCE * effort)]
    return counts[:, :experts]


def _limits(experts: int, least: int, seats: Seats) -> Ints:
    """[2, experts + 1] fewest and most replicas of each expert; any number of seats may stay empty."""
    limits = np.empty((2, experts + 1), dtype=np.int64)
    limits[0], limits[1] = least, seats.n_rows
    limits[:, experts] = 0, seats.total
    return limits


def _round(load: Floats, counts: Ints, layers: Ints, seats: Seats, limits: Ints, random: np.random.Generator) -> tuple[Flags, Floats]:
    """The best of some exchanges in each of these layers, if it is one. [n] whether it was made, what the slowest rank carried before."""
    now = counts[layers]
    value, expert = _replicas(load, now, seats)
    rising = np.sort(value, axis=1)
    carried = _carried(rising, seats)
    slowest = carried.max(1)
    taker = _takers(value, rising, carried, expert, random)
    taker[:, 0] = seats.n_experts  # nobody: a seat stays empty
    donor = _donors(load, now, limits[0], random)
    gives, takes = np.take_along_axis(now, donor, axis=1), np.take_along_axis(now, taker, axis=1)
    fewer = (np.take_along_axis(load, donor, axis=1) / np.maximum(gives - 1, 1)).astype(np.float32)
    more = (np.take_along_axis(load, taker, axis=1) / (takes + 1)).astype(np.float32)
    # compared for each try: small numbers are quicker
    small = np.int16 if load.shape[1] < 2**15 else np.int64
    short = expert.astype(small)[:, None]
    giving = short == donor.astype(small)[..., None]
    tried = np.where(giving, fewer[..., None], value[:, None])
    tried = np.where(short == taker.astype(small)[..., None], more[..., None], tried)
    np.put_along_axis(tried, giving.argmax(-1)[..., None], more[..., None], axis=-1)
    tried.sort(axis=-1)
    before, after = _energy(carried, slowest), _energy(_carried(tried, seats), slowest[:, None])
    after[(taker == donor) | (takes >= limits[1][taker]) | (gives <= limits[0][donor])] = np.inf
    at, best = np.arange(len(layers)), after.argmin(1)
    made = after[at, best] < before * (1 - 1e-6)
    at, best = at[made], best[made]
    counts[layers[at], taker[at, best]] += 1
    counts[layers[at], donor[at, best]] -= 1
    return made, slowest


def _replicas(load: Floats, counts: Ints, seats: Seats) -> tuple[npt.NDArray[np.float32], Ints]:
    """[n, total seats] load and expert of every replica, expert by expert."""
    n, kinds = load.shape
    expert = np.repeat(np.tile(np.arange(kinds), n), counts.ravel()).reshape(n, seats.total)
    each = (load / np.maximum(counts, 1)).astype(np.float32)
    return np.take_along_axis(each, expert, axis=1), expert


def _carried(rising: npt.NDArray[np.float32], seats: Seats) -> npt.NDArray[np.float32]:
    """Loads of replicas, sorted [..., seats] -> what ranks must carry [..., rows], with the heaviest replica first."""
    rows, width = seats.n_rows, seats.open.shape[1]
    heavy = rising[..., : -rows - 1 : -1]
    if width == 2:
        pairs: npt.NDArray[np.float32] = heavy + rising[..., :rows]
        return pairs
    light: npt.NDArray[np.float32] = rising[..., : rows * (width - 1)].reshape(*rising.shape[:-1], rows, width - 1).sum(-1)
    together = np.cumsum(heavy + light, axis=-1, dtype=np.float32)
    together /= np.arange(1, rows + 1, dtype=np.float32)
    return together


def _energy(carried: npt.NDArray[np.float32], unit: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[..., rows] -> [...] sum of a high power of the loads over a unit."""
    relative: npt.NDArray[np.float32] = np.minimum(carried / unit[..., None], np.float32(1.18))  # its power still is a float32
    for _ in range(_POWER):
        np.multiply(relative, relative, out=relative)
    total: npt.NDArray[np.float32] = relative.sum(-1)
    return total


def _takers(
    value: npt.NDArray[np.float32],
    rising: npt.NDArray[np.float32],
    carried: npt.NDArray[np.float32],
    expert: Ints,
    random: np.random.Generator,
) -> Ints:
    """[n, tries] experts that could take a replica: half of them the heaviest of the slowest ranks; any heavy, any light."""
    n, rows = carried.shape
    quarter, half, hot = _TRIES // 4, max(rows // 2, 1), min(_HOT, rows)
    worst = np.broadcast_to(np.arange(hot), (n, hot))  # in places from the heaviest replica on
    if rising.shape[1] == 2 * rows:
        worst = np.argpartition(-carried, hot - 1, axis=1)[:, :hot]
    place = np.empty((n, _TRIES), dtype=np.int64)
    place[:, :quarter] = -1 - random.integers(0, half, quarter)
    place[:, quarter : 2 * quarter] = random.integers(0, half, quarter)
    place[:, 2 * quarter :] = -1 - np.take_along_axis(worst, random.integers(0, hot, (n, _TRIES - 2 * quarter)), axis=1)
    chosen = np.take_along_axis(rising, place % rising.shape[1], axis=1)
    seat = (value[:, None] == chosen[..., None]).argmax(-1)  # of equal replicas any will do
    taker = np.take_along_axis(expert, seat, axis=1)
    return taker


def _donors(load: Floats, counts: Ints, fewest: Ints, random: np.random.Generator) -> Ints:
    """[n, tries] experts that could give a replica: mostly those whose others would carry least afterwards."""
    after = np.where(counts > fewest, load / np.maximum(counts - 1, 1), np.inf)
    order = np.argsort(after, axis=1)[:, :_DONORS]
    number = np.minimum((counts > fewest).sum(1), order.shape[1])[:, None]
    pick = (random.random((len(counts), _TRIES)) ** 2.5 * number).astype(np.int64)
    return np.take_along_axis(order, pick, axis=1)
