"""Virtual ranks of this process, one thread each, that meet as real ranks do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from .....comm.dispatcher import Dispatcher, EPSpec
from .....comm.virtual import VirtualRanks
from .party import Party, require


class _Meeting:
    """Where ``size`` threads bring values and take those of all. One that waits longer than ``limit_s`` breaks it for all."""

    def __init__(self, size: int, device: torch.device, limit_s: float) -> None:
        self.size, self.device = size, device
        self.results: list[Any] = [None] * size
        self.errors: list[BaseException] = []
        self.broken = False
        self._barrier = threading.Barrier(size, timeout=limit_s)
        self._board: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        self._board[rank] = value
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()
        return found

    def make(self, rank: int, spec: EPSpec) -> Dispatcher:
        """The dispatcher of one rank; rank 0 makes those of all, and its ValueError is that of all."""
        specs = self.gather(rank, spec)
        made: Any = None
        if rank == 0:
            try:
                made = VirtualRanks.make(specs, device=self.device)
            except ValueError as error:
                made = error
        made = self.gather(rank, made)[0]
        if isinstance(made, ValueError):
            raise ValueError(*made.args)
        dispatcher: Dispatcher = made.ranks[rank]
        return dispatcher

    def run(self, rank: int, work: Callable[[Party], Any]) -> None:
        """In the thread of ``rank``."""
        party = Party(
            backend="virtual", rank=rank, size=self.size, device=self.device, node_of=(0,) * self.size,
            make=lambda spec: self.make(rank, spec), gather=lambda values: self.gather(rank, values),
        )  # fmt: skip
        try:
            self.results[rank] = work(party)
        except threading.BrokenBarrierError:
            self.broken = True  # by another rank's error, which counts, or by one that did not come
        except BaseException as error:
            self.errors.append(error)
            self._barrier.abort()


def in_threads(size: int, work: Callable[[Party], Any], *, device: torch.device | None = None, limit_s: float = 120.0) -> list[Any]:
    """``work`` for each of ``size`` virtual ranks of this process, one thread each -> results by rank.

    Raises:
        CheckFailed: a rank did not end, or not come to a meeting with the others, within ``limit_s`` seconds.
        BaseException: the first that ``work`` raised.
    """
    meeting = _Meeting(size, device or torch.device("cpu"), limit_s)
    threads = [threading.Thread(target=meeting.run, args=(rank, work), daemon=True) for rank in range(size)]
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()) + 1.0)  # those that wait for a meeting end at the limit
    if meeting.errors:
        raise meeting.errors[0]
    require(not any(thread.is_alive() for thread in threads), f"virtual ranks did not end within {limit_s:g} s")
    require(not meeting.broken, f"virtual ranks did not all meet within {limit_s:g} s")
    return meeting.results
