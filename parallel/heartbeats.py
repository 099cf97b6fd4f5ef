"""What every rank of a job last told of itself through the store, and which ranks are behind or silent."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from .last_words import table
from .progress import Progress, describe

LOST_STALE_S = 3.0  # a peer of a lost connection counts as dead after this long without a heartbeat
SILENT_STALE_S = 60.0  # any peer does after this long, or the deadline if that is shorter


class Heartbeats:
    """This rank's heartbeat and the last ones of its peers. One thread calls ``read``; any thread may ask.

    Stores are those of a job with its prefix; every thread has its own.
    """

    def __init__(self, progress: Progress, world_size: int, *, deadline_s: float, interval_s: float) -> None:
        """``deadline_s``: of collectives. ``interval_s``: from one ``read`` to the next. Both in seconds."""
        self.hosts: tuple[str, ...] = ()  # label of every rank's host, once the ranks have met
        self.silent_limit_s = min(deadline_s, SILENT_STALE_S)  # seconds after which a silent peer is missing whoever waits for it
        self._progress = progress
        self._interval_s = interval_s
        self._peers = [rank for rank in range(world_size) if rank != progress.rank]
        self._records: dict[int, dict[str, Any]] = {}  # the last heartbeat of each peer
        self._changed: dict[int, float] = {}  # monotonic seconds at which it last changed
        self._beat = 0
        self._reader = 0  # the thread that reads them

    def publish(self, store: Store) -> None:
        """Tell what this rank is doing."""
        store.set(f"beat/{self._progress.rank}", self._progress.encode(self._beat))
        self._beat += 1

    def read(self, store: Store) -> None:
        """Take in what the peers have told."""
        self._reader = threading.get_ident()
        known = [rank for rank in self._peers if rank in self._records or store.check([f"beat/{rank}"])]
        now = time.monotonic()
        for rank, raw in zip(known, store.multi_get([f"beat/{rank}" for rank in known]) if known else (), strict=True):
            record = json.loads(raw)
            if record["beat"] != self._records.get(rank, {}).get("beat"):
                self._changed[rank] = now
            self._records[rank] = record

    def leaving(self) -> list[int]:
        """Peers whose last heartbeat says that a signal asked them to end."""
        return [rank for rank, record in dict(self._records).items() if record.get("leaving")]

    def silence(self, rank: int) -> float:
        """Seconds since the heartbeat of ``rank`` changed; 0 if it was never heard of."""
        now = time.monotonic()
        return now - self._changed.get(rank, now)

    def silent(self) -> list[int]:
        """Peers without a heartbeat for ``silent_limit_s``, and a little longer: theirs may be on its way."""
        return [rank for rank in dict(self._changed) if self.silence(rank) > self.silent_limit_s + 2 * self._interval_s]

    def summary(self) -> str:
        """The last heartbeat of every peer, a line each; empty if there was none."""
        records = dict(self._records)
        return table(records, self.silence) if records else ""

    def find_missing(self, group: str, peers: Sequence[int], waited_s: float, lost: bool) -> dict[int, str]:
        """The ranks among ``peers`` that are dead or entered fewer collectives of ``group`` than this rank, and what each did last.

        A lone peer is missing by definition. ``waited_s``: seconds that this rank has waited for them. ``lost`` says that a
        connection broke: then a peer is dead, or failed first; that shows within seconds, which this call takes.
        """
        if lost:
            end = time.monotonic() + LOST_STALE_S + 4 * self._interval_s
            while time.monotonic() < end:
                dead = {rank: self._obituary(rank) for rank in peers if self.silence(rank) > LOST_STALE_S}
                if dead:
                    return dead
                time.sleep(0.1)
        elif waited_s < 3 * self._interval_s and threading.get_ident() != self._reader:
            time.sleep(2 * self._interval_s)  # heartbeats are as old as that: let them catch up with a short wait
        behind = [rank for rank in peers if len(peers) == 1 or self._is_behind(rank, group)]
        silent = [rank for rank in self._peers if self.silence(rank) > LOST_STALE_S]  # the others wait for these themselves
        return {rank: self._obituary(rank) for rank in silent or behind}

    def _is_behind(self, rank: int, group: str) -> bool:
        record = self._records.get(rank)
        if record is None:
            return True
        calls = int(record["calls"].get(group, 0))
        return calls < self._progress.calls.get(group, 0) or self.silence(rank) > self.silent_limit_s

    def _obituary(self, rank: int) -> str:
        silence = self.silence(rank)
        state = describe(self._records.get(rank))
        where = f"on {self.hosts[rank]}, " if len(set(self.hosts)) > 1 else ""
        return f"{where}no heartbeat for {silence:.1f} s, then {state}" if silence > LOST_STALE_S else f"{where}{state}"
