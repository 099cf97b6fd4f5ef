"""Where a replica's host pages come from: an allocator of its own, or the directory that it shares with others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ...attention.kv.ids import HostPage


class HostPages(Protocol):
    """Host pages by number, with their holders counted."""

    def take(self, count: int, after: HostPage | None = None) -> Sequence[HostPage]:
        """``count`` free pages, right behind page ``after`` if that can be; there must be so many."""

    def drop(self, pages: Iterable[HostPage]) -> object:
        """Take one holder from each page."""
