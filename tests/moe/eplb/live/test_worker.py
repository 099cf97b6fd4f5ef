"""The worker thread: it keeps up, lets the interpreter go, and is waited for where it may still be at work."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from rorqual.moe.eplb.live.report import Outcome
from rorqual.moe.eplb.live.worker import Worker
from tests.moe.eplb.live.test_balancer import party
from tests.moe.eplb.live.virtual import Target, with_config


def test_plans_of_cycles_that_were_given_up_are_not_made() -> None:
    """Else planning that takes longer than ``patience`` would fall behind for ever."""
    made, new = party(config=with_config(patience=3), pause=0.01, wait_s=60.0)
    calls, go_on = [], threading.Event()
    made.plan = lambda load, now: calls.append(1) or go_on.wait(20) and Target(slot_to_expert=new)
    for _ in range(200):
        assert "patience 3" in made.cycle().reason
        if calls:  # a busy machine may give up the first cycle before its planning begins
            break
    reasons = [made.cycle().reason for _ in range(5)]
    assert calls == [1] and all("patience 3" in reason for reason in reasons), reasons
    go_on.set()
    made.catch_up()
    assert calls == [1] and made.is_whole()
    made.close()


def test_an_audit_waits_for_a_thread_that_still_sends() -> None:
    made, _ = party(config=with_config(patience=3), pause=0.01, wait_s=60.0)
    made.faults[2] = lambda point: time.sleep(0.5) if point == "send" else None
    assert made.cycle().outcome is Outcome.ABORTED
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda rank: rank.audit(), made.ranks)) == [[]] * 4
    made.close()


def test_the_interpreter_changes_threads_often_while_a_worker_has_a_job() -> None:
    """Steps are launched by another thread: it must not wait 5 ms whenever planning has the interpreter."""
    usual, one, other = sys.getswitchinterval(), Worker("one"), Worker("other")
    go_on = threading.Event()
    held = one.start(lambda: go_on.wait(20) and sys.getswitchinterval())
    assert other.start(lambda: None).wait(time.monotonic() + 20)
    go_on.set()
    assert held.wait(time.monotonic() + 20) and held.result <= 0.001
    assert one.close(20) and other.close(20) and sys.getswitchinterval() == usual


def test_a_thread_that_is_busy_is_left_once_only() -> None:
    worker, go_on = Worker("busy"), threading.Event()
    worker.start(lambda: go_on.wait(20))
    assert not worker.close(0.01)
    begin = time.monotonic()
    assert not worker.close(15.0) and time.monotonic() - begin < 10.0
    go_on.set()
