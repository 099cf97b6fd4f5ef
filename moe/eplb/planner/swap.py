"""Swaps of two replicas between ranks, of all layers at once, until the slowest rank of each layer cannot be made faster."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..plan import Floats
from ..topology import Ints
from .seats import Seats

_PAIRED_ROUNDS = 4  # every rank takes part once, the slowest with the fastest
_GROUP_ROUNDS = ((4, 12),)  # a part of the ranks, the slowest, each with the best of a few others; and for how many rounds
_DEALS = 5  # with three seats of a rank a swap has little to choose from: seats are dealt anew in between, so often,
_AFTER_A_DEAL = (4, 3)  # each time with so many rounds of groups and of the slowest rank alone
_SINGLE_ROUNDS = 60  # the slowest rank with the best of all others
_LAST_ROUNDS = 15  # the same, after deals
_BARRED = 1e18  # times the largest replica stands for the load of one that may not be swapped


def refine(table: Ints, each: Floats, seats: Seats, *, goal: Floats, rounds: int | None = None, effort: int = 1, seed: int = 0) -> None:
    """Swap in place.

    Args:
        table: [layers, rows, width] table of seats, contiguous.
        each: [layers, experts] load of one replica of each expert.
        seats: of the usable ranks.
        goal: [layers] time of the slowest rank that is good enough: a layer there is left alone.
        rounds: of the slowest rank with all others, at most; None: enough for most.
        effort: times as many rounds of all kinds.
        seed: of the groups that ranks are tried in.
    """
    if seats.n_rows < 2:
        return
    work = Work(table=table, each=each, seats=seats)
    random = np.random.default_rng(seed)
    busy = work.above(np.arange(len(table)), goal)
    if dealt(seats):
        busy = _deal_and_swap(work, busy, goal, effort, random)
    for turn in range(0 if dealt(seats) else _PAIRED_ROUNDS):
        if len(busy):
            work.pair_up(busy, shift=turn)
        busy = work.above(busy, goal)
    for part in _parts(seats, effort):
        if len(busy):
            work.relieve_many(busy, max(seats.n_rows // part, 1), random)
        busy = work.above(busy, goal)
    _relieve_slowest(work, busy, goal, (_LAST_ROUNDS if dealt(seats) else _SINGLE_ROUNDS) * effort if rounds is None else rounds)


def dealt(seats: Seats) -> bool:
    """Whether ranks are alike and have three seats, so that seats are dealt anew between swaps."""
    return seats.open.shape[1] == 3 and seats.same_speed and bool(seats.open.all()) and seats.n_rows >= 8


def _deal_and_swap(work: Work, busy: Ints, goal: Floats, effort: int, random: np.random.Generator) -> Ints:
    """Deals and swaps in turns; the layers that are still above the goal."""
    groups, singles = _AFTER_A_DEAL
    for _ in range(_DEALS * effort):
        work.deal_anew(busy)
        for _ in range(groups):
            if len(busy):
                work.relieve_many(busy, max(work.rows // _GROUP_ROUNDS[0][0], 1), random)
        _relieve_slowest(work, busy, goal, singles)
        busy = work.above(busy, goal)
    return busy


def _relieve_slowest(work: Work, busy: Ints, goal: Floats, rounds: int) -> None:
    for _ in range(rounds):
        if not len(busy):
            return
        busy = work.above(busy[work.relieve(busy)], goal)


def _parts(seats: Seats, effort: int) -> list[int]:
    """For each round with groups, which part of the ranks counts as slow. With two seats heavy with light is best already."""
    if seats.n_rows < 8 or seats.open.shape[1] < 3 or dealt(seats):
        return []
    return [part for part, rounds in _GROUP_ROUNDS for _ in range(rounds * effort)]


class Work:
    """A table of seats, the load of each rank under it, and the moves that better it. Ranks of all layers are numbered through."""

    def __init__(self, *, table: Ints, each: Floats, seats: Seats) -> None:
        layers, self.rows, self.width = table.shape
        self.seats = seats
        self.kinds = seats.n_experts + 1
        self.barred = _BARRED * max(float(each.max(initial=0.0)), 1.0)
        held = np.zeros((layers, self.rows, self.kinds), dtype=bool)
        np.put_along_axis(held, table, True, axis=2)
        held[:, :, -1] = False  # two empty seats on a rank are no duplicates
        self.held = held.reshape(-1)  # [layers * rows * kinds] whether a rank holds an expert
        value = np.take_along_axis(np.concatenate([each, np.zeros((layers, 1))], axis=1), table.reshape(layers, -1), axis=1)
        self.table = table.reshape(-1, self.width)
        self.value = value.reshape(-1, self.width)  # [layers * rows, width] load of the replica of each seat
        self.load = self.value.sum(1)
        self.speed = None if seats.same_speed else np.tile(seats.speed, layers)
        self.closed = None if seats.open.all() else np.tile(~seats.open, (layers, 1))

    def times(self, layers: Ints) -> Floats:
        """[n, rows] load over speed."""
        loads = self.load.reshape(-1, self.rows)[layers]
        result: Floats = loads if self.speed is None else loads / self.seats.speed
        return result

    def deal_anew(self, layers: Ints) -> None:
        """Seat by seat of all ranks: the heaviest replica of that seat to the rank whose other seats carry least, and so on.

        No other order of one seat's replicas has a lower highest load. Layers in which an expert would be twice on a rank are left.
        """
        if not len(layers):
            return
        shape = (len(layers), self.rows, self.width)
        rows = (layers[:, None] * self.rows + np.arange(self.rows)).ravel()
        table, value = self.table[rows].reshape(shape), self.value[rows].reshape(shape)
        order = np.argsort(-value, axis=2)
        table, value = np.take_along_axis(table, order, axis=2), np.take_along_axis(value, order, axis=2)
        load = value.sum(2)
        for seat in range(self.width - 1, -1, -1):
            rest = load - value[:, :, seat]
            poorest, lightest = np.argsort(-rest, axis=1), np.argsort(value[:, :, seat], axis=1)
            for part in (table, value):
                np.put_along_axis(part[:, :, seat], poorest, np.take_along_axis(part[:, :, seat], lightest, axis=1), axis=1)
            load = rest + value[:, :, seat]
        kinds = np.sort(table, axis=2)
        twice = ((kinds[:, :, 1:] == kinds[:, :, :-1]) & (kinds[:, :, 1:] < self.kinds - 1)).any((1, 2))
        kept = np.repeat(~twice, self.rows)
        rows = rows[kept]
        self.held[(rows * self.kinds)[:, None] + self.table[rows]] = False
        self.table[rows], self.value[rows] = table.reshape(-1, self.width)[kept], value.reshape(-1, self.width)[kept]
        self.held[(rows * self.kinds)[:, None] + self.table[rows]] = self.table[rows] < self.kinds - 1
        self.load[rows] = load.ravel()[kept]

    def above(self, layers: Ints, goal: Floats) -> Ints:
        """Those of these layers whose slowest rank is slower than the goal."""
        return layers[self.times(layers).max(1) > goal[layers]] if len(layers) else layers

    def pair_up(self, layers: Ints, shift: int) -> None:
        """The slowest rank with the fastest, the second slowest with the second fastest ..: one swap each."""
        order = self.times(layers).argsort(1)
        half = self.rows // 2
        first = layers[:, None] * self.rows
        slow = (first + order[:, -half:]).ravel()
        fast = (first + np.roll(order[:, :half][:, ::-1], shift, axis=1)).ravel()
        gain, place = self._best(slow, fast)
        self._swap(slow, fast, place, gain > 0)

    def relieve_many(self, layers: Ints, count: int, random: np.random.Generator) -> None:
        """The slowest ranks, each with the best of its own few others, which are drawn: one swap each."""
        others = (self.rows - count) // count
        order = np.argpartition(-self.times(layers), count, axis=1)
        drawn = order[:, count:][:, random.permutation(self.rows - count)[: count * others]]
        first = layers[:, None] * self.rows
        slow = np.repeat((first + order[:, :count]).ravel(), others)
        self._choose(slow, (first + drawn).ravel(), others)

    def relieve(self, layers: Ints) -> npt.NDArray[np.bool_]:
        """The slowest rank of these layers with whichever other is best: one swap each. [n] whether there was one."""
        slowest = self.times(layers).argmax(1)
        others = (slowest[:, None] + np.arange(1, self.rows)) % self.rows
        slow = np.repeat(layers * self.rows + slowest, self.rows - 1)
        return self._choose(slow, (layers[:, None] * self.rows + others).ravel(), self.rows - 1)

    def _choose(self, slow: Ints, fast: Ints, group: int) -> npt.NDArray[np.bool_]:
        """Of each group of pairs, the best one swaps. [groups] whether it did."""
        gain, place = self._best(slow, fast)
        best = gain.reshape(-1, group).argmax(1) + np.arange(0, len(gain), group)
        better: npt.NDArray[np.bool_] = gain[best] > 1e-12 * self.load[slow[best]]
        self._swap(slow[best], fast[best], place[best], better)
        return better

    def _best(self, slow: Ints, fast: Ints) -> tuple[Floats, Ints]:
        """Of each pair of ranks [n]: by how much the slower of both gets faster with the best swap, and which that is."""
        here, there = self._offered(slow, fast, self.barred), self._offered(fast, slow, 2.0 * self.barred)
        if self.speed is None:
            half = (self.load.take(slow) - self.load.take(fast)) * 0.5
            here -= half[:, None]
            after = here[:, :, None] - there[:, None, :]
            np.abs(after, out=after)  # above the mean of both
            before = np.abs(half)
        else:
            shift = here[:, :, None] - there[:, None, :]
            one, two = self.speed[slow], self.speed[fast]
            after = np.maximum(
                (self.load[slow][:, None, None] - shift) / one[:, None, None], (self.load[fast][:, None, None] + shift) / two[:, None, None]
            )
            before = np.maximum(self.load[slow] / one, self.load[fast] / two)
        flat = after.reshape(len(slow), -1)
        place = flat.argmin(1)
        return before - flat.ravel().take(place + np.arange(0, flat.size, flat.shape[1])), place

    def _offered(self, ranks: Ints, to: Ints, barred: float) -> Floats:
        """[n, width] loads that ranks could give to others; ``barred`` where a seat is closed or the other holds that expert."""
        held = self.held.take((to * self.kinds)[:, None] + self.table.take(ranks, axis=0))
        if self.closed is not None:
            held |= self.closed[ranks]
        value = self.value.take(ranks, axis=0)
        np.putmask(value, held, barred)
        return value

    def _swap(self, slow: Ints, fast: Ints, place: Ints, chosen: npt.NDArray[np.bool_]) -> None:
        """Swap the seats of the chosen pairs; no rank is in two of them."""
        slow, fast, place = slow[chosen], fast[chosen], place[chosen]
        first, second = np.divmod(place, self.width)
        one, two = self.table[slow, first], self.table[fast, second]
        mine, yours = self.value[slow, first], self.value[fast, second]
        self.table[slow, first], self.table[fast, second] = two, one
        self.value[slow, first], self.value[fast, second] = yours, mine
        self.load[slow] -= mine - yours
        self.load[fast] += mine - yours
        empty = self.kinds - 1
        for rank, gone, come in ((slow, one, two), (fast, two, one)):
            self.held[rank * self.kinds + gone] = False
            self.held[rank * self.kinds + come] = come < empty
