"""Water filling against the linear program (HiGHS)."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from rorqual.moe.eplb.choice.water import WaterFill, water_fill
from rorqual.moe.eplb.plan import rank_loads
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.choice.linear import least_level, random_slots

TOPOLOGIES = [
    Topology.even(n_slots=40, n_ranks=8),
    Topology.even(n_slots=64, n_ranks=8),
    Topology(slots=(7, 5, 9, 6, 8), nodes=(0, 0, 1, 1, 1), speeds=(1.0, 0.5, 1.0, 2.0, 1.3)),
    Topology(slots=(8,) * 5, nodes=(0,) * 5, speeds=(2.0,) * 5),
    Topology.even(n_slots=45, n_ranks=9).without([4]),
]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("sigma", [0.3, 1.5])
def test_split_is_within_a_hundredth_of_the_best(topology, sigma):
    rng = np.random.default_rng(int(10 * sigma))
    experts, layers = 30, 12
    slots = random_slots(rng, layers, experts, topology)
    counts = np.floor(rng.lognormal(4.0, sigma, (layers, experts))).astype(np.int64) * (rng.random((layers, experts)) > 0.1)
    filled = WaterFill(slots, experts, topology).fill(counts)
    assert (filled.split >= 0).all() and not filled.split[slots < 0].any()
    for expert in range(experts):
        np.testing.assert_allclose(np.where(slots == expert, filled.split, 0).sum(1), counts[:, expert], rtol=1e-9, atol=1e-6)
    speeds = np.ones(topology.n_ranks) if topology.speeds is None else np.array(topology.speeds)
    level = (rank_loads(slots, counts.astype(float), topology, filled.split) / speeds).max(1)
    np.testing.assert_allclose(level, filled.level, rtol=1e-9)
    best = np.array([least_level(counts[layer], slots[layer], topology) for layer in range(layers)])
    assert (level <= 1.01 * best).all()
    assert (filled.bound <= best * (1 + 1e-9)).all() and (filled.gap <= 0.009 + 1e-9).all()
    exact = WaterFill(slots, experts, topology).fill(counts, gap=1e-6, most_sweeps=4000)
    np.testing.assert_allclose(exact.level, best, rtol=1e-5)


def test_a_long_chain_is_levelled():
    """Expert i is on ranks i and i + 1, and all tokens are at one end: the hardest case for going expert by expert."""
    ranks = 24
    slots = np.stack([np.arange(2 * ranks) // 2 - np.arange(2 * ranks) % 2]).clip(0, ranks - 2)  # rank r: experts r and r - 1
    counts = np.zeros((1, ranks - 1))
    counts[0, : ranks // 2] = 100.0
    topology = Topology.even(n_slots=2 * ranks, n_ranks=ranks)
    filled = WaterFill(slots, ranks - 1, topology).fill(counts)
    assert filled.level[0] <= 1.01 * least_level(counts[0], slots[0], topology)


def test_layers_without_choice_or_tokens():
    topology = Topology.even(n_slots=4, n_ranks=2)
    slots = np.array([[0, 1, 2, 3], [0, 1, 2, 0]])
    filled = WaterFill(slots, 4, topology).fill(np.array([[3, 1, 0, 2], [0, 0, 0, 0]]))
    assert filled.split.tolist() == [[3, 1, 0, 2], [0, 0, 0, 0]] and filled.gap.tolist() == [0, 0] and filled.level.tolist() == [4, 0]
    alone = water_fill(np.array([[3, 1, 0, 2]]), slots[:1], topology)
    assert alone.tolist() == [[3, 1, 0, 2]]


def test_slots_of_one_rank_share_its_part():
    topology = Topology.even(n_slots=4, n_ranks=2)
    assert water_fill(np.array([[9, 1]]), np.array([[0, 0, 0, 1]]), topology).tolist() == [[2.5, 2.5, 4.0, 1.0]]


def test_the_wheel_is_not_reinvented_for_few_layers():
    """Layers that are done are left out of later rounds; the others go on as if alone."""
    rng = np.random.default_rng(5)
    topology = Topology.even(n_slots=40, n_ranks=8)
    slots = random_slots(rng, 20, 30, topology)
    counts = np.floor(rng.lognormal(4.0, 1.2, (20, 30)))
    together = WaterFill(slots, 30, topology).fill(counts)
    for layer in range(20):
        alone = WaterFill(slots[layer : layer + 1], 30, topology).fill(counts[layer : layer + 1])
        np.testing.assert_allclose(alone.level[0], together.level[layer], rtol=0.009)


def test_refusals():
    topology = Topology.even(n_slots=4, n_ranks=2)
    with pytest.raises(ValueError, match=r"counts must be \[1, 3\], found \[2, 3\]"):
        WaterFill(np.array([[0, 1, 2, -1]]), 3, topology).fill(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="layer 0 has tokens for expert 2, which has no slot"):
        WaterFill(np.array([[0, 1, 1, -1]]), 3, topology).fill(np.ones((1, 3)))
    with pytest.raises(ValueError, match="3 slots, but the topology has 4"):
        WaterFill(np.array([[0, 1, 2]]), 3, topology)
    lost = replace(topology, failed=frozenset([1]))
    assert WaterFill(np.array([[0, 1, -1, -1]]), 3, lost).fill(np.array([[1, 2, 0]])).level[0] == 3


def test_a_model_is_filled_in_moments():
    """58 layers of 256 experts in 288 slots on 32 ranks, the replicas of the hottest experts, with 20% noise on their load."""
    rng = np.random.default_rng(0)
    topology = Topology.even(n_slots=288, n_ranks=32, n_nodes=4)
    load = rng.lognormal(8.0, 1.05, (58, 256))
    hot = np.argsort(-load, 1)[:, :16]
    slots = np.stack([rng.permutation(np.concatenate([np.arange(256), row, row])) for row in hot])
    filler, counts = WaterFill(slots, 256, topology), load * rng.lognormal(0.0, 0.2, load.shape)
    best = np.inf
    for _ in range(5):
        began = time.process_time()
        filled = filler.fill(counts)
        best = min(best, time.process_time() - began)
    assert (filled.gap <= 0.009 + 1e-9).all()
    assert best < 58 * 500e-6  # below 100 us a layer when written
