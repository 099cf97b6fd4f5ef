"""Counters come to the host without a wait, and rows that were never written end the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rorqual.attention.kv.tier import TierCounter
from rorqual.engine.offload.tier_counts import TierCounts
from rorqual.engine.streams import Mark


class SlowStreams:
    """Downloads that arrive when ``arrived`` is set; whoever waits gets them at once."""

    cuda = False

    def __init__(self) -> None:
        self.arrived, self.downloads = False, 0

    def mark(self) -> Mark:
        return Mark(None)

    def wait(self, mark: Mark) -> None:
        assert mark.done

    def download(self, x: torch.Tensor) -> SimpleNamespace:
        self.downloads += 1
        streams = self

        class Mark:
            @property
            def done(self) -> bool:
                return streams.arrived

        return SimpleNamespace(mark=Mark(), wait=lambda: x)


def faulty() -> tuple[TierCounts, SlowStreams, torch.Tensor]:
    counters, streams = torch.zeros(3, len(TierCounter), dtype=torch.int64), SlowStreams()
    counters[:, TierCounter.HITS] = 5
    counters[1, TierCounter.UNWRITTEN] = 7
    return TierCounts(counters, streams), streams, counters


def test_unwritten_rows_are_raised_with_the_first_step_after_their_count_has_come():
    counts, streams, _ = faulty()
    for _ in range(100):
        counts.step()  # nothing has arrived: no wait, no second reading
    assert streams.downloads == 1 and not counts.latest().any()
    streams.arrived = True
    with pytest.raises(RuntimeError, match=r"layer 1 of this rank read 7 rows .* \(7 in all its layers\): tokens of"):
        counts.step()
    counts.step()  # said once
    counts.verify()


def test_a_reading_by_latest_does_not_swallow_the_fault():
    counts, streams, _ = faulty()
    for _ in range(16):
        counts.step()
    streams.arrived = True
    assert counts.latest()[1, TierCounter.UNWRITTEN] == 7
    with pytest.raises(RuntimeError, match="layer 1"):
        counts.step()


def test_verify_waits_for_what_has_been_counted():
    counts, _, counters = faulty()
    with pytest.raises(RuntimeError, match="layer 1"):
        counts.verify()
    counters[1, TierCounter.UNWRITTEN] = 0
    right = TierCounts(counters, SlowStreams())
    right.verify()
    assert "15 hits" in right.summary() and "0 unwritten" in right.summary()


def test_tokens_of_a_watched_step_are_confirmed_by_the_count_of_that_step():
    counters = torch.zeros(3, len(TierCounter), dtype=torch.int64)
    counts = TierCounts(counters, SlowStreams())
    counts.watch(0)
    counts.watch(1)
    counters[2, TierCounter.UNWRITTEN] = 1
    counts.watch(3)
    counts.confirm(1)
    counts.confirm(2)  # was not watched: no row of it could be absent
    with pytest.raises(RuntimeError, match="layer 2"):
        counts.confirm(3)
    assert not counts._watched and len(counts._places) == 3
    for step in range(4, 20):
        counts.watch(step)
        counts.confirm(step)  # said once
    assert len(counts._places) == 3
