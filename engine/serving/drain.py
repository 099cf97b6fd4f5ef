"""Signals of a serving rank: the first asks it to drain, a later one to abort."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from ...parallel.progress import Progress

#: a terminal, torchrun and a batch system may each pass on the same request to end
_SAME_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Counts requests to end while it is entered, instead of dying of them. Without effect outside the main thread."""

    def __init__(self, progress: Progress, *, for_good: bool = False) -> None:
        """
        Args:
            progress: of this rank; tells the others of the first signal.
            for_good: this process ends when it is left in good order. A signal that comes a moment later than to other ranks, which
                have ended the job meanwhile, is ignored then: it must not make a failure of it.
        """
        self._progress = progress
        self._for_good = for_good
        self.count = 0  # requests to end so far
        self.reason = ""  # of the last
        self.descriptor = -1  # can be read after a signal
        self._last = 0.0
        self._old: dict[signal.Signals, Any] = {}
        self._old_descriptor = -1
        self._write = -1

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.count and now - self._last < _SAME_S:
            return
        self.count, self._last, self.reason = self.count + 1, now, signal.Signals(number).name
        self._progress.leaving = True

    def clear(self) -> None:
        """Empty the descriptor."""
        try:
            while os.read(self.descriptor, 512):
                pass
        except (BlockingIOError, OSError):
            pass

    def __enter__(self) -> Signals:
        self.descriptor, self._write = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write, False)
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._note) for number in _SIGNALS}
            self._old_descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._progress.leaving = False
        if self._old:
            signal.set_wakeup_fd(self._old_descriptor)
            for number, handler in self._old.items():
                signal.signal(number, signal.SIG_IGN if self._for_good and kind is None else handler)
        os.close(self.descriptor)
        os.close(self._write)
