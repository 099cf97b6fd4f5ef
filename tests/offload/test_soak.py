"""A few seconds of what ``tests.offload.soak`` does for as long as one likes."""

from __future__ import annotations

import os

import pytest

from tests.offload import soak as soaking
from tests.offload.engines import make
from tests.offload.soak import OVER, POOL, Soak, soak


@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_oversubscription_with_random_aborts(policy):
    totals = soak(4.0, policy, phase=1.0)
    assert totals["requests"] >= 8 and totals["dropped"] > 0 and totals["rows unwritten"] == 0
    assert totals["least oversubscription"] >= OVER


@pytest.mark.parametrize("held", [(1 << 30, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["memory", "thread", "file"])
def test_what_grows_is_a_failure(held):
    with make("host", max_total_tokens=POOL) as llm:
        run = Soak(llm, 0)
        assert run.pool_tokens == POOL
        run.held = [(9, 9, 9)] * 3
        run.report()
        run.held.append(tuple(9 + more for more in held))
        with pytest.raises(AssertionError, match="held after each phase"):
            run.report()


def test_a_request_that_does_not_end_is_a_failure(monkeypatch):
    monkeypatch.setattr(soaking, "DEADLINE_S", 0.5)
    with make("host", max_total_tokens=POOL) as llm:
        run = Soak(llm, 0)
        monkeypatch.setattr(type(run.live), "step", lambda self: os.sched_yield())
        with pytest.raises(AssertionError, match="requests do not end"):
            run.phase(30.0)
