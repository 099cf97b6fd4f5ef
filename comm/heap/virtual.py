"""Several ranks in one process: their workspaces are neighbours, and every rank may be asked for from anywhere.

For tests of the protocol and of kernels, and to look at all ranks of a step at once.
"""

from __future__ import annotations

import torch

from .peers import Peers


class VirtualHeap:
    """Workspaces of ``n_ranks`` ranks on ``device``. ``of(r)`` is what rank r has of it."""

    name = "virtual"

    def __init__(self, n_ranks: int, device: torch.device | None = None) -> None:
        self.n_ranks = n_ranks
        self.device = device or torch.device("cpu")
        self._spaces: list[tuple[torch.Tensor, ...]] = []

    def of(self, rank: int) -> VirtualRankHeap:
        """The ``Heap`` of one rank."""
        return VirtualRankHeap(self, rank)

    def space(self, number: int, n_bytes: int) -> tuple[torch.Tensor, ...]:
        """The ``number``-th workspace of every rank; made when the first rank asks."""
        if number == len(self._spaces):
            self._spaces.append(tuple(torch.zeros(n_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.n_ranks)))
        space = self._spaces[number]
        if space[0].numel() != n_bytes:
            raise ValueError(f"virtual ranks must allocate the same: {space[0].numel()} bytes before, {n_bytes} now")
        return space


class VirtualRankHeap:
    """One rank's ``Heap``."""

    name = "virtual"

    def __init__(self, heap: VirtualHeap, rank: int) -> None:
        self._heap = heap
        self._rank = rank
        self._sizes: list[int] = []

    @property
    def allocated_bytes(self) -> int:
        """See ``Heap``."""
        return sum(self._sizes)

    def allocate(self, n_bytes: int) -> Peers:
        """See ``Heap``."""
        views = self._heap.space(len(self._sizes), n_bytes)
        self._sizes.append(n_bytes)
        pointers = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=self._heap.device)
        return Peers(rank=self._rank, views=views, pointers=pointers)

    def close(self) -> None:
        """See ``Heap``."""
        self._sizes.clear()
