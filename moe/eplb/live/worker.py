"""The thread in which a rank plans and moves, one job after another, and what lets it go on only as steps go by."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_TURN_S = 0.0005  # for which the thread keeps the interpreter while others want it; Python's own 5 ms are felt in every step


class _Turns:
    """Makes the interpreter change threads more often while any worker of this process has a job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs = 0
        self._usual = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._jobs += 1
            if self._jobs == 1:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, _TURN_S))

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._jobs -= 1
            if not self._jobs:
                sys.setswitchinterval(self._usual)


_turns = _Turns()


class Gate:
    """Lets pieces of a job pass in order, as many as boundaries have released.

    All ranks release the same numbers at the same boundaries. So after ``shut`` all ranks have let the same pieces pass, and no
    rank is left waiting for one that another does not send.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._released = 0
        self._shut = False

    @property
    def released(self) -> int:
        """Pieces that may pass."""
        return self._released

    def release(self, pieces: int) -> None:
        """Let so many more pass."""
        with self._changed:
            self._released += pieces
            self._changed.notify_all()

    def shut(self) -> None:
        """Release nothing more."""
        with self._changed:
            self._shut = True
            self._changed.notify_all()

    def passes(self, piece: int) -> bool:
        """Wait until piece ``piece`` may pass; False if it never may."""
        with self._changed:
            while self._released <= piece and not self._shut:
                self._changed.wait()
            return self._released > piece


class Job:
    """Work given to the thread: it is waiting, under way, or done with a result or an error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether ``result`` or ``error`` is there."""
        return self._done.is_set()

    def run(self) -> None:
        """In the thread."""
        try:
            self.result = self._work()
        except BaseException as error:  # the main thread finds it, and all ranks are told
            self.error = error
        finally:
            del self._work  # with all that it refers to
            self._done.set()

    def wait(self, deadline: float) -> bool:
        """Until it is done, or until ``deadline`` (monotonic seconds); whether it is done."""
        return self._done.wait(max(0.0, deadline - time.monotonic()))


class Worker:
    """One thread, made at the first job."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._name = name
        self._ended = False  # no job is to come

    def start(self, work: Callable[[], Any]) -> Job:
        """Do ``work`` after all that was started before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        job = Job(work)
        self._jobs.put(job)
        return job

    def close(self, timeout_s: float) -> bool:
        """End the thread after the jobs it has; whether that took less than ``timeout_s``. The second time nothing is waited for."""
        if self._thread is None:
            return True
        if not self._ended:
            self._ended = True
            self._jobs.put(None)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            with _turns:
                job.run()
            del job  # its result may be large
