"""Pages that a member owns and has not handed out: most allocations come from here, without a transaction."""

from __future__ import annotations

from collections.abc import Iterable

from ..ids import HostPage


class Stock:
    """Free pages in extents of ``extent_pages``, handed out in consecutive runs. Misuse is a bug of ours: AssertionError."""

    def __init__(self, extent_pages: int) -> None:
        self.extent_pages = extent_pages
        self._free: dict[int, int] = {}  # extent -> bit i: page i of it is here; none is empty
        self.n_pages = 0

    def __contains__(self, page: int) -> bool:
        extent, bit = divmod(page, self.extent_pages)
        return bool(self._free.get(extent, 0) >> bit & 1)

    def put(self, pages: Iterable[int]) -> None:
        """Add pages that are not here."""
        for page in pages:
            assert page not in self, f"page {page} is in the stock already"
            extent, bit = divmod(page, self.extent_pages)
            self._free[extent] = self._free.get(extent, 0) | 1 << bit
            self.n_pages += 1

    def take(self, count: int, after: HostPage | None = None) -> list[HostPage]:
        """``count`` pages: those right after ``after`` while they are here, else from the start of the fullest extent."""
        assert 0 <= count <= self.n_pages, f"{count} pages wanted, {self.n_pages} in stock"
        taken: list[HostPage] = []
        place = -1 if after is None else after + 1
        while len(taken) < count:
            if place not in self:
                place = self._fullest()
            self._remove(place)
            taken.append(HostPage(place))
            place += 1
        return taken

    def surplus(self, keep: int) -> list[int]:
        """Take out all but about ``keep`` pages, whole extents first."""
        spare: list[int] = []
        while self.n_pages - keep > 0:
            extent = max(self._free, key=lambda one: (self._free[one].bit_count(), -one))
            pages = self._pages_of(extent)[: self.n_pages - keep]
            for page in pages:
                self._remove(page)
            spare += pages
        return spare

    def pages(self) -> list[int]:
        """All pages, ascending."""
        return [page for extent in sorted(self._free) for page in self._pages_of(extent)]

    def _pages_of(self, extent: int) -> list[int]:
        bits = self._free[extent]
        return [extent * self.extent_pages + bit for bit in range(self.extent_pages) if bits >> bit & 1]

    def _fullest(self) -> int:
        extent = max(self._free, key=lambda one: (self._free[one].bit_count(), -one))
        bits = self._free[extent]
        return extent * self.extent_pages + (bits & -bits).bit_length() - 1

    def _remove(self, page: int) -> None:
        extent, bit = divmod(page, self.extent_pages)
        left = self._free[extent] & ~(1 << bit)
        self.n_pages -= 1
        if left:
            self._free[extent] = left
        else:
            del self._free[extent]
