"""One definition of the loads, four published measures: each equals its own formula written out."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.moe.eplb.assess import imbalance as planned_imbalance
from rorqual.moe.eplb.metrics import balance, gini, imbalance
from rorqual.moe.eplb.topology import Topology


def test_published_measures_equal_their_formulas():
    rows = np.random.default_rng(0).gamma(0.7, size=(5, 7, 16))
    flat = rows.reshape(-1, 16)
    found = balance(rows)
    each = [(row.sum() / 16, max(row)) for row in flat]
    assert found.rows == 35 and found.idle == 0
    assert found.mean_over_max == pytest.approx(sum(mean / most for mean, most in each) / 35)
    assert found.means_over_maxima == pytest.approx(sum(mean for mean, _ in each) / sum(most for _, most in each))
    assert found.excess == pytest.approx(sum((most - mean) / mean for mean, most in each) / 35)
    assert found.imbalance == pytest.approx(sum(most / mean for mean, most in each) / 35) == pytest.approx(found.excess + 1)
    assert found.worst == pytest.approx(max(most / mean for mean, most in each))
    assert found.cv == pytest.approx(np.mean([np.std(row) / np.mean(row) for row in flat]))
    pairs = [np.abs(row[:, None] - row[None]).mean() / (2 * row.mean()) for row in flat]
    assert found.gini == pytest.approx(np.mean(pairs))
    assert found.jain == pytest.approx(np.mean([row.sum() ** 2 / (16 * (row**2).sum()) for row in flat]))
    assert imbalance(rows) == pytest.approx((flat.max(1) / flat.mean(1)).reshape(5, 7))


def test_the_measures_disagree_where_layers_differ():
    """Two layers, one perfect and one with everything on one of two ranks: why a tool has to print all of them."""
    found = balance([[10.0, 10.0], [40.0, 0.0]])
    assert (found.mean_over_max, found.means_over_maxima, found.excess, found.imbalance) == (0.75, 0.6, 0.5, 1.5)
    assert found.gini == pytest.approx(0.25) and found.jain == pytest.approx(0.75)


def test_perfect_balance_and_idle_rows():
    found = balance([[3.0, 3.0, 3.0], [0.0, 0.0, 0.0]])
    assert (found.rows, found.idle) == (1, 1)
    assert (found.imbalance, found.mean_over_max, found.means_over_maxima, found.excess, found.cv) == (1, 1, 1, 0, 0)
    assert found.gini == pytest.approx(0.0) and found.jain == pytest.approx(1.0)
    assert list(imbalance([[3.0, 3.0], [0.0, 0.0]])) == [1.0, 1.0] and list(gini([[0.0, 0.0]])) == [0.0]


def test_failed_ranks_are_left_out_and_speeds_weigh():
    topology = Topology(slots=(1, 1, 1), nodes=(0, 0, 0), failed=frozenset([1]), speeds=(2.0, 1.0, 1.0))
    perfect = balance([[20.0, 0.0, 10.0]], topology)
    assert perfect.imbalance == pytest.approx(1.0) and perfect.cv == pytest.approx(0.0) and perfect.gini == pytest.approx(0.0)
    even = balance([[15.0, 0.0, 15.0]], topology)  # the slow rank needs 15, a perfect split 10
    assert even.imbalance == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        (np.zeros((2, 3)), "nothing was routed"),
        ([[1.0, -1.0]], "negative"),
        ([[1.0, np.nan]], "finite"),
        (np.zeros((0, 4)), "at least one row"),
    ],
)
def test_what_cannot_be_measured_is_refused(loads, message):
    with pytest.raises(ValueError, match=message):
        balance(loads)


def test_a_topology_of_another_size_is_refused():
    with pytest.raises(ValueError, match="4 ranks and the topology 2"):
        balance(np.ones((1, 4)), Topology.even(n_slots=4, n_ranks=2))


def test_planners_measure_alike():
    """Plans carry the same imbalance that ``balance`` reports, speeds and failed ranks included."""
    rng = np.random.default_rng(3)
    topology = Topology(slots=(2, 3, 1, 2), nodes=(0, 0, 1, 1), failed=frozenset([2]), speeds=(1.0, 0.5, 1.0, 2.0))
    loads = rng.gamma(1.0, size=(9, 4)) * np.array([1, 1, 0, 1])
    assert planned_imbalance(loads, topology) == pytest.approx(imbalance(loads, topology))
    assert planned_imbalance(np.zeros((2, 4)), topology).tolist() == imbalance(np.zeros((2, 4)), topology).tolist() == [1.0, 1.0]
