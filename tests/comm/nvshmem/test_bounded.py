"""Calls into a library that never come back end the process, also when they keep Python's lock."""

from __future__ import annotations

import ctypes
import time

from rorqual.comm.nvshmem import bounded
from rorqual.parallel.group import Group
from rorqual.parallel.progress import Progress
from tests.ranks import collect_ranks


def group(size: int, deadline_s: float) -> Group:
    return Group("ep", range(size), 0, process_group=None, deadline_s=deadline_s, progress=Progress(rank=0))


def hangs() -> None:
    bounded._GRACE_S = 0.5
    with bounded.bounded(group(2, 1.0), "a call"):
        ctypes.PyDLL(None).sleep(60)


def returns() -> str:
    bounded._GRACE_S = 0.2
    ranks = group(2, 0.3)
    with bounded.bounded(ranks, "a call"):
        assert ranks.progress.op == "a call" and ranks.progress.waiting_s() > 0
    assert ranks.progress.waiting_s() == 0
    with bounded.bounded(group(1, 0.0), "alone"):
        time.sleep(1.0)
    return "on time"


def test_a_call_that_hangs_ends_the_process() -> None:
    (end,) = collect_ranks(hangs, 1, timeout=30.0)
    assert end.code == 1 and end.seconds < 20 and "Timeout" in end.stderr and "in hangs" in end.stderr, end


def test_a_call_that_returns_is_left_alone() -> None:
    (end,) = collect_ranks(returns, 1, timeout=30.0)
    assert end.code == 0 and end.result == "on time"
