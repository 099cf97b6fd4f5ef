"""Explanations name what they explain."""

import numpy as np
import pytest

from rorqual.moe.eplb.explain import explain
from rorqual.moe.eplb.planner.static import plan_static
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.reference_eplb import README

TOPOLOGY = Topology.even(n_slots=16, n_ranks=8, n_nodes=2)


def test_an_expert_with_replicas() -> None:
    plan = plan_static(README, TOPOLOGY)
    text = explain(plan, README, 10)
    places = np.flatnonzero(plan.slot_to_expert[0] == 10)
    assert "layer 0, expert 10: load 183" in text and "number 1 of 12" in text
    assert f"{len(places)} replicas" in text
    for place in places:
        assert f"slot {place}: rank {place // 2}, node {place // 8}" in text


def test_why_there_are_no_more_replicas() -> None:
    everywhere = plan_static(np.array([[9.0, 1.0]]), Topology.even(n_slots=4, n_ranks=2))
    assert "it is on every usable rank" in explain(everywhere, np.array([[9.0, 1.0]]), 0)
    none = plan_static(np.array([[9.0, 1.0]]), Topology.even(n_slots=2, n_ranks=2))
    assert "more slots would be needed" in explain(none, np.array([[9.0, 1.0]]), 0)
    load = np.array([[8.0, 6.0, 1.0, 1.0]])
    plan = plan_static(load, Topology.even(n_slots=6, n_ranks=3))
    assert "would leave that one" in explain(plan, load, 1)


def test_no_such_expert() -> None:
    with pytest.raises(ValueError, match="no expert 12 in layer 0: the plan has 2 layers of 12 experts"):
        explain(plan_static(README, TOPOLOGY), README, 12)
