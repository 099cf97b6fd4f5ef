"""Which KV pages are free, and how many holders each of the others has."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Pages ``0 .. n_pages - 1`` with a reference count each; a page is free when nobody holds it.

    The prefix tree and every request that reads a page are holders. The free list is last in, first out, so that a page
    that was written recently is written again soon. Misuse is a bug of ours: AssertionError.
    """

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.taken = 0  # pages handed out since the start
        self.returned = 0  # pages that became free again
        self._free = list(range(n_pages - 1, -1, -1))
        self._refs = [0] * n_pages

    @property
    def n_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Pages with at least one holder."""
        return self.n_pages - len(self._free)

    def refs(self, page: int) -> int:
        """Holders of ``page``."""
        return self._refs[page]

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` free pages, each with one holder."""
        if count == 0:
            return []
        assert 0 < count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._refs[page] = 1
        self.taken += count
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to each page; none of them may be free."""
        refs = self._refs
        for page in pages:
            assert refs[page] > 0, f"page {page} is free and cannot be shared"
            refs[page] += 1

    def drop(self, pages: Iterable[int]) -> list[int]:
        """Take one holder from each page; returns those that became free, which may be handed out again at once."""
        refs, freed = self._refs, []
        for page in pages:
            assert refs[page] > 0, f"page {page} is freed twice"
            refs[page] -= 1
            if refs[page] == 0:
                freed.append(page)
        # Reversed: a request's first pages come out first again.
        self._free.extend(reversed(freed))
        self.returned += len(freed)
        return freed

    def check(self) -> None:
        """AssertionError unless free list and reference counts agree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert all((self._refs[page] == 0) == (page in free) for page in range(self.n_pages)), "free list and reference counts disagree"
        assert self.taken - self.returned == self.n_used, f"{self.taken} taken, {self.returned} returned, {self.n_used} used"
