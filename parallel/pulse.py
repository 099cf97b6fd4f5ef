"""Whether the thread that talks to the job's store still gets answers: its calls have no deadline when a network goes away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pulse:
    """A second thread that counts the time without a ``beat``, and calls ``lost`` when it is too long.

    Time counts in short pieces, each at most twice the interval: an interpreter that was held up as a whole (while weights are
    read, say) is no silence of the store.
    """

    def __init__(self, limit_s: float, interval_s: float, lost: Callable[[float], None]) -> None:
        self._limit_s = limit_s
        self._interval_s = interval_s
        self._lost = lost
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="rorqual-pulse", daemon=True)
        self.silent_s = 0.0  # seconds without a beat, as last looked at; written by the thread alone

    def start(self) -> None:
        """Begin to count."""
        self._thread.start()

    def beat(self) -> None:
        """The store answered."""
        self._beats += 1

    def stop(self) -> None:
        """End the count."""
        self._ended.set()

    def _loop(self) -> None:
        seen, at = self._beats, time.monotonic()
        while not self._ended.wait(self._interval_s):
            now = time.monotonic()
            beats = self._beats
            self.silent_s = self.silent_s + min(now - at, 2 * self._interval_s) if beats == seen else 0.0
            seen, at = beats, now
            if self.silent_s > self._limit_s:
                self._lost(self.silent_s)
                return
