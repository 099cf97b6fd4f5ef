"""Rows shared out among layers, and hot buffers that begin with what prefill chose."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.launch.bench.kv.budgets import SIZES, layer_profiles, miss_curve, share_out
from rorqual.launch.bench.kv.policies import lru
from rorqual.launch.bench.kv.traces import PUBLISHED, scaled, steps
from rorqual.launch.bench.kv.warm_start import first_misses, seed

TRACE = list(steps(scaled(PUBLISHED, context=2048, k=64), 60))


def test_a_curve_falls():
    curve = miss_curve(TRACE, lru, warm_up=20)
    assert len(curve) == len(SIZES) and (np.diff(curve) <= 0).all() and curve[0] > curve[-1]


def test_equal_layers_get_equal_shares_and_gain_nothing():
    curve = np.array([30.0, 23.0, 19.0, 13.0, 11.0, 9.0, 6.0, 4.0, 3.0])
    split = share_out([curve] * 4, mean_size=2.0)
    assert split.shared_out <= split.equal + 1e-9
    assert sum(split.sizes) == pytest.approx(8.0)


def test_rows_go_where_they_save_most():
    flat, steep = np.full(len(SIZES), 5.0), np.array([40.0, 30.0, 25.0, 18.0, 12.0, 8.0, 2.0, 1.0, 1.0])
    split = share_out([flat, steep], mean_size=2.0)
    assert split.sizes[0] == 1.0 and split.sizes[1] == pytest.approx(3.0)
    assert split.shared_out == pytest.approx((5.0 + 8.0) / 2) and split.equal == pytest.approx((5.0 + 18.0) / 2)


def test_profiles_are_of_different_kinds():
    profiles = layer_profiles(1024, 32)
    assert len({p.noise for p in profiles}) == len(profiles) and all(p.k == 32 and p.context == 1024 for p in profiles)


def test_a_seed_holds_the_newest_choices_first():
    begin = seed(TRACE, 3, 80)
    assert len(begin) == len(set(begin.tolist())) == 80
    assert set(begin[:64].tolist()) == set(TRACE[-1].chosen.tolist())


def test_first_misses_fall_with_the_window():
    oldest, one, eight = (first_misses(TRACE, window, 128) for window in (0, 1, 8))
    assert oldest > 80.0 and 20.0 < one < 40.0 and eight < min(25.0, one)
