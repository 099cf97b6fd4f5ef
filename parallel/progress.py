"""What this rank is doing right now: the record that its heartbeat publishes and that failure messages are made of."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Progress:
    """Counters of one rank, written by its main thread and read by its watchdog thread (single words: no lock).

    ``step`` is set by the engine. ``calls`` counts the collectives of each group, so that two ranks of a group can be
    compared: the one with the smaller count is behind.
    """

    rank: int  # global rank
    step: int = 0  # the engine's step number
    calls: dict[str, int] = field(default_factory=dict)  # collectives entered so far, per group name
    op: str = ""  # the last collective entered
    group: str = ""  # its group
    peers: Sequence[int] = ()  # the ranks it is with
    batch: Callable[[], str] | None = None  # says what is being run; set by the engine with every step
    since: float = 0.0  # monotonic seconds at which the host began to wait in it; 0 while it is not waiting
    leaving: bool = False  # a signal asked this rank to end; published, so that a rank that can end the job in good order does
    find_missing: Callable[[str, Sequence[int], float, bool], dict[int, str]] | None = None  # the watchdog's, if there is one

    def enter(self, group: str, op: str, peers: Sequence[int]) -> None:
        """The main thread begins collective ``op`` of ``group``."""
        self.calls[group] = self.calls.get(group, 0) + 1
        self.resume(group, op, peers)

    def resume(self, group: str, op: str, peers: Sequence[int]) -> None:
        """The main thread waits for something begun earlier, or for one peer: not a new call of the group."""
        self.op = op
        self.group = group
        self.peers = peers
        self.since = time.monotonic()

    def leave(self) -> None:
        """The main thread is out of it."""
        self.since = 0.0

    @contextmanager
    def waiting(self, group: str, op: str, peers: Sequence[int]) -> Iterator[None]:
        """Around a host wait for device work (an event, a stream): the watchdog then applies the deadline to it too."""
        self.resume(group, op, peers)
        try:
            yield
        finally:
            self.leave()

    def waiting_s(self) -> float:
        """Seconds spent in the present collective; 0 outside of one."""
        since = self.since
        return time.monotonic() - since if since else 0.0

    def _describe_batch(self) -> str:
        try:
            return "" if self.batch is None else self.batch()
        except Exception as error:  # no word about the batch is worth the heartbeat that carries it
            return f"unknown ({type(error).__name__}: {error})"

    def record(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "step": self.step,
            "calls": dict(self.calls),
            "op": self.op,
            "group": self.group,
            "waiting_s": self.waiting_s(),
            "batch": self._describe_batch(),
            "leaving": self.leaving,
        }

    def encode(self, beat: int) -> str:
        """The record as JSON."""
        return json.dumps({"beat": beat, **self.record()})


def describe(record: dict[str, Any] | None) -> str:
    """One phrase about a peer's published record."""
    if not record:
        return "never heard of"
    if not record["op"]:
        return f"at step {record['step']}, before its first collective"
    waiting = float(record["waiting_s"])
    verb = f"waiting {waiting:.1f} s in" if waiting >= 0.1 else "in" if waiting else "last out of"
    return f"at step {record['step']}, {verb} {record['op']} of group {record['group']}"
