"""Which published pages a member holds, how often, and which of them it has verified."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .store import Found


@dataclass(kw_only=True, slots=True)
class _Link:
    holds: int  # inside this member; in the store it is one reference, also while this is 0
    generation: int
    tail: int  # second half of the hash
    checksum: int


class Links:
    """A member's own count of its references. Misuse is a bug of ours: AssertionError."""

    def __init__(self) -> None:
        self._links: dict[int, _Link] = {}
        self.idle: dict[int, None] = {}  # held no more, but still referenced in the store; oldest first
        self._verified: dict[int, int] = {}  # page -> generation whose bytes were right

    def __contains__(self, page: int) -> bool:
        return page in self._links

    def add(self, page: int, generation: int, tail: int, checksum: int) -> None:
        """A page that the member has just published: held once."""
        assert page not in self._links, f"page {page} is published while it is held"
        self._links[page] = _Link(holds=1, generation=generation, tail=tail, checksum=checksum)

    def usable(self, found: list[Found], tails: Sequence[int]) -> list[Found]:
        """``found`` up to the first page that is held as something else than was looked for; ``tails``: second halves of the hashes."""
        for place, ((_, page, generation), tail) in enumerate(zip(found, tails, strict=False)):
            link = self._links.get(page)
            if link is not None and (link.generation, link.tail) != (generation, tail):
                return found[:place]
        return found

    def take(self, found: Sequence[Found], tails: Sequence[int], checksums: Iterable[int]) -> None:
        """Hold each page of ``found`` once more; ``checksums`` of those not held yet, in order."""
        rest = iter(checksums)
        for (_, page, generation), tail in zip(found, tails, strict=False):
            link = self._links.get(page)
            if link is None:
                self._links[page] = _Link(holds=1, generation=generation, tail=tail, checksum=next(rest))
                continue
            self.idle.pop(page, None)
            link.holds += 1

    def let_go(self, pages: Sequence[int]) -> None:
        """Hold each page once less; all or, with an AssertionError, none."""
        wanted: dict[int, int] = {}
        for page in pages:
            wanted[page] = wanted.get(page, 0) + 1
        for page, times in wanted.items():
            link = self._links.get(page)
            assert link is not None and link.holds >= times, f"page {page} is released more often than it was taken"
        for page, times in wanted.items():
            self._links[page].holds -= times
            if self._links[page].holds == 0:
                self.idle[page] = None

    def idle_pages(self, most: int) -> list[int]:
        """Up to ``most`` pages whose reference in the store can be dropped."""
        return [page for page, _ in zip(self.idle, range(most), strict=False)]

    def forget(self, pages: Iterable[int]) -> None:
        """The store has dropped the references of these idle pages."""
        for page in pages:
            del self.idle[page]
            del self._links[page]

    def unverified(self, page: int) -> int | None:
        """Checksum that the bytes of a held page must have; None if they were compared before."""
        link = self._links[page]
        return None if self._verified.get(page) == link.generation else link.checksum

    def verified(self, page: int) -> None:
        """The bytes of a held page are right; they do not change while it is of this generation."""
        self._verified[page] = self._links[page].generation

    def generation(self, page: int) -> int:
        """Of a held page."""
        return self._links[page].generation

    def pages(self) -> list[int]:
        """All pages that the store has a reference of this member for."""
        return list(self._links)
