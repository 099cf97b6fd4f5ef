"""The simulated hot buffer, against plain models of the same policies."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from rorqual.launch.bench.kv.buffer import simulate
from rorqual.launch.bench.kv.policies import Clock, Plain, all_policies, belady, best, levels, lru
from rorqual.launch.bench.kv.traces import PUBLISHED, Selection, overlap, scaled, steps

K = 64
TRACE = list(steps(scaled(PUBLISHED, context=2048, k=K), 60))


def plain_lru(rows: int) -> float:
    held: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for selection in TRACE:
        chosen = selection.chosen.tolist()
        missed += sum(p not in held for p in chosen)
        for p in chosen:
            held[p] = None
            held.move_to_end(p)
        while len(held) > rows:
            held.popitem(last=False)
    return 100.0 * missed / (K * len(TRACE))


def plain_clock(rows: int) -> float:
    held, used, hand, missed = [-1] * rows, [False] * rows, 0, 0
    for selection in TRACE:
        chosen = set(selection.chosen.tolist())
        now = [p in chosen for p in held]
        used = [u or n for u, n in zip(used, now, strict=True)]
        missing = sorted(chosen - set(held))
        missed += len(missing)
        victims = []
        while len(victims) < len(missing):
            if not now[hand] and hand not in victims:
                if used[hand] and held[hand] >= 0:
                    used[hand] = False
                else:
                    victims.append(hand)
            hand = (hand + 1) % rows
        for row, p in zip(sorted(victims), missing, strict=True):
            held[row], used[row] = p, True
    return 100.0 * missed / (K * len(TRACE))


@pytest.mark.parametrize("rows", [K, 2 * K, 3 * K + 5])
def test_lru_misses_what_a_plain_lru_misses(rows):
    # which of several rows of the same age goes is open, so the later misses differ a little
    assert simulate(TRACE, rows, lru()).missed == pytest.approx(plain_lru(rows), rel=0.03)


def test_clock_misses_what_a_plain_clock_misses():
    assert simulate(TRACE, 2 * K, Clock()).missed == pytest.approx(plain_clock(2 * K), rel=0.05)


def test_a_buffer_of_one_selection_holds_the_last_one():
    for policy in (lru(), best(), Clock(), belady()):
        found = simulate(TRACE, K, policy, warm_up=1)
        assert found.missed == pytest.approx(100.0 * (1.0 - overlap(TRACE)))


def test_nothing_is_fetched_twice_when_all_fits():
    distinct = len(np.unique(np.concatenate([s.chosen for s in TRACE])))
    for number in range(len(all_policies())):
        found = simulate(TRACE, distinct, all_policies()[number])
        assert found.missed == pytest.approx(100.0 * distinct / (K * len(TRACE)))


def test_no_policy_beats_belady_and_scores_beat_lru():
    bound = simulate(TRACE, 2 * K, belady(), warm_up=20).missed
    found = {p.name: simulate(TRACE, 2 * K, p, warm_up=20).missed for p in all_policies()}
    assert min(found.values()) == found["belady"] == bound
    assert found["score"] < found["lru"] < found["fifo"]
    assert found["score, 256 levels"] == pytest.approx(found["score"], abs=0.4)


def test_a_row_of_this_step_never_gives_way():
    class Worst(Plain):
        def __init__(self):
            super().__init__("worst", lambda view: np.where(view.used == view.step, -1.0, 0.0))

        def evicted(self, view, victims):
            assert view.unused[victims].all()

    simulate(TRACE, K + 3, Worst())


def test_prefetch_lowers_misses_and_is_counted():
    plain, ahead = (simulate(TRACE, 2 * K, best(), warm_up=20, prefetch=n) for n in (0, K // 4))
    assert ahead.missed < plain.missed and 0.0 < ahead.prefetched <= 25.0 and plain.prefetched == 0.0


def test_a_start_is_used():
    assert simulate(TRACE[:1], 2 * K, lru()).first == 100.0
    assert simulate(TRACE[:1], 2 * K, lru(), start=TRACE[0].chosen).first == 0.0


def test_levels_of_equal_scores_are_one_level():
    flat = [Selection(np.zeros(100, np.float32), np.arange(n, n + 8)) for n in (0, 8, 16, 24)]
    assert simulate(flat, 16, Plain("levels", levels(16))).missed == 100.0


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="a buffer of 10 rows cannot hold the 64 rows of a step"):
        simulate(TRACE, 10, lru())
    with pytest.raises(ValueError, match="a warm-up of 60 steps leaves nothing"):
        simulate(TRACE, K, lru(), warm_up=60)
