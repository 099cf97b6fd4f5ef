"""Replays: what is played adds up, what moves is charged, and nothing moves that does not pay."""

from dataclasses import replace

import numpy as np
import pytest

from rorqual.moe.eplb.assess import arrivals
from rorqual.moe.eplb.cost import CostModel
from rorqual.moe.eplb.load.synth import synth
from rorqual.moe.eplb.load.synth_config import SynthConfig
from rorqual.moe.eplb.simulation.replay import floor, simulate
from rorqual.moe.eplb.simulation.rules import POLICIES, Rules
from rorqual.moe.eplb.simulation.step import step_cost
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.trace import LoadTrace

MACHINE = Topology.even(n_slots=40, n_ranks=8, n_nodes=2)
COST = CostModel(expert_bytes=1000, token_seconds=1e-6, expert_seconds=1e-6, fixed_seconds=1e-6, copy_bytes_per_second=1e7)
RULES = Rules(interval=10, window=10, bytes_per_step=3000, cost=COST)


@pytest.fixture(scope="module")
def trace():
    return synth(SynthConfig(n_layers=4, n_experts=32, top_k=4, n_steps=50, tokens=512, drift=0.5, seed=1))


@pytest.fixture(scope="module")
def outcomes(trace):
    return {found.policy: found for found in simulate(trace, MACHINE, rules=RULES)}


def test_times_add_up(trace, outcomes):
    least = floor(trace, MACHINE, RULES)
    for found in outcomes.values():
        assert len(found.seconds) == trace.n_steps and (found.seconds >= found.moving).all()
        assert found.mean_seconds > least
        assert found.rank_loads.sum() == pytest.approx(trace.counts.sum())
        assert found.tokens_per_second == pytest.approx(trace.tokens.sum() / found.seconds.sum())
    for step in (0, 9, 30):
        played = step_cost(trace.counts[step], outcomes["none"].slots, MACHINE, COST)
        assert outcomes["none"].seconds[step] == pytest.approx(played.seconds)
        assert outcomes["none"].imbalance[step] == pytest.approx(played.imbalance)


def test_all_policies_are_the_same_until_the_first_plan(outcomes):
    for found in outcomes.values():
        assert (found.seconds[:10] == outcomes["none"].seconds[:10]).all() and not found.moved_bytes[:10].any()


def test_moves_are_charged_where_steps_wait(trace, outcomes):
    found = outcomes["static"]
    (decision,) = found.decisions
    coming = arrivals(outcomes["none"].slots, found.slots, trace.n_experts, MACHINE)
    assert decision.step == 10 and decision.experts == coming.sum() > 0
    assert found.moving[10] == pytest.approx(coming.sum(0).max() * 1000 / 1e7)
    assert not found.moving[11:].any() and found.moved_bytes.sum() == decision.bytes == coming.sum() * 1000
    assert outcomes["none"].decisions == () and not outcomes["none"].moving.any()


def test_a_live_move_takes_steps_and_delays_them_by_its_drag(trace):
    (found,) = simulate(trace.select(np.arange(20)), MACHINE, ["live"], rules=replace(RULES, bytes_per_step=1500, drag=0.25))
    (decision,) = found.decisions
    busy = np.flatnonzero(found.moving)
    assert busy[0] == 10 and len(busy) > 2 and (found.moving <= 0.25 * 1500 / 1e7 + 1e-15).all()
    assert found.moved_bytes.sum() <= decision.bytes
    (free,) = simulate(trace.select(np.arange(20)), MACHINE, ["live"], rules=replace(RULES, bytes_per_step=10**9, drag=0.0))
    assert free.moved_bytes.sum() == free.decisions[0].bytes and free.moved_bytes[10] and not free.moving.any()
    assert free.imbalance[11:].mean() < free.imbalance[:11].mean()


def test_re_plans_move_less_than_plans_from_nothing_and_balance_helps(outcomes):
    summaries = {name: found.summary() for name, found in outcomes.items()}
    assert summaries["incremental"]["moved_bytes"] < 0.6 * summaries["eplb"]["moved_bytes"]
    for name in ("static", "incremental", "live"):
        assert summaries[name]["step_ms_second_half"] < summaries["none"]["step_ms_second_half"]
        assert summaries[name]["imbalance_second_half"] < summaries["none"]["imbalance_second_half"]
    assert set(summaries) == set(POLICIES)


def test_balance_alone_is_not_a_win(trace):
    slow = replace(RULES, cost=replace(COST, copy_bytes_per_second=1e4))
    none, eplb, incremental = simulate(trace, MACHINE, ["none", "eplb", "incremental"], rules=slow)
    assert eplb.imbalance[20:].mean() < none.imbalance[20:].mean() and eplb.mean_seconds > 2 * none.mean_seconds
    assert incremental.mean_seconds <= none.mean_seconds * 1.001 and incremental.decisions


def test_a_balanced_load_is_left_alone():
    counts = np.full((30, 2, 32), 20)
    trace = LoadTrace(counts=counts, layer_ids=(0, 1))
    for found in simulate(trace, Topology.even(n_slots=32, n_ranks=8), ["incremental", "live"], rules=RULES):
        assert not found.moved_bytes.any() and (found.imbalance == 1.0).all()
        assert found.decisions and all(one.experts == 0 and one.layers == 0 and one.reason for one in found.decisions)
        assert found.tokens_per_second is None


def test_rest_and_planning_time_are_added(trace):
    (plain,) = simulate(trace, MACHINE, ["static"], rules=RULES)
    (more,) = simulate(trace, MACHINE, ["static"], rules=replace(RULES, rest_seconds=0.5, plan_seconds=2.0))
    extra = more.seconds - plain.seconds
    assert extra[10] == pytest.approx(2.5) and np.delete(extra, 10) == pytest.approx(0.5)


def test_a_start_that_is_given_is_used_and_progress_is_told(trace, outcomes):
    seen = []
    (found,) = simulate(trace, MACHINE, ["none"], rules=RULES, start=outcomes["static"].slots, progress=seen.append)
    assert seen == [1] * 50 and (found.slots == outcomes["static"].slots).all()
    assert found.imbalance.mean() < outcomes["none"].imbalance.mean()


def test_a_skewed_load_is_balanced_within_a_bounded_number_of_steps_and_steps_become_as_much_faster():
    steady = synth(SynthConfig(n_layers=4, n_experts=32, top_k=4, n_steps=40, tokens=65536, noise=0.0, domain_share=0.0))
    none, live = simulate(steady, MACHINE, ["none", "live"], rules=RULES)
    balanced = np.flatnonzero(live.imbalance.mean(1) < 1.05)
    moving = np.flatnonzero(live.moved_bytes)
    assert none.imbalance.min() > 1.2 and moving[0] == 10 and balanced[0] == moving[-1] + 1 <= 25
    assert (live.imbalance[balanced[0] :].mean(1) < 1.05).all()
    gained = none.seconds[balanced[0] :].mean() / live.seconds[balanced[0] :].mean()
    assert gained == pytest.approx(none.imbalance[balanced[0] :].mean() / live.imbalance[balanced[0] :].mean(), rel=0.02)
    assert live.seconds[-10:].mean() < 1.05 * floor(steady, MACHINE, RULES)


def test_replicas_chosen_by_load_make_the_busiest_rank_lighter(trace, outcomes):
    (found,) = simulate(trace, MACHINE, ["static"], rules=replace(RULES, water=True))
    assert (found.slots == outcomes["static"].slots).all()
    assert found.imbalance[11:].mean() < outcomes["static"].imbalance[11:].mean() - 0.01
    assert found.rank_loads.sum() == pytest.approx(trace.counts.sum())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policies": ["none", "best"]}, "unknown policy 'best'; known are: none, eplb"),
        ({"rules": Rules(interval=50)}, "the trace has 50 steps and the first plan is made after 50"),
        ({"start": np.zeros((3, 40), dtype=np.int64)}, r"need \(4, 40\)"),
        ({"topology": Topology.even(n_slots=31, n_ranks=8)}, "32 experts do not fit into 31"),
        ({"topology": Topology.even(n_slots=41, n_ranks=8), "policies": ["eplb"]}, "ranks of equal size"),
    ],
)
def test_wrong_arguments(trace, change, message):
    with pytest.raises(ValueError, match=message):
        simulate(trace, **{"topology": MACHINE, "policies": ["none"], "rules": RULES, **change})


@pytest.mark.parametrize("change", [{"interval": 0}, {"drag": 1.5}, {"bytes_per_step": 0}, {"rest_seconds": -1.0}])
def test_wrong_rules(change):
    with pytest.raises(ValueError, match="simulate: "):
        Rules(**change)
