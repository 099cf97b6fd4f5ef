"""Whether pages that a member has taken hold what they should; each is read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ids import HostPage
from .checksum import PageChecker
from .counts import DirectoryCounts
from .host import Deadline
from .links import Links


class Verifier:
    """Compares held pages with their checksums, several at a time."""

    def __init__(self, checker: PageChecker, links: Links, counts: DirectoryCounts, withdraw: Callable[[HostPage], None]) -> None:
        """``withdraw`` is told of a page that is wrong."""
        self._checker, self._links, self._counts, self._withdraw = checker, links, counts, withdraw

    def sound(self, pages: Sequence[HostPage], hashes: Sequence[bytes], seconds: float) -> int:
        """How many of the first of ``pages``, which are held, are right; as far as ``seconds`` allow."""
        deadline, step = Deadline(seconds), 8 * self._checker.threads
        unseen = [place for place, page in enumerate(pages) if self._links.unverified(page) is not None]
        for start in range(0, len(unseen), step):
            part = unseen[start : start + step]
            if deadline.passed:
                return part[0]
            sums = self._checker.sums([hashes[place] for place in part], [pages[place] for place in part])
            self._counts.verified += len(part)
            for place, found in zip(part, sums, strict=True):
                if found != self._links.unverified(pages[place]):
                    self._counts.withdrawn += 1
                    self._withdraw(pages[place])
                    return place
                self._links.verified(pages[place])
        return len(pages)
