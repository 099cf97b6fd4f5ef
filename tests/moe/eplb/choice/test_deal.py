"""Ways dealt to source ranks: all together keep to the shares, and as much as can be stays near."""

from __future__ import annotations

import time

import numpy as np
import pytest

from rorqual.moe.eplb.choice.deal import deal_ways, even_shares
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.choice.linear import random_slots


def all_sources(slots: np.ndarray, experts: int, topology: Topology, **more) -> np.ndarray:
    """[sources, layers, experts, slots] entries."""
    sources = [rank for rank in range(topology.n_ranks) if rank not in topology.failed]
    tables = np.stack([deal_ways(slots, experts, topology, source=rank, **more) for rank in sources])
    return (tables[..., None] == np.arange(topology.n_slots)).sum(3)


TOPOLOGIES = [
    Topology.even(n_slots=16, n_ranks=4, n_nodes=2),
    Topology.even(n_slots=19, n_ranks=4, n_nodes=1),  # uneven
    Topology(slots=(3, 5, 2, 6, 4), nodes=(0, 1, 1, 2, 0)),
    Topology.even(n_slots=18, n_ranks=6, n_nodes=3).without([2]),
]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("n_ways", [1, 7, 64])
@pytest.mark.parametrize("near", [True, False])
def test_all_sources_together_are_even(topology, n_ways, near):
    rng = np.random.default_rng(n_ways)
    slots = random_slots(rng, 5, 9, topology)
    entries = all_sources(slots, 9, topology, n_ways=n_ways, near=near)
    assert (entries.sum(-1) == n_ways).all()  # every source has all its ways
    held = slots[:, None, :] == np.arange(9)[:, None]
    total = entries.sum(0)
    assert not total[~held].any()  # a way leads to a slot that holds the expert
    wanted = even_shares(slots, 9)[:, None, :] * len(entries) * n_ways
    assert (np.abs(total - wanted)[held] < 1).all()


def most_near(slots: np.ndarray, topology: Topology, n_ways: int, expert: int) -> tuple[int, int]:
    """Most units of one layer's expert that can stay on their rank, and then on their node: flows found by trying paths one by one."""
    replicas = np.flatnonzero(slots == expert)
    sources = [rank for rank in range(topology.n_ranks) if rank not in topology.failed]
    room = dict.fromkeys(replicas, len(sources) * n_ways // len(replicas))
    left = dict.fromkeys(sources, n_ways)
    found = [0, 0]
    for level, near in enumerate((topology.rank_of_slot, topology.node_of_slot)):
        of = (lambda r: r) if level == 0 else (lambda r: topology.node_of_rank[r])
        for source in sources:
            for slot in replicas:
                if near[slot] == of(source):
                    units = min(left[source], room[slot])
                    left[source] -= units
                    room[slot] -= units
                    found[level] += units
    return found[0], found[1]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_as_much_as_can_be_stays_near(topology):
    slots = random_slots(np.random.default_rng(3), 4, 7, topology)
    n_ways = 840  # divides by all numbers of replicas here, so that nothing is rounded
    sources = np.array([rank for rank in range(topology.n_ranks) if rank not in topology.failed])
    entries = all_sources(slots, 7, topology, n_ways=n_ways)
    same_rank = topology.rank_of_slot == sources[:, None]
    same_node = topology.node_of_slot == topology.node_of_rank[sources][:, None]
    on_rank = (entries * same_rank[:, None, None]).sum((0, -1))
    on_node = (entries * same_node[:, None, None]).sum((0, -1))
    for layer in range(4):
        for expert in range(7):
            rank, node = most_near(slots[layer], topology, n_ways, expert)
            assert on_rank[layer, expert] == rank and on_node[layer, expert] == rank + node


def test_shares_are_kept_by_all_sources_together():
    rng = np.random.default_rng(0)
    topology = Topology.even(n_slots=24, n_ranks=4, n_nodes=2)
    slots = random_slots(rng, 6, 10, topology)
    shares = np.where(slots < 0, 0.0, rng.random(slots.shape) + 0.01)
    shares[0][slots[0] == 3] = 0.0  # says nothing: even
    total = all_sources(slots, 10, topology, n_ways=64, shares=shares).sum(0)
    for layer in range(6):
        for expert in range(10):
            held = slots[layer] == expert
            part = shares[layer] * held
            part = held / held.sum() if part.sum() == 0 else part / part.sum()
            assert np.abs(total[layer, expert] - part * 4 * 64)[held].max() < 1


def test_sources_alike_deal_alike():
    topology = Topology.even(n_slots=12, n_ranks=3)
    slots = random_slots(np.random.default_rng(1), 2, 5, topology)
    entries = all_sources(slots, 5, topology, n_ways=64, near=False)
    even = np.where(slots[:, None, :] == np.arange(5)[:, None], even_shares(slots, 5)[:, None, :] * 64, 0)
    assert np.abs(entries - even).max() <= 1.0


def test_refusals():
    topology = Topology.even(n_slots=4, n_ranks=2)
    good = np.array([[0, 1, 2, -1]])
    with pytest.raises(ValueError, match="layer 0 has no slot for expert 3"):
        deal_ways(good, 4, topology, source=0, n_ways=4)
    with pytest.raises(ValueError, match="source rank 1"):
        deal_ways(good, 3, topology.without([1]), source=1, n_ways=4)
    with pytest.raises(ValueError, match="3 slots, but the topology has 4"):
        deal_ways(good[:, :3], 3, topology, source=0, n_ways=4)


def test_a_model_is_dealt_in_moments():
    topology = Topology.even(n_slots=288, n_ranks=32, n_nodes=4)
    rng = np.random.default_rng(0)
    slots = np.stack([rng.permutation(np.arange(288) % 256) for _ in range(58)])
    best = np.inf
    for _ in range(3):
        began = time.process_time()
        deal_ways(slots, 256, topology, source=5, n_ways=64)
        best = min(best, time.process_time() - began)
    assert best < 0.25  # 28 ms when written
