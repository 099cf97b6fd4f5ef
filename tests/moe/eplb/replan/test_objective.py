"""Scores of ranks: tokens, activated experts, seconds; and plans that make them small."""

import numpy as np
import pytest

from rorqual.moe.eplb.api import make_plan
from rorqual.moe.eplb.cost import CostModel
from rorqual.moe.eplb.plan import rank_loads
from rorqual.moe.eplb.planner.objective import Objective, activation, step_seconds
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.validate import validate
from tests.moe.eplb.replan.cases import drift, skewed

_TOPOLOGY = Topology.even(n_slots=288, n_ranks=32, n_nodes=4)


def test_activated_experts_against_drawn_steps() -> None:
    """Tokens choose experts by share, replicas at random: the mean number of slots with a token is the predicted one."""
    random = np.random.default_rng(0)
    topology = Topology.even(n_slots=12, n_ranks=4)
    slots = np.array([[0, 1, 2, 0, 3, 4, 5, 6, 7, 0, 1, 8]])
    share = np.exp(random.standard_normal(9))
    share /= share.sum()
    choices, draws = 60, 4000
    counts = np.zeros((draws, 4))
    drawn = random.multinomial(choices, share, size=draws)
    for expert in range(9):
        places = np.flatnonzero(slots[0] == expert)
        per = np.stack([random.multinomial(n, np.full(len(places), 1 / len(places))) for n in drawn[:, expert]])
        for place, slot in enumerate(places):
            counts[:, topology.rank_of_slot[slot]] += per[:, place] > 0
    expected = Objective(kind="activated").scores(slots, (share * choices)[None], topology)[0]
    np.testing.assert_allclose(expected, counts.mean(0), rtol=0.02)


def test_seconds_are_the_cost_model_of_expected_counts() -> None:
    load, cost = skewed(2, tokens=4096.0), CostModel()
    slots = make_plan(load, _TOPOLOGY).slot_to_expert
    replicas = np.array([np.bincount(row[row >= 0], minlength=256) for row in slots])
    tokens = rank_loads(slots, load, _TOPOLOGY)
    filled = slots >= 0
    chance = np.take_along_axis(activation(load / replicas), slots, 1) * filled
    activated = np.add.reduceat(chance, _TOPOLOGY.first_slot[:-1], axis=1)
    np.testing.assert_allclose(step_seconds(slots, load, _TOPOLOGY, cost), cost.layer_seconds(tokens, activated))
    split = np.take_along_axis(load / replicas, slots, 1) * filled
    np.testing.assert_allclose(step_seconds(slots, load, _TOPOLOGY, cost, split), step_seconds(slots, load, _TOPOLOGY, cost))


def test_the_mean_is_below_every_placement() -> None:
    random = np.random.default_rng(2)
    topology = Topology(slots=(3, 4, 5), nodes=(0, 0, 1), speeds=(1.0, 2.0, 0.5))
    for kind in ("tokens", "activated", "seconds"):
        aim = Objective(kind=kind)
        for _ in range(20):
            load = random.exponential(5.0, (1, 8))
            slots = np.concatenate([random.permutation(8), random.integers(-1, 8, 4)])[None]
            assert aim.scores(slots, load, topology).max(1)[0] >= aim.mean(load, topology)[0] - 1e-12


def test_fewest_activated_experts_beat_even_tokens_in_decode() -> None:
    """Few tokens a step: reading weights is the time, and the plan for tokens reads more of them on its slowest rank."""
    load = skewed(2, tokens=128.0 * 8)
    even, few = make_plan(load, _TOPOLOGY), make_plan(load, _TOPOLOGY, objective="activated")
    seconds = make_plan(load, _TOPOLOGY, objective="seconds")
    scores = [Objective(kind="activated").scores(plan.slot_to_expert, load, _TOPOLOGY).max(1) for plan in (even, few)]
    assert (scores[1] < scores[0]).all() and scores[1].mean() < 0.92 * scores[0].mean()
    assert few.seconds < 0.95 * even.seconds and seconds.seconds <= few.seconds * 1.01
    for plan in (few, seconds):
        assert validate(plan.slot_to_expert, 256, _TOPOLOGY) == []


def test_with_many_tokens_seconds_are_tokens() -> None:
    load = skewed(3, tokens=1e6)
    before = make_plan(load, _TOPOLOGY)
    later = drift(load, 0.1)
    plan = make_plan(later, _TOPOLOGY, previous=before, objective="seconds")
    assert plan.imbalance.max() <= 1.02 + 1e-6
    assert make_plan(later * 7, _TOPOLOGY, previous=before, objective="seconds", steps=7).seconds == pytest.approx(plan.seconds)


def test_a_replan_for_activated_experts() -> None:
    load = skewed(3, tokens=1024.0)
    before = make_plan(load, _TOPOLOGY, objective="activated")
    later = drift(load, 0.5)
    plan = make_plan(later, _TOPOLOGY, previous=before, objective="activated", target=1.05)
    aim = Objective(kind="activated")
    best = aim.mean(later, _TOPOLOGY)
    was, now = (aim.scores(slots, later, _TOPOLOGY).max(1) / best for slots in (before.slot_to_expert, plan.slot_to_expert))
    assert (now <= np.maximum(was, 1.05) + 1e-9).all() and now.mean() < was.mean()


def test_unknown_objective() -> None:
    with pytest.raises(ValueError, match="tokens, activated, seconds"):
        Objective(kind="hops")
