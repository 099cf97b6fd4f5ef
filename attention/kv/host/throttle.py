"""A slower link than the machine has, for copies that the host starts: a stand-in for a network or a CXL switch."""

from __future__ import annotations

import time
from collections.abc import Callable


class Throttle:
    """Lets ``gb_per_s`` through. It cannot slow down loads that the GPU itself makes."""

    def __init__(self, gb_per_s: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> None:
        if not gb_per_s > 0:
            raise ValueError(f"a throttle needs a rate above 0 GB/s, got {gb_per_s}")
        self.gb_per_s, self._clock, self._sleep, self._free_at = gb_per_s, clock, sleep, clock()

    def seconds(self, n_bytes: int) -> float:
        """How long ``n_bytes`` take on the link."""
        return n_bytes / (self.gb_per_s * 1e9)

    def wait(self, n_bytes: int) -> None:
        """Return when ``n_bytes`` more have passed the link."""
        self._free_at = max(self._free_at, self._clock()) + self.seconds(n_bytes)
        rest = self._free_at - self._clock()
        if rest > 0:
            self._sleep(rest)
