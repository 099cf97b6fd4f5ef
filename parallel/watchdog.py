"""A thread on every rank that sees failures of ranks: when one fails, all end soon, and every message names the first error.

It publishes what the rank is doing (``Progress``) in the job's key-value store twice a second and looks there for a failure of
another rank. A rank that is blocked inside a collective, or in the store, is ended all the same.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store

from .alarm import Alarm
from .failure import collective_error
from .heartbeats import LOST_STALE_S, Heartbeats
from .interface import host_label
from .progress import Progress
from .pulse import Pulse
from .store import Rendezvous

_OVERDUE_S = 5.0  # backends raise at the deadline; beyond it by this much, the watchdog does
_EXIT_S = 10.0  # a failed rank that has not ended by itself is ended


class Watchdog:
    """This rank's thread. ``report_failure``, ``leave`` and ``all_leave`` are for the main thread, ``leaving`` for any."""

    def __init__(self, meeting: Rendezvous, prefix: str, progress: Progress, *, deadline_s: float, interval_s: float = 0.5) -> None:
        """``prefix``: of the job's keys in the store. ``deadline_s``: of collectives. ``interval_s``: from one look to the next."""
        self.closing = False  # set when the job is leaving in good order: a store that goes away is then no error
        self._meeting = meeting
        self._prefix = prefix
        self._store = meeting.under(prefix)  # of the main thread
        self._progress = progress
        self._deadline_s = deadline_s
        self._interval_s = interval_s
        self._peers = [rank for rank in range(meeting.world_size) if rank != meeting.rank]
        self._beats = Heartbeats(progress, meeting.world_size, deadline_s=deadline_s, interval_s=interval_s)
        self._alarm = Alarm(progress, self._peers, self._beats)
        self._pulse = Pulse(self._beats.silent_limit_s + 4 * interval_s, interval_s, self._store_is_silent)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="rorqual-watchdog", daemon=True)

    def start(self) -> None:
        """Publish the first heartbeat and start the thread."""
        self._beats.publish(self._store)
        self._progress.find_missing = self._beats.find_missing
        self._thread.start()
        self._pulse.start()
        atexit.register(self.stop)  # an interpreter that ends under a thread which is in the store's code aborts the process

    def stop(self) -> None:
        """End the thread, and with it the watch."""
        atexit.unregister(self.stop)
        self._progress.find_missing = None
        self._ended.set()
        self._pulse.stop()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * self._interval_s + 1)

    def know_hosts(self, hosts: tuple[str, ...]) -> None:
        """The ranks have met: messages name the host of a rank, of which ``hosts`` has the labels by rank."""
        self._beats.hosts = hosts

    def leave(self) -> None:
        """Tell the others that all there is left to do here is to leave with them."""
        self.closing = True
        with suppress(RuntimeError):
            self._store.set(f"leaves/{self._progress.rank}", "1")

    def all_leave(self) -> bool:
        """Whether all the others have told so; or the store has gone, with a rank that ran it."""
        try:
            return bool(self._store.check([f"leaves/{rank}" for rank in self._peers]))
        except RuntimeError:
            return True

    def leaving(self) -> list[int]:
        """Peers whose last heartbeat says that a signal asked them to end."""
        return self._beats.leaving()

    def report_failure(self, error: BaseException) -> None:
        """Record ``error`` as the job's first, and wait a moment for the others to see it; or, if another rank failed
        before, say so and end this process.
        """
        text = f"{type(error).__name__}: {error}"
        timer = threading.Timer(_EXIT_S, os._exit, (1,))
        timer.daemon = True
        timer.start()
        if self._pulse.silent_s > LOST_STALE_S:
            self._alarm.say(f"failed at step {self._progress.step}: {text}")
            self._store_is_silent(self._pulse.silent_s)
        said = f"failed first, at step {self._progress.step}: {text}"
        self._alarm.ring(self._store, text, said=said, instead=f"also failed: {text}")

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:  # with a time that leaves the error to it: it takes up to three times that, and the pulse waits no longer than the limit
            store = PrefixStore(self._prefix, self._meeting.connect(self._beats.silent_limit_s / 4))
        except ValueError as error:
            return self._store_is_gone(error)
        try:
            while not self._ended.wait(self._interval_s):
                self._publish_and_look(store)
        except RuntimeError as error:
            self._store_is_gone(error)

    def _publish_and_look(self, store: Store) -> None:
        self._beats.publish(store)
        self._pulse.beat()
        if self._alarm.heard(store):
            return
        self._beats.read(store)
        if self.closing:
            return
        progress = self._progress
        if progress.waiting_s() > self._deadline_s + _OVERDUE_S:
            self._fail_here(store, f"no end of {progress.op} within the deadline", progress.op, progress.group, progress.peers)
        if silent := self._beats.silent():
            self._fail_here(store, f"deadline of {self._beats.silent_limit_s:g} s for a heartbeat", "heartbeat", "world", silent)

    def _fail_here(self, store: Store, cause: str, op: str, group: str, peers: Sequence[int]) -> None:
        """Raise the alarm from the thread: the main thread is stuck, or a peer died between collectives. Does not return."""
        ranks = sorted({*peers, self._progress.rank})
        error = collective_error(cause, op=op, group=group, ranks=ranks, peers=peers, deadline_s=self._deadline_s, progress=self._progress)
        self._alarm.ring(store, f"{type(error).__name__}: {error}", said=str(error))
        self._alarm.end()

    def _store_is_gone(self, error: Exception) -> None:
        """End this process, unless it is leaving: whoever ran the store has ended."""
        if self._ended.is_set() or self.closing:
            return
        owner = "torchrun" if self._meeting.agent_hosts else "rank 0"
        where = f"the store on {self._meeting.host}:{self._meeting.port}, run by {owner}"
        self._alarm.stop(f"{where}, is gone ({str(error).splitlines()[0]})")

    def _store_is_silent(self, seconds: float) -> None:
        """End this process, unless it is leaving: it can neither tell the others of a failure nor hear of one."""
        if self.closing:
            return
        meeting, hosts = self._meeting, self._beats.hosts
        where = f"the store on {meeting.host}:{meeting.port} has not answered for {seconds:.1f} s"
        ours = hosts[meeting.rank] if hosts else host_label(meeting.host, meeting.port)
        self._alarm.stop(f"{where}: host {meeting.host} is gone, or this host, {ours}, is cut off from it")


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
