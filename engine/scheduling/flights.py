"""Scheduled steps whose results have not been handled."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..request import Request
from .seat import Seat


@dataclass(kw_only=True, slots=True)
class Flight:
    """One scheduled step."""

    step: int
    seats: list[Seat]  # of all rows, in plan order
    sampled: list[tuple[Seat, int]]  # of the sampled rows, with the generation of the request then
    skipped: bool = False  # nobody launched it


class Flights:
    """Steps under way, oldest first. Wrong order is a bug of the caller: AssertionError."""

    def __init__(self) -> None:
        self._queue: deque[Flight] = deque()
        self._naming = 0

    @property
    def naming(self) -> bool:
        """Some step under way has a row."""
        return self._naming > 0

    def push(self, flight: Flight) -> None:
        """A step has been scheduled."""
        self._queue.append(flight)
        self._naming += bool(flight.seats)

    def pop(self, step: int, tokens: int) -> Flight:
        """The oldest step, which must be ``step`` and have sampled ``tokens`` tokens."""
        assert self._queue and self._queue[0].step == step, f"step {step} completed, but the oldest is another"
        flight = self._queue[0]
        assert tokens == len(flight.sampled), f"step {step} sampled {len(flight.sampled)} tokens, {tokens} came back"
        self._queue.popleft()
        self._naming -= bool(flight.seats)
        return flight

    def skip(self, step: int) -> None:
        """Step ``step`` was empty and nobody launched it."""
        flight = self._find(step)
        assert not flight.seats, f"step {step} has {len(flight.seats)} rows and cannot be skipped"
        flight.skipped = True

    def pop_skipped(self) -> int | None:
        """Number of the oldest step if it was skipped; it leaves the queue."""
        return self._queue.popleft().step if self._queue and self._queue[0].skipped else None

    def requests(self, step: int) -> list[Request]:
        """Requests of a step's rows, in plan order."""
        return [seat.request for seat in self._find(step).seats]

    def _find(self, step: int) -> Flight:
        for flight in reversed(self._queue):
            if flight.step == step:
                return flight
        raise AssertionError(f"step {step} is not under way")
