"""Pinned memory through which the host and captured decode steps exchange numbers without a call of the driver."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch

from .plan import I64
from .streams import HostCopy, Mark, Streams


class Lanes:
    """``count`` lanes that steps use in turn, each with a block of inputs and the tokens that come back.

    A graph knows its lane from ``counter``, a number on the device that every step raises, so that launching a step is
    writing a lane, one launch and one event. The event guards both ways: a lane is written again only after its last step.
    """

    def __init__(self, streams: Streams, *, block: int, batch: int, count: int = 4) -> None:
        self.count = count
        self.inputs = torch.zeros((count, block), dtype=torch.int64, pin_memory=streams.cuda)  # [lanes, values], for the device to read
        self.tokens = torch.zeros((count, batch), dtype=torch.int64, pin_memory=streams.cuda)  # [lanes, rows], for it to write
        self.counter = torch.zeros(1, dtype=torch.int64, device=streams.device)  # steps so far; the lane is this modulo ``count``
        self.steps = 0  # the same number on the host
        self._streams = streams
        self._host = self.inputs.numpy()
        self._marks = [Mark(None)] * count
        self._copies: list[Callable[[], HostCopy | None]] = [_nothing] * count  # weak: most are read and gone

    def take(self) -> I64:
        """The inputs of the next step, to be written now."""
        lane = self.steps % self.count
        if not self._marks[lane].done:
            self._streams.wait(self._marks[lane])
        self._save(lane)
        block: I64 = self._host[lane]
        return block

    def launched(self, n: int) -> HostCopy:
        """The next step has been launched: its first ``n`` tokens, which are on their way."""
        lane = self.steps % self.count
        self.steps += 1
        mark = self._marks[lane] = self._streams.mark()
        copy = HostCopy(self._streams, self.tokens[lane, :n], mark)
        self._copies[lane] = ref(copy)
        return copy

    def rest(self, block: I64) -> None:
        """Wait until nothing reads the lanes, and put ``block`` into all of them: for runs that belong to no request."""
        self._streams.settle()
        for lane in range(self.count):
            self._save(lane)
        self._host[:, : len(block)] = block

    def resume(self) -> None:
        """After such runs: the device counts from the host's number again, and the lanes are theirs until they are through."""
        self.counter.fill_(self.steps)
        self._marks = [self._streams.mark()] * self.count

    def _save(self, lane: int) -> None:
        """Tokens that nobody has taken yet leave the lane."""
        copy, self._copies[lane] = self._copies[lane](), _nothing
        if copy is not None:
            copy.keep()


def _nothing() -> None:
    return None
