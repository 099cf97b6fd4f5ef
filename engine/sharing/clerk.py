"""Threads that talk to the directory, so that no step waits for it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from ...attention.kv.directory import Directory, DirectoryBusy, DirectoryError, PageHasher, Wanted
from ...attention.kv.ids import HostPage
from .ask import Ask

log = logging.getLogger("rorqual")
#: seconds between two looks at what others want
POLL_S = 0.1

Job = Callable[[], None]


class Clerk:
    """One thread answers questions, in the order asked; the other does all else, and looks around every ``POLL_S``."""

    def __init__(self, directory: Directory, hasher: PageHasher, look: Job) -> None:
        """``look`` is called at every look around, from the second thread."""
        self.directory, self.hasher = directory, hasher
        self.wanted = Wanted(pages=0, first=None)  # as of the last look
        self.looks = 0
        self.error: DirectoryError | None = None  # the first one: the directory has failed
        self.fault: BaseException | None = None  # what ended a thread, which nothing should
        self._look = look
        self._asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        runs = {"prefix-asks": self._answer_all, "prefix-jobs": self._work}
        self._threads = [threading.Thread(target=self._outlive, args=(run,), name=name, daemon=True) for name, run in runs.items()]
        for thread in self._threads:
            thread.start()

    def ask(self, ask: Ask) -> None:
        """Have ``ask`` answered."""
        self._asks.put(ask)

    def do(self, job: Job) -> None:
        """Have ``job`` done, after those before it; it may raise DirectoryError."""
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """End after everything that was asked for so far; False if that takes longer."""
        self._asks.put(None)
        self._jobs.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _outlive(self, run: Job) -> None:
        try:
            run()
        except BaseException as error:
            self.fault = error

    def _answer_all(self) -> None:
        while (ask := self._asks.get()) is not None:
            tokens = ask.load()
            pages: list[HostPage] = []
            if not ask.late:
                hashes = self.hasher.hashes(tokens)
                self._guarded(lambda hashes=hashes, pages=pages: pages.extend(self.directory.match(hashes)))  # type: ignore[misc]
            if not ask.answer(tokens[: len(pages) * self.hasher.page_size], tuple(pages)) and pages:
                self._guarded(lambda pages=pages: self.directory.release(pages))  # type: ignore[misc]

    def _work(self) -> None:
        looked = 0.0
        while True:
            try:
                job = self._jobs.get(timeout=POLL_S)
                if job is None:
                    return
                self._guarded(job)
            except queue.Empty:
                pass
            if time.monotonic() >= looked + POLL_S:
                self._guarded(self._look_around)
                looked = time.monotonic()

    def _look_around(self) -> None:
        self.wanted = self.directory.pressure.wanted()
        self.looks += 1
        self._look()

    def _guarded(self, job: Job) -> None:
        """``job``; a store that is locked just now is no failure."""
        try:
            job()
        except DirectoryBusy:
            pass
        except DirectoryError as error:
            if self.error is None:
                self.error = error
                log.warning("the prefix directory has failed, prefixes are not shared any more: %s", error)
