"""Who is alive, agreed at every boundary by ranks that go on without others; votes travel with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....parallel.failure import CollectiveError
from ....parallel.group import Group, Pending
from .agreement import Table

_TAG = 92
_WORDS = 4  # of a vote


class Members:
    """An ``Agreement`` for fault-tolerant dispatchers: every pair of ranks talks by itself, so a dead one holds nobody up.

    At every boundary all living ranks call ``meet`` and then ``LiveBalancer.boundary``. A rank that is killed is known to some
    before others; steps go on until all survivors know and know that all do, which is the boundary after the next one at the latest.
    Ranks are taken to fail one after another: a second one that fails before the first is agreed on is agreed on with it, or later.
    """

    always = True

    def __init__(self, group: Group) -> None:
        self.group = group
        self.alive = list(range(group.size))
        self._known: set[int] = set()  # ranks among ``alive`` that this rank knows to be lost
        self._words = [0] * _WORDS
        self._table: Table = []

    def post(self, words: Sequence[int]) -> None:
        """See ``Agreement``: they go with the next ``meet``."""
        self._words = list(words)

    def collect(self) -> Table:
        """See ``Agreement``: what came with the last ``meet``; None for ranks that did not come, and for none that were lost before."""
        return [self._table[rank] for rank in self.alive]

    def meet(self, active: Sequence[bool]) -> list[int]:
        """Collective over the living ranks.

        Args:
            active: of this rank's dispatcher: which ranks answered in the last step.

        Returns:
            Ranks that are lost, once all survivors know of the same ones; the same on all, at the same boundary. Else [].
        """
        self._known |= {rank for rank in self.alive if not active[rank]}
        known = sum(1 << rank for rank in self._known)
        rows = self.exchange([known, *self._words])
        self._table = [None if row is None else row[1:] for row in rows]
        says = {rank: row[0] for rank, row in enumerate(rows) if row is not None}
        lost: set[int] = set()
        while True:  # who is lost by the word of ranks that are not
            named = {rank for rank in self.alive if any(says[other] >> rank & 1 for other in says if other not in lost)}
            if named <= lost:
                break
            lost |= named
        mask = sum(1 << rank for rank in lost)
        if not lost or any(says.get(rank) != mask for rank in self.alive if rank not in lost):
            return []
        self.alive = [rank for rank in self.alive if rank not in lost]
        self._known.clear()
        return sorted(lost)

    def exchange(self, words: Sequence[int]) -> Table:
        """``words`` (the same number everywhere) of every rank; None for lost ones. Collective over the living ranks."""
        mine = torch.tensor(list(words), dtype=torch.int64)
        others = [rank for rank in self.alive if rank != self.group.index and rank not in self._known]
        found: Table = [None] * self.group.size
        found[self.group.index] = mine.tolist()
        into = {rank: torch.zeros_like(mine) for rank in others}
        posted: list[tuple[int, Pending, bool]] = []
        for rank in others:
            try:
                posted.append((rank, self.group.recv_async(into[rank], rank, _TAG), True))
                posted.append((rank, self.group.send_async(mine.clone(), rank, _TAG), False))
            except CollectiveError:
                self._known.add(rank)
        for rank, pending, receives in posted:
            try:
                pending.wait()
            except CollectiveError:
                self._known.add(rank)
                continue
            if receives:
                found[rank] = into[rank].tolist()
        return found
