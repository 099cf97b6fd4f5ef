"""A member's place in a store: connections, lease, lock of the living, heartbeat."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from .connection import Connection
from .errors import DirectoryBusy, DirectoryError
from .heart import Heart
from .host import Deadline
from .layout import DirectoryLayout
from .limits import DirectoryLimits
from .liveness import LivenessFile, live_path
from .members import Members
from .schema import prepare, store_files
from .store import Store


class Session:
    """Two connections: one for the engine's calls, behind a lock, and one for heartbeats, which run beside them."""

    def __init__(
        self, path: Path, layout: DirectoryLayout, live: LivenessFile, connections: list[Connection], member: int, limits: DirectoryLimits
    ) -> None:
        """Not for callers: see ``open``."""
        self.path, self.member, self.limits = path, member, limits
        self.store = Store(connections[0], layout, limits.lease)
        self._members = Members(connections[0], live, limits.lease)
        self._beating = Members(connections[1], live, limits.lease)
        self._live, self._connections = live, connections
        self._lock, self._beat_lock = threading.Lock(), threading.Lock()
        self._heart: Heart | None = None
        self._process, self._closed = os.getpid(), False

    @classmethod
    def open(cls, path: Path, layout: DirectoryLayout, pool_id: str, name: str, limits: DirectoryLimits) -> Session:
        """Join as a new member; errors as ``Directory.open``. Nothing stays open after one."""
        deadline = Deadline(limits.opening)
        with contextlib.ExitStack() as undo:
            live = LivenessFile.opening(live_path(path), deadline)
            undo.callback(live.close)
            first = prepare(path, layout, pool_id, live, deadline)
            undo.callback(first.close)
            second = Connection(path, deadline)
            undo.callback(second.close)
            member = Members(first, live, limits.lease).join(name, deadline)
            undo.pop_all()
            live.end_opening()
        return cls(path, layout, live, [first, second], member, limits)

    @contextlib.contextmanager
    def entered(self, patient: bool = False) -> Iterator[Deadline]:
        """The store, for one thread; DirectoryBusy if another has it for ``limits.call`` seconds, which is also the block's deadline.

        ``patient``: wait as long as any other thread can have it; for blocks that must happen and wait for nothing themselves.
        """
        self.usable()
        with self._held(self._lock, 20 if patient else 1) as deadline:
            yield deadline

    def usable(self) -> None:
        """ValueError if the member is closed or another process's; DirectoryError if its heartbeat has ended."""
        if self._closed or os.getpid() != self._process:
            raise ValueError(f"{self.path}: this member of the prefix directory is closed, or was opened by another process; open it again")
        if self._heart is not None and self._heart.error is not None:
            raise DirectoryError(f"{self.path}: the heartbeat has ended: {self._heart.error}") from self._heart.error

    def start_heart(self, beat: Callable[[], None]) -> None:
        """Call ``beat`` four times a lease, from a thread; a store that is locked at the time is no error."""

        def once() -> None:
            with contextlib.suppress(DirectoryBusy):
                beat()

        self._heart = Heart(once, self.limits.lease / 4, "prefix-directory")

    def wake_heart(self) -> bool:
        """Beat soon; False if there is no heart."""
        if self._heart is None:
            return False
        self._heart.wake()
        return True

    def renew(self) -> int:
        """Extend the lease, take dead members apart (how many), trim the log; beside the engine's calls."""
        self.usable()
        with self._held(self._beat_lock) as deadline:
            self._beating.renew(self.member, deadline)
            dead = self._beating.reclaim(self.member, deadline)
            self._connections[1].checkpoint()
        return len(dead)

    def reclaim(self, deadline: Deadline) -> int:
        """Take dead members apart, within a block of ``entered``; how many."""
        return len(self._members.reclaim(self.member, deadline))

    def close(self) -> None:
        """Leave, as far as that is possible now; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return  # a forked child has no part in it
        if self._heart is not None:
            self._heart.stop(self.limits.call + 1.0)
        with contextlib.suppress(DirectoryError), self._held(self._lock) as deadline:
            self._members.leave(self.member, deadline)  # what cannot be given back now is reclaimed when the lease ends
        self._live.close()
        for connection in self._connections:
            connection.close()

    @contextlib.contextmanager
    def _held(self, lock: threading.Lock, times: int = 1) -> Iterator[Deadline]:
        deadline = Deadline(times * self.limits.call)
        if not lock.acquire(timeout=deadline.seconds):
            raise DirectoryBusy(f"another thread's call to the prefix directory took longer than {deadline.seconds:g} s")
        try:
            yield deadline
        finally:
            lock.release()


def remove_unused(path: str | Path, timeout_s: float = 1.0) -> bool:
    """Remove the store at ``path`` and its lock file; False, and nothing is removed, if it has members or is being opened."""
    path = Path(path)
    try:
        live = LivenessFile.opening(live_path(path), Deadline(timeout_s))
    except DirectoryBusy:
        return False
    with contextlib.closing(live):
        if live.any_alive():
            return False
        for name in (*store_files(path), live.path):
            name.unlink(missing_ok=True)
    return True
