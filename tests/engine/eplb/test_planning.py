"""What the first rank says of the load, when it moves nothing, and what it plans at random."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from rorqual.engine.eplb.planning import Planner, take_look
from rorqual.engine.eplb.tables import WaysWriter
from rorqual.engine.eplb_settings import EPLBSettings
from rorqual.moe.eplb.cost import CostModel
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.validate import validate
from rorqual.moe.placement import Placement
from rorqual.moe.ways import Ways

TOPOLOGY = Topology.even(n_slots=10, n_ranks=2)
START = np.array([[0, 1, 2, 3, -1, 4, 5, 6, 7, -1]] * 2)
HOT = np.array([[700.0, 100, 100, 100, 100, 100, 100, 100], [100.0] * 8])


def planner(steps: int = 10, cost: CostModel | None = None, **settings) -> Planner:
    return Planner(EPLBSettings(**settings), TOPOLOGY, cost or CostModel(), window_steps=lambda: steps)


def test_a_look_has_vllms_numbers():
    look = take_look(HOT, START, TOPOLOGY, 10)
    assert look.avg_tokens == (700 + 400) / 10 and look.max_tokens == (1000 + 400) / 10
    assert look.balancedness == pytest.approx(1100 / 1400)
    assert look.imbalance == pytest.approx((1000 / 700 + 1) / 2) and look.worst == pytest.approx(1000 / 700)
    assert "avg 110.0 and max 140.0 tokens a rank and step over 10 steps, balancedness 0.786" in look.summary()


def test_a_plan_that_pays_is_made_and_its_promise_is_kept_in_mind(caplog):
    plan, cheap = planner(log_balancedness=True, log_balancedness_interval=2), CostModel(copy_bytes_per_second=1e18, token_seconds=1e-3)
    plan._cost = cheap
    with caplog.at_level(logging.INFO, logger="rorqual"):
        first = plan(HOT, START)
        assert not validate(first.slot_to_expert, 8, TOPOLOGY) and first.kept.tolist() == [0, 1]
        second = plan(HOT, first.slot_to_expert)
        third = plan(HOT, second.slot_to_expert)
    assert second.kept.all() and third.kept.all() and np.array_equal(third.slot_to_expert, first.slot_to_expert)
    assert [record.message for record in caplog.records if "promised" in record.message] == []
    assert len([record for record in caplog.records if record.message.startswith("EPLB: avg")]) == 2  # of three looks
    assert plan.last is not None and plan.last.predicted is None and plan.last.imbalance < 1.03 and plan.looks == 3
    again = planner()
    again._cost = cheap
    moved = again(HOT, START)
    again(HOT, moved.slot_to_expert)
    assert again.last is not None and again.last.predicted == pytest.approx(again.last.imbalance)


def test_what_does_not_pay_is_declined_with_the_reason():
    found = planner(cost=CostModel(copy_bytes_per_second=1.0), horizon_steps=5)(HOT, START)
    assert found.kept.all() and np.array_equal(found.slot_to_expert, START) and found.reason
    idle = planner()(np.zeros((2, 8)), START)
    assert idle.kept.all() and idle.reason == "no token was routed in the window"


def test_random_plans_are_valid_and_differ():
    plan, slots, changed = planner(policy="random"), START, 0
    for _ in range(300):
        found = plan(HOT, slots)
        assert validate(found.slot_to_expert, 8, TOPOLOGY, duplicates=False) == []
        changed += not found.kept.all()
        slots = found.slot_to_expert
    assert changed > 200 and not np.array_equal(slots, START)


@pytest.mark.parametrize("near", [True, False])
def test_tables_follow_the_new_places(near):
    placement = Placement.of(np.stack([START[0]] * 3), n_experts=8, n_ranks=2)
    ways = Ways.static(placement, source=0)
    writer = WaysWriter(ways, TOPOLOGY, n_experts=8, source=0, layer_ids=(1, 2), near=near)
    address, before = ways.table.data_ptr(), ways.table.clone()
    rows = np.array([[7, 1, 2, 3, 0, 4, 5, 6, 7, -1]])
    writer.write([1], writer.deal([1], rows))
    assert ways.table.data_ptr() == address and torch.equal(ways.table[:2], before[:2]) and writer.writes == 1
    assert set(ways.table[2, 0].tolist()) == {4} and set(ways.table[2, 7].tolist()) == ({0} if near else {0, 8})
