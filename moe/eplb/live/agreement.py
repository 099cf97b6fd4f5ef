"""How votes get to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ....parallel.group import Group, Pending

Table = list[list[int] | None]  # words of every rank; None for one that is lost


class Agreement(Protocol):
    """Carries a few integers of every rank from one boundary to the next. All ranks get the same table.

    An engine that exchanges numbers at every step anyway may take these along. ``post`` and ``collect`` alternate, on all ranks
    at the same boundaries.
    """

    always: bool  # whether words are carried at every boundary; else only while a cycle is under way

    def post(self, words: Sequence[int]) -> None:
        """At a boundary: this rank's words. Waits for nobody."""

    def collect(self) -> Table:
        """At the next boundary: what all ranks posted, in the order of ranks.

        Raises:
            CollectiveError: a rank did not come within the deadline.
        """


class GroupAgreement:
    """By an all-gather of the CPU that is under way during a step. Used by the main thread, in order with its other collectives."""

    always = False

    def __init__(self, group: Group) -> None:
        self.group = group
        self._pending: Pending | None = None

    def post(self, words: Sequence[int]) -> None:
        """See ``Agreement``."""
        self._pending = self.group.all_gather_async(torch.tensor([list(words)], dtype=torch.int64))

    def collect(self) -> Table:
        """See ``Agreement``."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("collect: nothing was posted at the boundary before")
        table: Table = pending.wait().tolist()
        return table
