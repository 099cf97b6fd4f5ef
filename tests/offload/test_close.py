"""The end of an engine with offloading, and the waits that the watchdog has to see."""

from __future__ import annotations

import pytest

from rorqual.engine.offload.mover import Mover
from rorqual.engine.offload.tier_counts import TierCounts
from rorqual.engine.plan import StepPlan
from tests.offload.engines import PROMPTS, make, params


def test_groups_are_left_and_the_pool_is_closed_when_the_device_has_failed(monkeypatch):
    llm, left = make("host"), []
    engine = llm.engine
    monkeypatch.setattr(type(engine.grid), "close", lambda self, **more: left.append(engine._host_pool.closed))

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.runner.streams, "settle", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        llm.close()
    assert left == [True]
    llm.close()


def test_a_fault_of_the_last_steps_is_raised_at_the_end(monkeypatch):
    monkeypatch.setattr(Mover, "after", lambda self, plan: self.counts.step())  # nothing is copied to the host
    monkeypatch.setattr(TierCounts, "confirm", lambda self, step: None)  # as on a rank that tells no tokens
    llm = make("host")
    llm.generate(PROMPTS[-1:], params(4), use_tqdm=False)
    with pytest.raises(RuntimeError, match="KV offload: layer 0"):
        llm.close()
    assert llm.engine._host_pool.closed


def test_waits_for_the_device_have_the_deadline_of_the_watchdog(monkeypatch):
    llm, waits = make("host"), []
    runner, progress = llm.engine.runner, llm.engine.grid.progress

    def note(*args):
        waits.append((progress.op, progress.since > 0))

    monkeypatch.setattr(runner.mover, "shared", True)
    monkeypatch.setattr(runner.mover, "settle", note)
    monkeypatch.setattr(StepPlan, "n_moves", 1)
    runner.before_sharing(StepPlan(step=0))
    monkeypatch.setattr(runner.mover.counts, "verify", note)
    monkeypatch.setattr(runner.streams, "settle", note)
    llm.close()
    assert waits == [("copies to the host pool", True), ("counters of the device", True), ("end of the device's work", True)]
