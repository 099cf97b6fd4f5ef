import numpy as np
import pytest

from rorqual.moe.eplb.api import make_plan
from rorqual.moe.eplb.locality.routing import Gate, make_router
from rorqual.moe.eplb.locality.soft import plan_local
from rorqual.moe.eplb.planner.slack import plan_slack
from rorqual.moe.eplb.replan.coverage import losses
from rorqual.moe.eplb.topology import Topology

GATE = Gate(n_experts=32, top_k=4, n_groups=8, topk_groups=4)
TOPOLOGY = Topology.even(n_slots=40, n_ranks=8, n_nodes=4)


@pytest.fixture(scope="module")
def routing():
    return make_router(n_layers=3, gate=GATE, seed=1).sample(1024)


def test_public_entry_plans_with_slack(routing):
    plan = make_plan(routing.load, TOPOLOGY, objective="slack")
    assert (plan.slot_to_expert == plan_slack(routing.load, TOPOLOGY).slot_to_expert).all()
    drifted = routing.load * np.exp(0.3 * np.random.default_rng(2).standard_normal(routing.load.shape))
    assert make_plan(drifted, TOPOLOGY, objective="slack", previous=plan, budget_bytes=0).bytes_to_move == 0


def test_slack_covers_nodes_where_asked(routing):
    topology = Topology.even(n_slots=72, n_ranks=8, n_nodes=4)
    plan = make_plan(routing.load, topology, objective="slack", coverage="nodes")
    assert losses(plan.slot_to_expert, 32, topology).by_node.max() == 0


def test_public_entry_plans_for_few_nodes(routing):
    plan = make_plan(routing.load, TOPOLOGY, objective="nodes", routing=routing, n_groups=8, weight=0.5)
    assert (plan.slot_to_expert == plan_local(routing.load, routing, TOPOLOGY, n_groups=8, weight=0.5).slot_to_expert).all()
    with pytest.raises(ValueError, match="needs routing"):
        make_plan(routing.load, TOPOLOGY, objective="nodes")
