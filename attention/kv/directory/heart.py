"""A thread that does something every so often, and sooner when asked."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Heart:
    """Calls ``beat`` every ``period_s`` seconds until it is stopped or ``beat`` raises."""

    def __init__(self, beat: Callable[[], None], period_s: float, name: str) -> None:
        self._beat, self._period_s = beat, period_s
        self._wake, self._stopped = threading.Event(), False
        self.error: BaseException | None = None  # what ended it
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Beat soon."""
        self._wake.set()

    def stop(self, timeout_s: float) -> bool:
        """End after the beat in progress; False if that takes longer."""
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._wake.wait(self._period_s)
                self._wake.clear()
                if not self._stopped:
                    self._beat()
        except BaseException as error:
            self.error = error
