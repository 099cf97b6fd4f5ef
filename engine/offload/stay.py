"""What a running request holds of the device."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False, kw_only=True, slots=True)
class Stay:
    """One seat as the residency sees it.

    A stay is *tolerant* when its rows work without some of its pages: it prefills beyond the keys of one selection, or it
    has a hot lease. Pages that no intolerant stay reads may be dropped.
    """

    slot: int
    rank: tuple[int, int]  # lower runs first
    pages: list[int]  # the seat's page table, shared with it
    shared: int  # leading pages from the prefix tree
    tolerant: bool
    lease: list[int] = field(default_factory=list)  # device pages of the hot buffer, []: none
    moving: int = -1  # plan that first had its resident rows go into the hot buffer, -1: they do not
    floor: int = 0  # device pages it will hold at the least, whatever else is dropped
    last_step: int = -1  # last plan with a row of it, noted while it moves
    live: bool = True

    @property
    def open(self) -> bool:
        """It may have absent pages and no hot rows: it can prefill several tokens at once, and nothing else."""
        return self.tolerant and not self.lease
