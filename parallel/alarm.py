"""The first error of a job: it stands in the store, and every rank ends because of it, saying whose it was."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import Store

from .heartbeats import Heartbeats
from .last_words import last_words
from .progress import Progress

_ACK_WAIT_S = 3.0  # how long the first to fail waits for the others to have noticed
_STAND_BACK_S = 1.5  # how long the others wait before they end

#: rank, step and text of an error
First = dict[str, Any]


class Alarm:
    """Rings for a failure of this rank, and ends this process for one of another.

    Stores are those of the job with its prefix. Every thread brings a connection of its own: a client blocks while it waits, and a
    thread that shared the main thread's could not end a rank that waits in there.
    """

    def __init__(self, progress: Progress, peers: Sequence[int], beats: Heartbeats) -> None:
        self._progress = progress
        self._peers = tuple(peers)
        self._beats = beats
        self._stop_lock = threading.Lock()

    def ring(self, store: Store, error: str, *, said: str, instead: str = "") -> None:
        """Make ``error`` the job's first and print ``said``, then wait a moment for the others to see it.

        Where another rank was first, print ``instead``, if there is something, and end this process.
        """
        first = self._record(store, {"rank": self._progress.rank, "step": self._progress.step, "error": error})
        if first is not None and first["rank"] != self._progress.rank:
            if instead:
                self.say(instead)
            self._stop_because(store, first)
        self.say(said)
        self.tell_state(everybody=True)
        with suppress(RuntimeError):
            self._await_acks(store)

    def heard(self, store: Store) -> bool:
        """Whether an error stands in the store; one of another rank ends this process."""
        if not store.check(["error"]):
            return False
        first: First = json.loads(store.get("error"))
        if first["rank"] != self._progress.rank:
            self._stop_because(store, first)
        return True

    def _record(self, store: Store, record: First) -> First | None:
        """The job's first error, which is ``record`` if there was none; None if the store is gone."""
        try:
            first: First = json.loads(store.compare_set("error", "", json.dumps(record)))
            return first
        except RuntimeError:
            return None

    def _await_acks(self, store: Store) -> None:
        end = time.monotonic() + _ACK_WAIT_S
        waiting = list(self._peers)
        while waiting and time.monotonic() < end:
            waiting = [rank for rank in waiting if not store.check([f"ack/{rank}"])]
            time.sleep(0.05)

    def _stop_because(self, store: Store, first: First) -> None:
        """End this process, naming the first error of the job. Does not return."""
        with self._stop_lock:
            self.say(f"stopping because rank {first['rank']} failed first, at step {first['step']}: {first['error']}")
            self.tell_state()
            with suppress(RuntimeError):
                store.set(f"ack/{self._progress.rank}", "1")
            time.sleep(_STAND_BACK_S)  # let the first to fail print its traceback and be the first to end
            self.end()

    def stop(self, why: str) -> None:
        """End this process, which cannot hear of the others. Does not return."""
        self.say(f"stopping because {why}")
        self.tell_state()
        self.end()

    def say(self, text: str) -> None:
        """A line on stderr, with this rank's number; nothing where stderr is closed."""
        with suppress(OSError, ValueError):
            print(f"rank {self._progress.rank}: {text}", file=sys.stderr, flush=True)

    def tell_state(self, everybody: bool = False) -> None:
        """Print what this rank was doing; and what the others were, as far as it knows."""
        self.say(last_words(self._progress))
        if everybody and (others := self._beats.summary()):
            self.say(others)

    def end(self) -> None:
        """End this process with exit code 1, whatever its other threads do."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
