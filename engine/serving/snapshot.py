"""The engine in numbers once a second: what rank 0 knows of requests, and what the leaders tell of their replicas.

``wire.Snapshot.replicas`` has one dict for each DP rank:

- ``dp_rank``; ``age``: seconds since its leader told the rest of it (None: not yet)
- ``requests``: see ``Meter.replica``
- ``leader``: see ``Gauge.read`` (what is running, pages, steps, tiers, bytes); {} before the first report

and ``wire.Snapshot.engine``:

- ``refused``: requests that were not taken, by HTTP status
- ``experts``: balance over EP ranks, see ``expert_balance.balance``; None where nothing is counted
- ``expert_counts``: choices of each expert in ten seconds, see ``expert_balance.pack``; None where nothing is counted
- ``uptime``: seconds since the engine was ready
- whatever else rank 0 adds to ``Reporter.extra``, such as ``routing``
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .expert_balance import added, balance
from .log_lines import LogLines
from .meter import Meter
from .wire import Snapshot

#: seconds from one snapshot to the next, while anything happens and while nothing does
BUSY_S, IDLE_S = 1.0, 5.0


class Reporter:
    """Rank 0's: gathers the numbers, says when a snapshot is due, and writes the periodic log lines."""

    def __init__(self, meter: Meter, dp: int, *, log_every_s: float = 10.0, say: Callable[[str], None] | None = None) -> None:
        """
        Args:
            meter: of all requests.
            dp: replicas.
            log_every_s: seconds between log lines while anything happens; 0: none.
            say: takes a log line; by default the logger "rorqual" at level INFO.
        """
        self.extra: dict[str, Any] = {}  # more numbers of the engine, plain values only; changed at any time by rank 0
        self._meter = meter
        self._reports: list[dict[str, Any]] = [{} for _ in range(dp)]
        self._taken: list[float | None] = [None] * dp  # when each came
        self._heat: list[dict[str, Any]] = [{} for _ in range(dp)]  # packed counts of experts; they come less often
        self._started = self._next = time.monotonic()
        self._seen: object = None  # what changes whenever anything happens
        self._sent = 0.0
        self._lines = LogLines(log_every_s, say)

    def take(self, dp_rank: int, report: dict[str, Any]) -> None:
        """The leader of a replica has told its numbers."""
        self._reports[dp_rank], self._taken[dp_rank] = report, time.monotonic()
        if report.get("expert_counts"):
            self._heat[dp_rank] = report["expert_counts"]

    def due(self, now: float | None = None) -> Snapshot | None:
        """A snapshot when it is time for one: after a second, or five in which nothing happened; None otherwise. Cheap to ask.

        ``now``: ``time.monotonic()``, if it is known.
        """
        now = time.monotonic() if now is None else now
        if now < self._next:
            return None
        self._next = now + BUSY_S
        mark = self._mark()
        if mark == self._seen and now - self._sent < IDLE_S:
            return None
        self._seen, self._sent = mark, now
        snapshot = self.snapshot(now)
        self._lines.feed(snapshot, now)
        return snapshot

    def _mark(self) -> object:
        steps = tuple((report.get("steps"), report.get("running"), report.get("waiting")) for report in self._reports)
        return self._meter.activity, steps

    def snapshot(self, now: float | None = None) -> Snapshot:
        """All numbers of this moment."""
        now = time.monotonic() if now is None else now
        replicas = []
        for rank, (report, taken) in enumerate(zip(self._reports, self._taken, strict=True)):
            leader = {name: value for name, value in report.items() if name not in ("expert_loads", "expert_counts")}
            age = None if taken is None else now - taken
            replicas.append({"dp_rank": rank, "age": age, "requests": self._meter.replica(rank), "leader": leader})
        loads = [report["expert_loads"] for report in self._reports if report.get("expert_loads")]
        engine = {**self._meter.all_replicas(), "experts": balance(loads), "expert_counts": added([heat for heat in self._heat if heat])}
        engine |= {"uptime": now - self._started, **self.extra}
        return Snapshot(at=time.time(), replicas=replicas, engine=engine)
