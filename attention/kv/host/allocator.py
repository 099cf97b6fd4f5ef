"""Which host pages are free, and which of them lie side by side."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import cast

from ..ids import HostPage


class HostPageAllocator:
    """Pages ``0 .. n_pages - 1`` with a reference count each, handed out in runs; a page is free when nobody holds it.

    A device that reads rows scattered over the pool pays for address translation, so one request's pages should fill whole
    *extents* (``extent_pages`` pages: 2 MiB of a layer). A request without pages begins in the emptiest extent, and what it leaves
    of that is not handed to others while a larger room exists: it will grow there. Everything is a function of the calls, in
    their order. Misuse is a bug of ours: AssertionError.
    """

    def __init__(self, n_pages: int, extent_pages: int) -> None:
        """Raise ValueError unless both are at least 1."""
        if n_pages < 1 or extent_pages < 1:
            raise ValueError(f"a host page allocator needs pages and pages per extent, got {n_pages} and {extent_pages}")
        self.n_pages, self.extent_pages = n_pages, extent_pages
        self.taken = 0  # pages handed out since the start
        self.returned = 0  # pages that became free again
        self._refs = [0] * n_pages
        sizes = [min(extent_pages, n_pages - start) for start in range(0, n_pages, extent_pages)]
        self._free = [(1 << size) - 1 for size in sizes]  # of each extent, bit i: page i of it is free
        # extents by the number of their free pages, in the order in which they came to have it
        self._by_room: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(extent_pages + 1)]
        for extent, size in enumerate(sizes):
            self._by_room[size][extent] = None
        self._most = max(sizes)  # no extent has more free pages than this
        self.n_free = n_pages

    @property
    def n_used(self) -> int:
        """Pages with at least one holder."""
        return self.n_pages - self.n_free

    @property
    def n_free_extents(self) -> int:
        """Whole extents that are free."""
        return len(self._by_room[self.extent_pages])

    @property
    def fragmentation(self) -> float:
        """Share of the free pages that lie in extents which others use: 0 is best."""
        return 1 - self.n_free_extents * self.extent_pages / self.n_free if self.n_free else 0.0

    def refs(self, page: HostPage) -> int:
        """Holders of ``page``."""
        return self._refs[page]

    def take(self, count: int, after: HostPage | None = None) -> list[HostPage]:
        """Hand out ``count`` free pages, each with one holder: those right after page ``after`` while they are free, else other runs."""
        assert 0 <= count <= self.n_free, f"{count} host pages wanted, {self.n_free} free"
        pages: list[int] = []
        place = -1 if after is None else after + 1
        while len(pages) < count:
            if not self._is_free(place):
                place = self._new_place()
            run = self._take_run(place, count - len(pages))
            pages += range(place, place + run)
            place += run
        self.taken += count
        self.n_free -= count
        return cast(list[HostPage], pages)

    def _is_free(self, page: int) -> bool:
        if not 0 <= page < self.n_pages:
            return False
        extent, bit = divmod(page, self.extent_pages)
        return bool(self._free[extent] >> bit & 1)

    def _new_place(self) -> int:
        """First page of the longest free run of the emptiest extent, of equally empty ones the one that has been so longest."""
        while not self._by_room[self._most]:
            self._most -= 1
        extent = next(iter(self._by_room[self._most]))
        return extent * self.extent_pages + longest_run(self._free[extent])

    def _take_run(self, place: int, most: int) -> int:
        """Take up to ``most`` pages from ``place``, which is free, within its extent; how many."""
        extent, bit = divmod(place, self.extent_pages)
        ahead = self._free[extent] >> bit
        run = min(_ones(ahead), most)
        self._set_free(extent, self._free[extent] & ~(((1 << run) - 1) << bit))
        self._refs[place : place + run] = [1] * run
        return run

    def _set_free(self, extent: int, free: int) -> None:
        before, now = self._free[extent].bit_count(), free.bit_count()
        self._free[extent] = free
        if before != now:
            del self._by_room[before][extent]
            self._by_room[now][extent] = None
            self._most = max(self._most, now)

    def share(self, pages: Iterable[HostPage]) -> None:
        """Add one holder to each page; none of them may be free."""
        refs = self._refs
        for page in pages:
            assert refs[page] > 0, f"host page {page} is free and cannot be shared"
            refs[page] += 1

    def drop(self, pages: Iterable[HostPage]) -> list[HostPage]:
        """Take one holder from each page; returns those that became free, which may be handed out again at once."""
        refs, freed = self._refs, []
        masks: dict[int, int] = {}  # extent -> pages of it that became free
        for page in pages:
            assert refs[page] > 0, f"host page {page} is freed twice"
            refs[page] -= 1
            if refs[page] == 0:
                freed.append(page)
                extent, bit = divmod(page, self.extent_pages)
                masks[extent] = masks.get(extent, 0) | 1 << bit
        for extent, mask in masks.items():
            self._set_free(extent, self._free[extent] | mask)
        self.returned += len(freed)
        self.n_free += len(freed)
        return freed

    def check(self) -> None:
        """AssertionError unless masks, counts and references agree."""
        size = self.extent_pages
        for page, holders in enumerate(self._refs):
            assert holders >= 0 and (holders == 0) == self._is_free(page), f"host page {page} has {holders} holders, which its mask denies"
        assert sum(mask.bit_count() for mask in self._free) == self.n_free, "free host pages are miscounted"
        assert self._free[-1] >> (self.n_pages - (len(self._free) - 1) * size) == 0, "a page past the last is free"
        for room, extents in enumerate(self._by_room):
            assert all(self._free[extent].bit_count() == room for extent in extents), "an extent is listed with the wrong room"
        assert sum(map(len, self._by_room)) == len(self._free), "an extent is listed twice or not at all"
        assert self.taken - self.returned == self.n_used, f"{self.taken} taken, {self.returned} returned, {self.n_used} used"


def count_runs(pages: Iterable[int]) -> int:
    """Runs of consecutive numbers in ``pages``, in their order: 1 for pages side by side."""
    runs, expected = 0, None
    for page in pages:
        runs += page != expected
        expected = page + 1
    return runs


def longest_run(mask: int) -> int:
    """Lowest place of the longest run of ones in ``mask``, which has some."""
    best, best_length, place = 0, 0, 0
    while mask:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        place += skip
        length = _ones(mask)
        if length > best_length:
            best, best_length = place, length
        mask >>= length
        place += length
    return best


def _ones(mask: int) -> int:
    """Ones at the low end of ``mask``."""
    return (~mask & (mask + 1)).bit_length() - 1
