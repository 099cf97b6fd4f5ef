"""What failures take with them, maps that survive them, and what has to come from disk."""

import numpy as np
import pytest

from rorqual.moe.eplb.api import make_plan
from rorqual.moe.eplb.replan.coverage import can_cover, losses, mend
from rorqual.moe.eplb.replan.recovery import recover
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.validate import validate
from tests.moe.eplb.replan.cases import arrivals, assert_in_place, drift, held, skewed


def test_losses_are_counted_one_by_one() -> None:
    random = np.random.default_rng(0)
    topology = Topology(slots=(3, 2, 4, 3), nodes=(0, 0, 1, 1))
    for _ in range(20):
        slots = random.integers(-1, 6, (2, 12))
        found = losses(slots, 6, topology)
        ranks = held(slots, topology)
        for layer in range(2):
            for rank in range(4):
                others = set().union(*(ranks[layer][r] for r in range(4) if r != rank))
                assert found.by_rank[layer, rank] == len(ranks[layer][rank] - others)
            left, right = ranks[layer][0] | ranks[layer][1], ranks[layer][2] | ranks[layer][3]
            assert found.by_node[layer].tolist() == [len(left - right), len(right - left)]
    assert "rank" in found.text() and "node" in found.text()


@pytest.mark.parametrize("coverage", ["ranks", "nodes"])
@pytest.mark.parametrize(("slots", "ranks", "nodes"), [(512, 64, 8), (576, 64, 8), (600, 36, 5)])
def test_nothing_is_lost_with_any_single_one(coverage: str, slots: int, ranks: int, nodes: int) -> None:
    load, topology = skewed(1), Topology.even(n_slots=slots, n_ranks=ranks, n_nodes=nodes)
    assert can_cover(256, coverage, topology)
    plan = make_plan(load, topology, coverage=coverage)
    again = make_plan(drift(load, 0.1), topology, previous=plan, coverage=coverage)
    for one in (plan, again):
        assert validate(one.slot_to_expert, 256, topology) == []
        found = losses(one.slot_to_expert, 256, topology)
        assert found.worst_rank == 0
        assert coverage == "ranks" or found.worst_node == 0
        assert (one.imbalance >= one.bound - 1e-9).all()
    if slots > 512:
        assert plan.imbalance.mean() < 1.005 and again.imbalance.mean() < 1.03


def test_replicas_are_spread_over_nodes_where_there_are_any() -> None:
    load, topology = skewed(2), Topology.even(n_slots=288, n_ranks=32, n_nodes=4)
    assert not can_cover(256, "nodes", topology)
    plan = make_plan(load, topology, coverage="nodes")
    again = make_plan(drift(load, 0.1), topology, previous=plan, coverage="nodes")
    for one in (plan, again):
        for row in one.slot_to_expert:
            for expert in range(256):
                places = np.flatnonzero(row == expert)
                assert len(places) < 2 or len(set(topology.node_of_slot[places])) >= 2


def test_a_map_without_coverage_gets_it_by_a_replan() -> None:
    topology = Topology.even(n_slots=12, n_ranks=4, n_nodes=2)
    before = np.array([[0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]])  # each expert on two ranks of one node
    load = np.ones((1, 6))
    assert losses(before, 6, topology).worst_node == 3
    plan = make_plan(load, topology, previous=before, coverage="nodes")
    assert losses(plan.slot_to_expert, 6, topology).worst_node == 0
    assert "for coverage" in plan.reason


def test_mend_of_random_maps() -> None:
    random = np.random.default_rng(1)
    for _ in range(40):
        nodes = int(random.integers(2, 4))
        topology = Topology.even(n_slots=int(random.integers(12, 22)), n_ranks=nodes * 2, n_nodes=nodes)
        start = random.integers(-1, 6, (2, topology.n_slots))
        for coverage in ("any", "ranks", "nodes"):
            result = mend(start, random.random((2, 6)), topology, coverage)
            assert validate(result, 6, topology, duplicates=False) == []
            if can_cover(6, coverage, topology):
                found = losses(result, 6, topology)
                assert (found.worst_rank if coverage == "ranks" else found.worst_node) == 0


def test_mend_leaves_a_whole_map_alone() -> None:
    topology = Topology.even(n_slots=8, n_ranks=4)
    whole = np.array([[0, 1, 2, 3, 0, 4, 5, -1]])
    np.testing.assert_array_equal(mend(whole, np.ones((1, 6)), topology, "ranks"), whole)


@pytest.mark.parametrize("failed", [[5], [0, 9, 31]])
def test_recovery_reads_exactly_what_is_lost(failed: list[int]) -> None:
    load, topology = skewed(3), Topology.even(n_slots=288, n_ranks=32, n_nodes=4)
    before = make_plan(load, topology)
    plan, recovery = recover(load, topology, previous=before, failed=failed)
    survivors = topology.without(failed)
    assert plan.topology == survivors and recovery.failed == tuple(failed)
    assert validate(plan.slot_to_expert, 256, survivors) == []
    old, new = held(before.slot_to_expert, topology), held(plan.slot_to_expert, survivors)
    lost = {(layer, e) for layer in range(3) for e in range(256) if not any(e in old[layer][r] for r in range(32) if r not in failed)}
    assert {(layer, expert) for layer, expert, _ in recovery.reloads.tolist()} == lost and len(recovery.reloads) == len(lost) > 0
    assert all(expert in new[layer][rank] for layer, expert, rank in recovery.reloads.tolist())
    size = plan.expert_bytes
    assert recovery.disk_bytes.sum() == len(lost) * size
    assert recovery.disk_bytes.sum() + recovery.copied_bytes.sum() == plan.bytes_to_move
    assert not recovery.disk_bytes[failed].any() and not plan.moved[:, failed].any()
    assert recovery.disk_bytes.max() <= size * (3 * -(-len(lost) // (32 - len(failed))) + 3)
    assert_in_place(np.where(survivors.usable, before.slot_to_expert, -1), plan.slot_to_expert, survivors)
    assert plan.imbalance.mean() <= 1.03
    assert f"{len(lost)} experts are read from disk" in recovery.text()


def test_first_aid_moves_only_what_is_missing() -> None:
    load, topology = skewed(3), Topology.even(n_slots=288, n_ranks=32)
    before = make_plan(load, topology)
    plan, recovery = recover(load, topology, previous=before, failed=[7], budget_bytes=0)
    assert recovery.copied_bytes.sum() == 0 and plan.moved.sum() == len(recovery.reloads)
    assert validate(plan.slot_to_expert, 256, plan.topology) == []


def test_a_rank_that_comes_back_is_used() -> None:
    load, topology = skewed(3), Topology.even(n_slots=288, n_ranks=32)
    without, _ = recover(load, topology, previous=make_plan(load, topology), failed=[7])
    back = make_plan(load, topology, previous=without)
    assert validate(back.slot_to_expert, 256, topology) == []
    assert (back.slot_to_expert[:, topology.rank_of_slot == 7] >= 0).any(1).all()
    assert back.imbalance.mean() <= 1.03
    np.testing.assert_array_equal(back.moved, arrivals(without.slot_to_expert, back.slot_to_expert, topology))


def test_covered_maps_need_nothing_from_disk() -> None:
    load, topology = skewed(2), Topology.even(n_slots=576, n_ranks=64)
    before = make_plan(load, topology, coverage="ranks")
    for rank in (0, 33):
        _, recovery = recover(load, topology, previous=before, failed=[rank], coverage="ranks")
        assert len(recovery.reloads) == 0 and recovery.disk_bytes.sum() == 0


def test_too_few_survivors() -> None:
    topology = Topology.even(n_slots=8, n_ranks=2)
    with pytest.raises(ValueError, match="cannot hold 6 experts"):
        recover(np.ones((1, 6)), topology, previous=make_plan(np.ones((1, 6)), topology), failed=[1])
