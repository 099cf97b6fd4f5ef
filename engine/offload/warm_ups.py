"""Stays whose resident rows go into their hot buffers as they are chosen, because pages of theirs will be dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..plan import StepPlan
from .moves import Moves
from .page_book import PageBook
from .stay import Stay


class WarmUps:
    """Who is moving, and who is to be offloaded as soon as there is a lease. A stay moves for one row of its own before its pages go."""

    def __init__(self) -> None:
        self._moving: list[Stay] = []
        self._wanting: dict[Stay, None] = {}

    @property
    def busy(self) -> bool:
        """Somebody moves, or waits for a lease to do so."""
        return bool(self._moving or self._wanting)

    def want(self, stay: Stay) -> None:
        """``stay`` is to be offloaded as soon as there is a lease for it."""
        self._wanting.setdefault(stay)

    def offload(self, lease: Callable[[Stay], bool], step: int, book: PageBook) -> None:
        """Begin with those who want it and get a ``lease``: their pages that will be dropped can move from plan ``step`` on."""
        for stay in list(self._wanting):
            if not stay.live or stay.lease or lease(stay):
                del self._wanting[stay]
                if stay.live and not stay.tolerant:
                    self.start((stay,), step, book.moves)
                    book.publish(stay.pages)

    def start(self, stays: Iterable[Stay], step: int, moves: Moves) -> None:
        """``stays``, which have leases, move from plan ``step`` on."""
        for stay in stays:
            if stay.moving < 0:
                stay.moving = step
                moves.moving[stay.slot] = 1
                self._moving.append(stay)

    def stop(self, loosen: Callable[[Stay], None], moves: Moves) -> None:
        """Those who offload stop once they had a row, and are loosened; those who only lose their latest pages stop at once."""
        still = []
        for stay in self._moving:
            if not stay.tolerant and stay.last_step < stay.moving:
                still.append(stay)
                continue
            stay.moving = -1
            moves.moving[stay.slot] = 0
            if not stay.tolerant:
                loosen(stay)
        self._moving = still

    def cut_short(self, loosen: Callable[[Stay], None]) -> None:
        """Device pages are wanted now: those who offload begin with cold hot rows."""
        for stay in self._moving:
            if not stay.tolerant:
                loosen(stay)

    def note(self, plan: StepPlan) -> None:
        """``plan`` has its rows."""
        waiting = [stay for stay in self._moving if not stay.tolerant]
        if waiting:
            named = set(plan.slots.tolist())
            for stay in waiting:
                stay.last_step = plan.step if stay.slot in named else stay.last_step

    def forget(self, stay: Stay, moves: Moves) -> None:
        """``stay`` ends."""
        self._wanting.pop(stay, None)
        if stay.moving >= 0:
            moves.moving[stay.slot] = 0
            self._moving.remove(stay)
