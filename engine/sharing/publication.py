"""Pages of one sequence that are offered to the others."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...attention.kv.directory import Directory, DirectoryBusy, PageHasher
from ...attention.kv.ids import HostPage
from ..plan import I32

_PIECE = 64  # pages in one transaction
_TRIES = 4  # while the store is locked


class Publication:
    """``pages[i]`` holds page ``places[i]`` of ``tokens``; its copy has ended."""

    def __init__(self, tokens: I32, places: Sequence[int], pages: Sequence[HostPage]) -> None:
        self.tokens, self.places, self.pages = tokens, places, pages
        self.accepted: list[HostPage] = []  # the directory has them now; the others stay the member's own

    def publish(self, directory: Directory, hasher: PageHasher) -> None:
        """Offer all of them, in pieces; on a thread that may take its time.

        Raises:
            DirectoryError: the directory failed, or was locked for long; what was accepted by then stays so.
        """
        hashes = hasher.hashes(self.tokens)
        for start in range(0, len(self.pages), _PIECE):
            places, pages = self.places[start : start + _PIECE], self.pages[start : start + _PIECE]
            names = [hashes[place] for place in places]
            sums = directory.checksums(names, pages)
            accepted = _patient(directory, names, pages, sums, places[0])
            self.accepted += [page for page, yes in zip(pages, accepted, strict=True) if yes]


def _patient(directory: Directory, names: Sequence[bytes], pages: Sequence[HostPage], sums: Sequence[int], first: int) -> tuple[bool, ...]:
    for left in reversed(range(_TRIES)):
        try:
            return directory.publish(names, pages, sums, first=first)
        except DirectoryBusy:
            if not left:
                raise
            time.sleep(0.05)
    raise AssertionError("no try was the last")
