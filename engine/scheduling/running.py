"""The requests that hold a seat, in rank order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from ..request import Request
from .seat import Seat

_RANK = attrgetter("rank")


class RunningSet:
    """Live seats sorted by (priority, index), and each request's seat."""

    def __init__(self) -> None:
        self._sorted: list[Seat] = []
        self._by_id: dict[str, Seat] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._sorted)

    def __getitem__(self, place: int) -> Seat:
        """The seat at ``place`` in rank order; -1 is the lowest ranked."""
        return self._sorted[place]

    def seat_of(self, request: Request) -> Seat:
        """The seat that ``request`` holds."""
        return self._by_id[request.request_id]

    def add(self, seat: Seat) -> None:
        """A seat's stay begins."""
        assert seat.request.request_id not in self._by_id
        insort(self._sorted, seat, key=_RANK)
        self._by_id[seat.request.request_id] = seat

    def remove(self, seat: Seat) -> None:
        """A seat's stay ends: its request names neither slot nor pages."""
        place = bisect_left(self._sorted, seat.rank, key=_RANK)
        while self._sorted[place] is not seat:  # ranks are unique unless a caller reuses an index
            place += 1
        del self._sorted[place]
        del self._by_id[seat.request.request_id]
        seat.live = False
        seat.request.slot, seat.request.pages = -1, []

    def check(self) -> None:
        """AssertionError unless seats and their requests agree."""
        ranks = [seat.rank for seat in self._sorted]
        assert ranks == sorted(ranks) and len(ranks) == len(self._by_id), "running seats are out of order"
        for seat in self._sorted:
            request = seat.request
            assert seat.live and self._by_id[request.request_id] is seat, f"request {request.request_id}: wrong seat"
            assert (seat.slot, seat.total, seat.computed) == (request.slot, request.total_len, request.computed)
            assert seat.pages is request.pages, f"request {request.request_id}: page tables differ"
