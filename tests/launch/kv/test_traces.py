"""Traces: what a step chooses, and the locality that was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.launch.bench.kv.traces import HARD, PUBLISHED, TraceConfig, overlap, scaled, steps, top


def small(config: TraceConfig, count: int = 40, seed: int = 0):
    return list(steps(scaled(config, context=4096, k=128, seed=seed), count))


def test_a_step_chooses_its_highest_scores_in_order():
    for number, selection in enumerate(small(PUBLISHED, 6)):
        assert len(selection.scores) == 4096 + number
        assert len(selection.chosen) == 128 and (np.diff(selection.chosen) > 0).all()
        rest = np.delete(selection.scores, selection.chosen)
        assert selection.scores[selection.chosen].min() >= rest.max()


def test_the_first_and_the_last_tokens_are_chosen():
    for selection in small(PUBLISHED, 6):
        assert {0, 1, 2, 3, len(selection.scores) - 1} <= set(selection.chosen.tolist())


def test_a_seed_gives_the_same_trace_and_another_one_another():
    a, b, c = (small(HARD, 4, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(x.scores, y.scores) for x, y in zip(a, b, strict=True))
    assert not np.array_equal(a[3].chosen, c[3].chosen)


def test_locality_is_as_published():
    assert overlap(small(PUBLISHED)) == pytest.approx(0.70, abs=0.03)
    hard = small(HARD)
    assert 0.35 <= overlap(hard) <= 0.50
    assert overlap(hard, shift=1) > overlap(hard) + 0.03


def test_top_takes_the_highest():
    assert top(np.array([3.0, 1.0, 2.0, 5.0], np.float32), 2).tolist() == [0, 3]


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="a trace chooses 1 to 10 of 10 positions, found k = 11"):
        TraceConfig(name="x", context=10, k=11)
    with pytest.raises(ValueError, match="slow_keep is a correlation"):
        TraceConfig(name="x", slow_keep=1.0)
