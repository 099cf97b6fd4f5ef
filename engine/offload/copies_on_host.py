"""Which copies to the host are finished for certain, so that other processes may read or write their pages."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..plan import I32
from ..streams import Mark


class CopiesOnHost:
    """Copies in the order of their plans. For calls of one thread at a time; nothing waits."""

    def __init__(self) -> None:
        self._running: deque[tuple[int, Mark, I32]] = deque()  # plan, its end, logical pages it reads

    def started(self, step: int, mark: Mark, pages: I32) -> None:
        """Plan ``step`` has launched copies of logical ``pages`` that end at ``mark``."""
        self._running.append((step, mark, pages))

    def done(self, step: int) -> bool:
        """Whether all copies of plans up to ``step`` have ended."""
        self._pass()
        return not self._running or self._running[0][0] > step

    def involves(self, pages: I32) -> bool:
        """Whether a copy that may not have ended reads one of ``pages``."""
        self._pass()
        return len(pages) > 0 and any(np.isin(pages, read).any() for _, _, read in self._running)

    def _pass(self) -> None:
        while self._running and self._running[0][1].done:
            self._running.popleft()
