"""How many requests may wait, and when one that was refused may come again."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_REMEMBERED = 256  # ends from which the rate is taken
_LONGEST_S = 60.0


@dataclass(frozen=True, kw_only=True)
class TooMany:
    """Why a request is refused for now."""

    text: str
    retry_after_s: float


class QueueLimit:
    """``seats`` completions run at once in all replicas, and ``most_waiting`` more may wait."""

    def __init__(self, *, seats: int, most_waiting: int) -> None:
        self._seats = seats
        self._most_waiting = most_waiting
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)  # monotonic seconds of the last ones that ended

    @property
    def most(self) -> int:
        """Completions that may be open."""
        return self._seats + self._most_waiting

    def ended(self, now: float) -> None:
        """A completion has ended."""
        self._ends.append(now)

    def refuses(self, n_open: int, n: int) -> TooMany | None:
        """None when ``n`` more completions beside ``n_open`` are welcome."""
        if n_open + n <= self.most:
            return None
        waiting = max(0, n_open - self._seats)
        text = f"{waiting} completions wait already and at most {self._most_waiting} may (max_queued_requests); {n} more do not fit now"
        return TooMany(text=text, retry_after_s=self._retry_after(n_open + n - self.most))

    def _retry_after(self, excess: int) -> float:
        """Whole seconds in which about ``excess`` completions end, as they did lately; 1 to 60."""
        if len(self._ends) < 2 or self._ends[-1] <= self._ends[0]:
            return 1.0
        rate = (len(self._ends) - 1) / (self._ends[-1] - self._ends[0])
        return float(min(_LONGEST_S, max(1.0, math.ceil(excess / rate))))
