"""Requests that wait for a place, in the order in which they will get one."""

from __future__ import annotations

import heapq
import itertools

from ..request import Request, RequestState


class WaitingQueue:
    """Priority queue by (priority, index). A request that ends while it waits is dropped when it comes to the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []
        self._pushes = itertools.count()  # so that requests themselves are never compared
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def push(self, request: Request) -> None:
        """Add a request in state WAITING."""
        heapq.heappush(self._heap, (request.priority, request.index, next(self._pushes), request))

    def peek(self) -> Request | None:
        """The first in rank order, None when nobody waits."""
        while self._heap and self._heap[0][3].state is not RequestState.WAITING:
            heapq.heappop(self._heap)
            self._dead -= 1
        return self._heap[0][3] if self._heap else None

    def near(self, count: int) -> list[Request]:
        """Some that wait, the first ``count`` or so in rank order among them."""
        return [entry[3] for entry in self._heap[:count] if entry[3].state is RequestState.WAITING]

    def pop(self) -> Request:
        """Remove and return the first; it must still be WAITING."""
        request = self._heap[0][3]
        assert request.state is RequestState.WAITING
        heapq.heappop(self._heap)
        return request

    def ended(self) -> None:
        """One of the waiting requests has just ended."""
        self._dead += 1
        if self._dead > 64 and 2 * self._dead > len(self._heap):  # most entries are of ended requests
            self._heap = [entry for entry in self._heap if entry[3].state is RequestState.WAITING]
            heapq.heapify(self._heap)
            self._dead = 0
