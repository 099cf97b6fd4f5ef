"""Planted faults of the moves between tiers: the counter of unwritten rows finds them, and the engine stops."""

from __future__ import annotations

import pytest

from rorqual.engine.offload.mover import Mover
from tests.offload.engines import PROMPTS, counters, make, params


def fault_not_copied(monkeypatch):
    monkeypatch.setattr(Mover, "after", lambda self, plan: self.counts.step())


def fault_too_early(monkeypatch):
    """Pages are dropped, and their host pages named, in the plan after their copies were started."""
    monkeypatch.setattr("rorqual.engine.offload.page_book.RIPE_AFTER", 1)


def fault_not_named(monkeypatch):
    before = Mover.before

    def forgetful(self, plan, *, tables):
        plan.host_pages = plan.host_pages[:0]
        before(self, plan, tables=tables)

    monkeypatch.setattr(Mover, "before", forgetful)


@pytest.mark.parametrize("fault", [fault_not_copied, fault_too_early, fault_not_named])
def test_a_host_page_that_is_not_finished_trips_the_counter(fault, monkeypatch):
    fault(monkeypatch)
    with make("host") as llm:
        with pytest.raises(RuntimeError, match="KV offload: layer 0 .* rows that are in no device page and no finished host page"):
            llm.generate(PROMPTS, params(), use_tqdm=False)
        assert counters(llm)["unwritten"] > 0
