"""One question to the directory: which leading pages of a prompt are there. Asked by the scheduler, answered by the clerk."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

import numpy as np

from ...attention.kv.ids import HostPage
from ..plan import I32

#: seconds that the first waiting request waits for an answer; without one it is computed
PATIENCE_S = 1.0


class Ask:
    """``count`` leading tokens of ``known`` are asked for. The answer is either taken or given back, whichever comes first."""

    def __init__(self, known: Sequence[int], count: int) -> None:
        self._known, self._count = known, count
        self.answered = threading.Event()
        self.tokens: I32 = np.zeros(0, dtype=np.int32)  # of whole pages that were found
        self.pages: tuple[HostPage, ...] = ()  # held for whoever takes them
        self.until = math.inf  # time.monotonic() from which nobody waits for it any more
        self._lock = threading.Lock()
        self._over = False

    def load(self) -> I32:
        """int32 [count]: the tokens asked for."""
        return np.array(self._known[: self._count], dtype=np.int32)

    @property
    def late(self) -> bool:
        """Nobody waits for the answer any more."""
        return time.monotonic() >= self.until

    def answer(self, tokens: I32, pages: tuple[HostPage, ...]) -> bool:
        """Give the answer; False: nobody wants it, and ``pages`` stay the caller's to release."""
        with self._lock:
            if not self._over:
                self.tokens, self.pages = tokens, pages
                self.answered.set()
            return not self._over

    def close(self) -> tuple[HostPage, ...]:
        """End it; the pages of an answer that has come are the caller's now."""
        with self._lock:
            self._over = True
            pages, self.pages = self.pages, ()
        return pages
