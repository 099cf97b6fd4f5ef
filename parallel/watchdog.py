"""Heartbeats and the first error of a job: when one rank fails, all end soon, and every message names it.

A thread on every rank publishes what the rank is doing (``Progress``) in the job's key-value store twice a second and
looks there for a failure of another rank. A rank that is blocked inside a collective is ended all the same.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from .failure import collective_error
from .interface import host_label
from .last_words import last_words, table
from .progress import Progress, describe
from .pulse import Pulse
from .store import Rendezvous

_LOST_STALE_S = 3.0  # a peer of a lost connection counts as dead after this long without a heartbeat
_SILENT_STALE_S = 60.0  # any peer does after this long, or the deadline if that is shorter
_OVERDUE_S = 5.0  # backends raise at the deadline; beyond it by this much, the watchdog does
_ACK_WAIT_S = 3.0  # how long the first to fail waits for the others to have noticed
_STAND_BACK_S = 1.5  # how long the others wait before they end
_EXIT_S = 10.0  # a failed rank that has not ended by itself is ended


class Watchdog:
    """This rank's thread. ``find_missing`` and ``report_failure`` may be called from any other thread."""

    def __init__(self, meeting: Rendezvous, prefix: str, progress: Progress, *, deadline_s: float, interval_s: float = 0.5) -> None:
        self.rank = meeting.rank
        self.hosts: tuple[str, ...] = ()  # label of every rank's host, once the ranks have met
        self.closing = False  # set when the job is leaving in good order: a store that goes away is then no error
        self._meeting = meeting
        self._prefix = prefix
        self._progress = progress
        self._deadline_s = deadline_s
        self._interval_s = interval_s
        self._peers = [rank for rank in range(meeting.world_size) if rank != meeting.rank]
        self._records: dict[int, dict[str, Any]] = {}  # the last heartbeat of each peer
        self._changed: dict[int, float] = {}  # monotonic seconds at which it last changed
        self._beat = 0
        self._pulse = Pulse(min(deadline_s, _SILENT_STALE_S) + 4 * interval_s, interval_s, self._store_is_silent)
        self._ended = threading.Event()
        self._stop_lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="rorqual-watchdog", daemon=True)

    def start(self) -> None:
        """Publish the first heartbeat and start the thread."""
        self._meeting.store.set(self._key("beat", self.rank), self._progress.encode(0))
        self._progress.find_missing = self.find_missing
        self._thread.start()
        self._pulse.start()
        atexit.register(self.stop)  # an interpreter that ends under a thread which is in the store's code aborts the process

    def stop(self) -> None:
        """End the thread; the rank is no longer watched."""
        atexit.unregister(self.stop)
        self._progress.find_missing = None
        self._ended.set()
        self._pulse.stop()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * self._interval_s + 1)

    def leave(self) -> None:
        """Tell the others that all there is left to do here is to leave with them."""
        self.closing = True
        with suppress(RuntimeError):
            self._meeting.store.set(self._key("leaves", self.rank), "1")

    def all_leave(self) -> bool:
        """Whether all the others have told so; or the store has gone, with a rank that ran it."""
        try:
            return bool(self._meeting.store.check([self._key("leaves", rank) for rank in self._peers]))
        except RuntimeError:
            return True

    def _key(self, *parts: object) -> str:
        return "/".join((self._prefix, *map(str, parts)))

    # ---- the first error ---------------------------------------------------------------------------------------------

    def report_failure(self, error: BaseException) -> None:
        """Record ``error`` as the job's first, and wait a moment for the others to see it; or, if another rank failed
        before, say so and end this process.
        """
        text = f"{type(error).__name__}: {error}"
        timer = threading.Timer(_EXIT_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        if self._pulse.silent_s > _LOST_STALE_S:
            self._say(f"failed at step {self._progress.step}: {text}")
            self._store_is_silent(self._pulse.silent_s)
        first = self._record_first({"rank": self.rank, "step": self._progress.step, "error": text})
        if first is not None and first["rank"] != self.rank:
            self._say(f"also failed: {text}")
            self._stop_because(first)
        self._say(f"failed first, at step {self._progress.step}: {text}")
        self._tell_state(everybody=True)
        with suppress(RuntimeError):
            self._await_acks()

    def _record_first(self, record: dict[str, Any]) -> dict[str, Any] | None:
        """The job's first error, which is ``record`` if there was none; None if the store is gone."""
        try:
            raw = self._meeting.store.compare_set(self._key("error"), "", json.dumps(record))
            first: dict[str, Any] = json.loads(raw)
            return first
        except RuntimeError:
            return None

    def _await_acks(self) -> None:
        end = time.monotonic() + _ACK_WAIT_S
        waiting = list(self._peers)
        while waiting and time.monotonic() < end:
            waiting = [rank for rank in waiting if not self._meeting.store.check([self._key("ack", rank)])]
            time.sleep(0.05)

    def _stop_because(self, first: dict[str, Any]) -> None:
        """End this process, naming the first error of the job. Does not return."""
        with self._stop_lock:
            self._say(f"stopping because rank {first['rank']} failed first, at step {first['step']}: {first['error']}")
            self._tell_state()
            with suppress(RuntimeError):
                self._meeting.store.set(self._key("ack", self.rank), "1")
            time.sleep(_STAND_BACK_S)  # let the first to fail print its traceback and be the first to end
            self._exit()

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):
            print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)

    def _tell_state(self, everybody: bool = False) -> None:
        """What this rank was doing; and what the others were, as far as it knows."""
        self._say(last_words(self._progress))
        if everybody and self._records:
            self._say(table(dict(self._records), self._silence))

    def _exit(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            store = self._meeting.connect(self._deadline_s)
            while not self._ended.wait(self._interval_s):
                self._publish_and_look(store)
        except RuntimeError as error:
            if not (self._ended.is_set() or self.closing):
                owner = "torchrun" if self._meeting.agent_hosts else "rank 0"
                lost = f"the store on {self._meeting.host}:{self._meeting.port}, run by {owner}, is gone ({str(error).splitlines()[0]})"
                self._say(f"stopping because {lost}")
                self._tell_state()
                self._exit()

    def _store_is_silent(self, seconds: float) -> None:
        """End this process: it can neither tell the others of a failure nor hear of one."""
        if self.closing:
            return
        meeting = self._meeting
        where = f"the store on {meeting.host}:{meeting.port} has not answered for {seconds:.1f} s"
        ours = self.hosts[self.rank] if self.hosts else host_label(meeting.host, meeting.port)
        self._say(f"stopping because {where}: host {meeting.host} is gone, or this host, {ours}, is cut off from it")
        self._tell_state()
        self._exit()

    def _publish_and_look(self, store: Any) -> None:
        self._beat += 1
        store.set(self._key("beat", self.rank), self._progress.encode(self._beat))
        self._pulse.beat()
        if store.check([self._key("error")]):
            first = json.loads(store.get(self._key("error")))
            if first["rank"] != self.rank:
                self._stop_because(first)
            return
        self._read_peers(store)
        if self.closing:
            return
        waited = self._progress.waiting_s()
        if waited > self._deadline_s + _OVERDUE_S:
            progress = self._progress
            self._fail_here(f"no end of {progress.op} within the deadline", progress.op, progress.group, progress.peers)
        silent_s = min(self._deadline_s, _SILENT_STALE_S)
        silent = [rank for rank in self._changed if self._silence(rank) > silent_s + 2 * self._interval_s]
        if silent:
            self._fail_here(f"deadline of {silent_s:g} s for a heartbeat", "heartbeat", "world", silent)

    def _read_peers(self, store: Any) -> None:
        known = [rank for rank in self._peers if rank in self._records or store.check([self._key("beat", rank)])]
        now = time.monotonic()
        for rank, raw in zip(known, store.multi_get([self._key("beat", rank) for rank in known]) if known else (), strict=True):
            record = json.loads(raw)
            if record["beat"] != self._records.get(rank, {}).get("beat"):
                self._changed[rank] = now
            self._records[rank] = record

    def leaving(self) -> list[int]:
        """Peers whose last heartbeat says that a signal asked them to end."""
        return [rank for rank, record in dict(self._records).items() if record.get("leaving")]

    def _silence(self, rank: int) -> float:
        """Seconds since the heartbeat of ``rank`` changed; 0 if it was never heard of."""
        return time.monotonic() - self._changed.get(rank, time.monotonic())

    def _fail_here(self, cause: str, op: str, group: str, peers: Sequence[int]) -> None:
        """Raise the alarm from the thread: the main thread is stuck, or a peer died between collectives."""
        ranks = sorted({*peers, self.rank})
        error = collective_error(cause, op=op, group=group, ranks=ranks, peers=peers, deadline_s=self._deadline_s, progress=self._progress)
        first = self._record_first({"rank": self.rank, "step": self._progress.step, "error": f"{type(error).__name__}: {error}"})
        if first is not None and first["rank"] != self.rank:
            self._stop_because(first)
        self._say(str(error))
        self._tell_state(everybody=True)
        with suppress(RuntimeError):
            self._await_acks()
        self._exit()

    # ---- who is missing ----------------------------------------------------------------------------------------------

    def find_missing(self, group: str, peers: Sequence[int], waited_s: float, lost: bool) -> dict[int, str]:
        """The ranks among ``peers`` that are dead or entered fewer collectives of ``group`` than this rank.

        A lone peer is missing by definition. ``lost`` says that a connection broke: then a peer is dead, or failed
        first; that shows within seconds.
        """
        if lost:
            end = time.monotonic() + _LOST_STALE_S + 4 * self._interval_s
            while time.monotonic() < end:
                dead = {rank: self._obituary(rank) for rank in peers if self._silence(rank) > _LOST_STALE_S}
                if dead:
                    return dead
                time.sleep(0.1)
        elif waited_s < 3 * self._interval_s and threading.current_thread() is not self._thread:
            time.sleep(2 * self._interval_s)  # heartbeats are as old as that: let them catch up with a short wait
        behind = [rank for rank in peers if len(peers) == 1 or self._is_behind(rank, group)]
        silent = [rank for rank in self._peers if self._silence(rank) > _LOST_STALE_S]  # the others wait for these themselves
        return {rank: self._obituary(rank) for rank in silent or behind}

    def _is_behind(self, rank: int, group: str) -> bool:
        record = self._records.get(rank)
        if record is None:
            return True
        calls = int(record["calls"].get(group, 0))
        return calls < self._progress.calls.get(group, 0) or self._silence(rank) > min(self._deadline_s, _SILENT_STALE_S)

    def _obituary(self, rank: int) -> str:
        silence = self._silence(rank)
        state = describe(self._records.get(rank))
        where = f"on {self.hosts[rank]}, " if len(set(self.hosts)) > 1 else ""
        return f"{where}no heartbeat for {silence:.1f} s, then {state}" if silence > _LOST_STALE_S else f"{where}{state}"


class _Watched(Protocol):
    @property
    def watchdog(self) -> Watchdog | None: ...


@contextmanager
def guard(grid: _Watched) -> Iterator[None]:
    """Around everything a rank does: an exception inside becomes the job's first error, and ends all ranks.

    The exception goes on; if this process has not ended ten seconds later, it is ended with exit code 1.
    """
    try:
        yield
    except BaseException as error:
        good_exit = isinstance(error, SystemExit) and error.code in (None, 0)
        if grid.watchdog is not None and not good_exit:
            grid.watchdog.report_failure(error)
        raise
