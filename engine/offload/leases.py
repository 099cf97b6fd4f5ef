"""Leases that are larger than promised while device pages are of no other use. Lengths and counts decide, as everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from .page_book import PageBook
from .stay import Stay
from .stay_book import StayBook
from .tier_limits import UNDER_WAY, TierLimits

#: plans from one growth of leases to the next
GROW_EVERY = 16
#: plans without growth after pages of leases were wanted back
REST = 4 * GROW_EVERY
#: leases grow and shrink by this part of what is promised
_PIECES = 4


def lease_level(limits: TierLimits, leases: int, pages: int) -> int:
    """Device pages of each of so many ``leases`` that share ``pages``: whole pieces above the promise, at most the largest lease."""
    piece = piece_of(limits)
    above = max(0, pages // leases - limits.hot_pages)
    return min(limits.largest_lease, limits.hot_pages + above // piece * piece)


def piece_of(limits: TierLimits) -> int:
    """Device pages by which a lease changes."""
    return max(1, limits.hot_pages // _PIECES)


def shared_by(limits: TierLimits, requests: int) -> int:
    """Device pages that the leases of so many long ``requests`` share when nobody else runs."""
    return limits.n_device_pages - limits.step_pages - requests * UNDER_WAY


def lease_steps(limits: TierLimits, requests: int, context: int) -> tuple[tuple[int, int], ...]:
    """Hot rows of each request of ``context`` tokens by how many run: (requests up to which, rows), at most ``requests`` of them."""
    steps: dict[int, int] = {}
    pages = -(-context // limits.page_size)
    for running in range(1, requests + 1):
        level = min(lease_level(limits, running, shared_by(limits, running)), lease_level(limits, 1, pages))
        steps[level * limits.page_size] = running
    return tuple((running, rows) for rows, running in steps.items())


class Leases:
    """Who has more hot rows than promised.

    Every ``every`` plans they grow to one level, the smallest first, into pages that are free or could be dropped, and who is two
    pieces above that level or more goes down to it; what a step and everybody's floor need is left alone. They shrink before
    anybody is spilled, preempted or made to wait, the largest first, and then are left alone for ``rest`` plans.
    """

    def __init__(self, limits: TierLimits, book: PageBook, stays: StayBook) -> None:
        self.every, self.rest = GROW_EVERY, REST
        self.grown = self.shrunk = 0  # changes of leases
        self._limits, self._book, self._stays = limits, book, stays
        self._piece = piece_of(limits)
        self._next = 0  # first plan that may level leases

    def level(self, step: int) -> None:
        """All rows of plan ``step`` have what they need: leases share the rest."""
        limits, book, stays = self._limits, self._book, self._stays
        if not stays.leased or step < self._next or limits.largest_lease == limits.hot_pages:
            return
        self._next = step + self.every
        unpromised = limits.n_device_pages - stays.floors - stays.spare
        room = min(unpromised, len(book.free) + book.droppable) - limits.step_pages
        leases = sorted(stays.leasing(), key=lambda s: (len(s.lease), s.rank))
        level = self._level(room + sum(len(stay.lease) for stay in leases), leases)
        for stay in leases:
            above = len(stay.lease) - level
            if above >= 2 * self._piece:
                stays.shrink(stay, above)
                room += above
                self.shrunk += 1
        for stay in leases:
            more = min(level, self._cap(stay)) - len(stay.lease)
            if 0 < more <= room:
                book.shed(more)
                stays.grow(stay, more)
                room -= more
                self.grown += 1

    def _cap(self, stay: Stay) -> int:
        """Most pages that are of use to ``stay``: no more than it has itself."""
        return lease_level(self._limits, 1, len(stay.pages))

    def _level(self, pages: int, leases: Sequence[Stay]) -> int:
        """Where ``leases`` that share ``pages`` stand, those apart that need less."""
        for place, cap in enumerate(sorted(map(self._cap, leases))):
            level = lease_level(self._limits, len(leases) - place, pages)
            if level < cap:
                return level
            pages -= cap
        return self._limits.largest_lease

    def give_back(self, count: int) -> None:
        """Shrink leases until ``count`` device pages are free, or none has more than promised."""
        book, stays = self._book, self._stays
        while len(book.free) < count and stays.spare:
            stay = max(stays.leasing(), key=lambda s: (len(s.lease), s.rank))
            above = len(stay.lease) - self._limits.hot_pages
            stays.shrink(stay, above % self._piece or self._piece)
            self.shrunk += 1
            self._next = max(self._next, book.step + self.rest)
