"""Planted faults of the moves between tiers: the counter of unwritten rows stops the engine, or tokens are seen to be wrong."""

from __future__ import annotations

import pytest

from rorqual.attention import latents
from rorqual.engine.offload.mover import Mover
from tests.offload.engines import PROMPTS, alone, counters, make, params
from tests.offload.soak import count_steps


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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", [fault_not_copied, fault_too_early, fault_not_named])
def test_a_host_page_that_is_not_finished_trips_the_counter_before_a_token_is_told(fault, overlap, monkeypatch):
    fault(monkeypatch)
    told: dict[int, list[int]] = {}
    with make("host", disable_overlap_schedule=not overlap) as llm:
        with pytest.raises(RuntimeError, match="KV offload: layer 0 .* rows that are in no device page and no finished host page"):
            for chunk in llm.generate_stream(PROMPTS, params()):
                told.setdefault(chunk.prompt_index, []).extend(chunk.token_ids)
        assert counters(llm)["unwritten"] > 0
    assert told and all(tokens == alone(place)[: len(tokens)] for place, tokens in told.items())


# ---- faults that no counter sees: rows are there, but they are others'


def wrong_ids(monkeypatch):
    """Host pages are taken for device pages of the same numbers."""
    after = Mover.after

    def confused(self, plan):
        plan.mirrors[:, 0] = plan.mirrors[:, 1] % self._cache.n_device_pages
        after(self, plan)

    monkeypatch.setattr(Mover, "after", confused)


def wrong_rows(monkeypatch):
    """What resolving says is off by one row."""
    monkeypatch.setattr(latents, "resolve", rolled(latents.resolve))


def rolled(resolve):
    def found(*args, **more):
        rows, copies = resolve(*args, **more)
        return rows.clamp(min=0) + 1, copies

    return found


def stale_hot_rows(monkeypatch):
    """Hot rows of the slot's last request are taken for those of the next."""
    monkeypatch.setattr(Mover, "_lease", lambda self, plan: self._leased.__setitem__(plan.hot_pages[:, 0], plan.hot_pages[:, 2] >= 0))


@pytest.mark.parametrize("fault", [wrong_ids, wrong_rows, stale_hot_rows])
def test_the_comparison_of_tokens_finds_rows_of_others(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, LookupError)):  # what rows of others make of a step is not known
        count_steps(10, 100, "host")  # one phase shows it
