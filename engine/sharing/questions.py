"""Which of a replica's waiting requests have been asked about, and what came of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from ...attention.kv.ids import HostPage
from ..plan import I32
from ..request import Request
from .ask import PATIENCE_S, Ask
from .clerk import Clerk

_SHORT_S = 0.5  # after pages ran short nothing is asked ahead of time for so long
_NOTHING: I32 = np.zeros(0, dtype=np.int32)


class Questions:
    """Questions to the directory by request. Pages that nobody takes are returned."""

    def __init__(self, clerk: Clerk, returned: deque[HostPage], page_size: int) -> None:
        """``returned`` takes pages that are held and of no use."""
        self.late = 0  # answers that came too late or not at all
        self._clerk, self._unused, self._page_size = clerk, returned, page_size
        self._asks: dict[str, tuple[int, Ask | None]] = {}  # by request: its stay, and the question; None: it is settled
        self._until: dict[str, float] = {}  # when a request that is first in the queue has waited long enough for its answer
        self._awaited: Ask | None = None  # what keeps the first waiting request from coming in
        self._foresee_at = 0.0

    def begin(self) -> None:
        """A step is made from now on."""
        self._awaited = None

    def rest(self, seconds: float) -> bool:
        """Wait so long for the answer that keeps the first waiting request; False if there is none."""
        if self._awaited is not None:
            self._awaited.answered.wait(seconds)
        return self._awaited is not None

    def foresee(self, requests: Iterable[Request], usable: Callable[[Request], int]) -> None:
        """Ask for ``requests``, which will come in soon; ``usable``: how many of their first tokens may come from elsewhere."""
        if time.monotonic() >= self._foresee_at:
            for request in requests:
                self._ask(request, usable(request))

    def drop_answers(self) -> bool:
        """Pages are short: those that answers hold for requests still waiting are let go, for now; whether there were any."""
        self._foresee_at = time.monotonic() + _SHORT_S
        held = 0
        for name, (_, ask) in list(self._asks.items()):
            if ask is not None:
                pages = ask.close()
                held += len(pages)
                self._unused.extend(pages)
                del self._asks[name]
        return held > 0

    def _ask(self, request: Request, count: int) -> Ask | None:
        stay, ask = self._asks.get(request.request_id, (-1, None))
        if stay == request.preemptions:
            return ask
        if stay >= 0:
            self.forget(request)
        count = count // self._page_size * self._page_size
        ask = None
        if count and self._clerk.error is None:
            ask = Ask(request.prompt_ids + request.output_ids if count > len(request.prompt_ids) else request.prompt_ids, count)
            self._clerk.ask(ask)
        self._asks[request.request_id] = (request.preemptions, ask)
        return ask

    def look_up(self, request: Request, count: int) -> tuple[I32, tuple[HostPage, ...]] | None:
        """What the directory has of the first ``count`` tokens of ``request``: whole pages' tokens, and pages held for the caller.

        None: the answer may still come. Nothing, once it has been given or has not come in time.
        """
        ask = self._ask(request, count)
        if ask is not None:
            ask.until = self._until.setdefault(request.request_id, time.monotonic() + PATIENCE_S)
        if ask is not None and not ask.answered.is_set() and not ask.late:
            self._awaited = ask
            return None
        self._asks[request.request_id] = (request.preemptions, None)
        if ask is None or not ask.answered.is_set():
            self.late += ask is not None
            if ask is not None:
                self._unused.extend(ask.close())
            return _NOTHING, ()
        tokens = ask.tokens
        return tokens, ask.close()

    def forget(self, request: Request) -> None:
        """``request`` needs no answer any more: it came in, or it has ended."""
        self._until.pop(request.request_id, None)
        _, ask = self._asks.pop(request.request_id, (-1, None))
        if ask is not None:
            self._unused.extend(ask.close())
