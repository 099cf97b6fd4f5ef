"""Swaps of two replicas between ranks, of all layers at once, until the slowest rank of each layer cannot be made faster."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..plan import Floats
from ..topology import Ints
from .seats import Seats

_PAIRED_ROUNDS = 4  # every rank takes part once, the slowest with the fastest
_GROUP_ROUNDS = ((4, 12),)  # a part of the ranks, the slowest, each with the best of a few others; and for how many rounds
_NARROW_GROUP_ROUNDS = ((4, 18),)  # where ranks have three seats: a swap has less to choose from
_SINGLE_ROUNDS = 60  # the slowest rank with the best of all others
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
    for turn in range(_PAIRED_ROUNDS):
        if len(busy):
            work.pair_up(busy, shift=turn)
        busy = work.above(busy, goal)
    for part in _parts(seats, effort):
        if len(busy):
            work.relieve_many(busy, max(seats.n_rows // part, 1), random)
        busy = work.above(busy, goal)
    for _ in range(_SINGLE_ROUNDS * effort if rounds is None else rounds):
        if not len(busy):
            return
        busy = work.above(busy[work.relieve(busy)], goal)


def _parts(seats: Seats, effort: int) -> list[int]:
    """For each round with groups, which part of the ranks counts as slow. With two seats heavy with light is best already."""
    width = seats.open.shape[1]
    if seats.n_rows < 8 or width < 3:
        return []
    return [part for part, rounds in (_GROUP_ROUNDS if width > 3 else _NARROW_GROUP_ROUNDS) for _ in range(rounds * effort)]


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
