"""One definition of the loads, four published measures: each equals its own formula written out."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.moe.eplb.assess import assess
from rorqual.moe.eplb.choice.water import water_fill
from rorqual.moe.eplb.cost import CostModel
from rorqual.moe.eplb.metrics import balance, gini, imbalance
from rorqual.moe.eplb.simulation.step import floor_seconds, step_cost
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


def test_imbalance_is_slowest_time_over_the_time_of_a_perfect_split():
    """Written out rank by rank, speeds and failed ranks included; only the ratios of speeds mean anything."""
    topology = Topology(slots=(2, 3, 1, 2), nodes=(0, 0, 1, 1), failed=frozenset([2]), speeds=(1.0, 0.5, 1.0, 2.0))
    loads = np.random.default_rng(3).gamma(1.0, size=(9, 4)) * np.array([1, 1, 0, 1])
    wanted = [max(row[0], row[1] / 0.5, row[3] / 2.0) / (row.sum() / 3.5) for row in loads]
    assert imbalance(loads, topology) == pytest.approx(wanted)
    assert balance(loads, topology).imbalance == pytest.approx(np.mean(wanted))
    assert imbalance(np.zeros((2, 4)), topology).tolist() == [1.0, 1.0]
    quicker = Topology(slots=(2, 3, 1, 2), nodes=(0, 0, 1, 1), failed=frozenset([2]), speeds=(10.0, 5.0, 7.0, 20.0))
    assert imbalance(loads, quicker) == pytest.approx(wanted)


def test_seconds_depend_on_the_ratios_of_speeds_only():
    """A plan, a simulated step and the floor of it price a rank of mean speed, whatever the scale of the speeds."""
    slots, counts = np.array([[0, 1, 2, 3]]), np.array([[4000, 4000, 2000, 2000]])
    cost = CostModel(fixed_seconds=0.0)
    for scale in (1.0, 30.0):
        topology = Topology(slots=(1, 1, 1, 1), nodes=(0,) * 4, speeds=tuple(scale * speed for speed in (4.0, 4.0, 2.0, 2.0)))
        wanted = 3000 * cost.token_seconds  # 12000 tokens shared by speed over 4 ranks
        assert assess(slots, counts.astype(float), topology, cost=cost).seconds == pytest.approx(wanted)
        assert step_cost(counts, slots, topology, cost).seconds == pytest.approx(wanted)
        assert floor_seconds(counts, topology, cost) == pytest.approx(wanted)


def test_no_step_is_faster_than_the_floor_where_a_slow_rank_has_failed():
    rng = np.random.default_rng(0)
    topology = Topology(slots=(2, 2, 2), nodes=(0,) * 3, failed=frozenset([0]), speeds=(0.2, 1.0, 1.0))
    slots = np.array([[-1, -1, 0, 1, 2, 3]])
    for _ in range(20):
        counts = rng.integers(0, 3000, (1, 4))
        assert step_cost(counts, slots, topology, CostModel()).seconds >= floor_seconds(counts, topology, CostModel()) * (1 - 1e-12)


def test_the_bound_of_a_chosen_split_is_one():
    """Replicas that share a rank with the largest may be as light as one likes, so only the largest replica bounds such a plan."""
    topology = Topology.even(n_slots=4, n_ranks=2)
    load, slots = np.array([[5.0, 5.0, 2.0]]), np.array([[0, 2, 1, 2]])
    chosen = assess(slots, load, topology, split=np.array([[5.0, 1.0, 5.0, 1.0]]))
    assert chosen.imbalance[0] == pytest.approx(1.0) and chosen.bound[0] <= chosen.imbalance[0] + 1e-12
    random = np.random.default_rng(1)
    for _ in range(50):
        load = random.lognormal(0.0, 1.5, (1, 3))
        split = water_fill(load, slots, topology)
        found = assess(slots, load, topology, split=split)
        assert found.bound[0] <= found.imbalance[0] + 1e-9
