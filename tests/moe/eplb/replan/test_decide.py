"""Budgets, and the decision to move or not."""

import numpy as np
import pytest

from rorqual.moe.eplb.api import make_plan
from rorqual.moe.eplb.cost import CostModel
from rorqual.moe.eplb.load.synth import synth
from rorqual.moe.eplb.load.synth_config import SynthConfig
from rorqual.moe.eplb.planner.objective import step_seconds
from rorqual.moe.eplb.planner.static import plan_static
from rorqual.moe.eplb.replan.tradeoff import tradeoff
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.replan.cases import arrivals, drift, largest, skewed

_TOPOLOGY = Topology.even(n_slots=72, n_ranks=8)


@pytest.fixture(scope="module")
def moved() -> tuple[np.ndarray, np.ndarray]:
    """A load that has drifted, and the placement for what it was."""
    load = skewed(6, 64)
    return drift(load, 0.3), plan_static(load, _TOPOLOGY).slot_to_expert


def test_no_budget_is_exceeded(moved: tuple[np.ndarray, np.ndarray]) -> None:
    load, before = moved
    cost = CostModel()
    free = make_plan(load, _TOPOLOGY, previous=before)
    last = np.inf
    for experts in (0, 1, 2, 5, 10, 20, 40, 400):
        for extra in (0, cost.expert_bytes - 1):
            budget = experts * cost.expert_bytes + extra
            plan = make_plan(load, _TOPOLOGY, previous=before, budget_bytes=budget)
            assert plan.bytes_to_move <= budget
            assert plan.bytes_to_move == arrivals(before, plan.slot_to_expert, _TOPOLOGY).sum() * cost.expert_bytes
        assert plan.imbalance.mean() <= last + 1e-9
        last = plan.imbalance.mean()
        assert ("budget" in plan.reason) == (plan.moved.sum() < free.moved.sum())
    assert last <= free.imbalance.mean() + 1e-9


def test_nothing_moves_where_it_does_not_pay(moved: tuple[np.ndarray, np.ndarray]) -> None:
    load, before = moved
    dear = CostModel(copy_bytes_per_second=1.0)
    plan = make_plan(load, _TOPOLOGY, previous=before, horizon_steps=1000, cost=dear)
    assert plan.moved.sum() == 0
    assert "would not pay" in plan.reason


def test_what_moves_pays(moved: tuple[np.ndarray, np.ndarray]) -> None:
    """Gain of all steps less the time of moving is above 0 and, by its own account, no less than for any other horizon's choice."""
    load, before = moved
    cost, plans = CostModel(), {}
    for horizon in (1, 10, 100, 1000, 100_000):
        plans[horizon] = make_plan(load, _TOPOLOGY, previous=before, horizon_steps=horizon, cost=cost)
    stay = step_seconds(before, load, _TOPOLOGY, cost).sum()

    def net(plan, horizon: int) -> float:
        return (stay - plan.seconds) * horizon - cost.move_seconds(plan.moved)

    for horizon, plan in plans.items():
        assert net(plan, horizon) >= 0
        assert all(net(plan, horizon) >= net(other, horizon) - 1e-9 for other in plans.values())
    moves = [plan.moved.sum() for plan in plans.values()]
    assert moves == sorted(moves) and moves[0] < moves[-1]
    assert "paid back after" in plans[100_000].reason


def test_balance_that_does_not_shorten_the_step_is_not_bought() -> None:
    """Few tokens: reading weights is the time, so that even a large imbalance of tokens is left alone."""
    load = np.array([[4.0, 4.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]])
    topology, before = Topology.even(n_slots=8, n_ranks=2), np.arange(8)[None]
    cost = CostModel(token_seconds=1e-9, expert_seconds=1e-5)
    assert make_plan(load, topology, previous=before, cost=cost).imbalance[0] < largest(before, load, topology)[0]
    kept = make_plan(load, topology, previous=before, cost=cost, horizon_steps=10)
    assert kept.moved.sum() == 0


def test_within_the_target_nothing_happens() -> None:
    load = skewed(4, 64)
    before = plan_static(load, _TOPOLOGY)
    plan = make_plan(drift(load, 0.001), _TOPOLOGY, previous=before)
    assert plan.kept.all() and plan.bytes_to_move == 0
    assert plan.reason.startswith("nothing moves: no rank is above the target")


def test_the_tradeoff_is_a_pareto_front(moved: tuple[np.ndarray, np.ndarray]) -> None:
    load, before = moved
    trades = tradeoff(load, _TOPOLOGY, before, points=8)
    assert 3 <= len(trades) <= 8
    assert trades[0].moves == 0 and trades[-1].imbalance < 1.02
    for less, more in zip(trades, trades[1:], strict=False):
        assert less.moves < more.moves and less.imbalance > more.imbalance and less.move_seconds <= more.move_seconds
    for trade in trades:
        assert trade.moves == arrivals(before, trade.slots, _TOPOLOGY).sum()
        assert trade.imbalance == pytest.approx(largest(trade.slots, load, _TOPOLOGY).mean())
    with pytest.raises(ValueError, match="2 points"):
        tradeoff(load, _TOPOLOGY, before, points=1)


def test_a_replayed_trace_gains_what_its_moves_cost() -> None:
    """Domains come and go, popularity wanders: each window is planned on the one before, and moving is charged."""
    trace = synth(SynthConfig(n_layers=4, n_experts=64, n_steps=240, tokens=2048, domains=("a", "b"), dwell=60.0, drift=0.5, seed=3))
    cost, width = CostModel(), 20
    windows = [trace.counts[at : at + width].sum(0).astype(float) for at in range(0, trace.n_steps, width)]
    start = make_plan(windows[0], _TOPOLOGY, steps=width).slot_to_expert
    each = 2000  # steps that a window stands for

    def spent(horizon: int | None) -> tuple[float, int]:
        slots, total, moves = start, 0.0, 0
        for seen, served in zip(windows, windows[1:], strict=False):
            if horizon != 0:
                plan = make_plan(seen, _TOPOLOGY, previous=slots, steps=width, horizon_steps=horizon, cost=cost)
                moved = arrivals(slots, plan.slot_to_expert, _TOPOLOGY)
                slots, total, moves = plan.slot_to_expert, total + cost.move_seconds(moved), moves + int(moved.sum())
            total += each * step_seconds(slots, served / width, _TOPOLOGY, cost).sum()
        return total, moves

    still, live, always = spent(0), spent(each), spent(None)
    assert live[0] < 0.97 * still[0]
    assert live[0] < 1.01 * always[0] and live[1] <= 1.1 * always[1]
