"""Plans from nothing: quality on published cases, and what holds for any load and machine."""

import time

import numpy as np
import pytest

from rorqual.moe.eplb.assess import arrivals, holds
from rorqual.moe.eplb.plan import rank_loads
from rorqual.moe.eplb.planner.bounds import bound
from rorqual.moe.eplb.planner.static import keep_slots, plan_static
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.validate import validate
from tests.moe.eplb.reference_eplb import FLASH, README, skewed_load


def test_published_examples_are_optimal() -> None:
    topology = Topology.even(n_slots=16, n_ranks=8, n_nodes=2)
    plan = plan_static(README, topology)
    assert rank_loads(plan.slot_to_expert, README, topology).max(1).tolist() == pytest.approx([136.0, 172.0])
    flash = plan_static(FLASH, topology)
    assert rank_loads(flash.slot_to_expert, FLASH, topology).max() == pytest.approx(196.67, abs=0.01)
    assert not validate(flash.slot_to_expert, 8, topology)


@pytest.mark.parametrize(
    ("n_slots", "n_ranks", "target"),
    [(288, 32, 1.0005), (288, 48, 1.001), (288, 72, 1.004), (288, 96, 1.0235), (288, 144, 1.3165), (320, 160, 1.0745)],
)
def test_quality_and_speed_on_58_layers(n_slots: int, n_ranks: int, target: float) -> None:
    load = skewed_load()
    topology = Topology.even(n_slots=n_slots, n_ranks=n_ranks)
    best = np.inf
    for _ in range(2):
        start = time.process_time()
        plan = plan_static(load, topology)
        best = min(best, time.process_time() - start)
    assert plan.imbalance.mean() <= target
    assert (plan.bound <= plan.imbalance + 1e-9).all()
    assert not validate(plan.slot_to_expert, 256, topology)  # no rank holds an expert twice
    assert best < 0.5  # measured: a tenth of it on a quiet machine


def test_large_models_are_planned_within_seconds() -> None:
    """58 layers of 896 experts on 1,024 slots of 128 ranks: measured 0.24 s and 120 MB."""
    load, topology = skewed_load(58, 896), Topology.even(n_slots=1024, n_ranks=128, n_nodes=16)
    start = time.process_time()
    plan = plan_static(load, topology)
    assert time.process_time() - start < 3.0
    assert plan.imbalance.mean() < 1.001 and not validate(plan.slot_to_expert, 896, topology)


def machine(random: np.random.Generator) -> Topology:
    """Any machine: uneven ranks, failed ranks, different speeds."""
    n = int(random.integers(1, 10))
    slots = random.integers(1, 8, n) if random.random() < 0.5 else np.full(n, random.integers(1, 8))
    failed = frozenset(np.flatnonzero(random.random(n) < 0.2).tolist()) if random.random() < 0.4 else frozenset()
    speeds = tuple(random.uniform(0.5, 2.0, n).tolist()) if random.random() < 0.3 else None
    nodes = tuple((np.arange(n) * 2 // n).tolist())
    return Topology(slots=tuple(slots.tolist()), nodes=nodes, failed=failed if len(failed) < n else frozenset(), speeds=speeds)


def any_load(random: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    """Skewed, zero, equal, small whole numbers with many ties, or all on one expert."""
    kind = random.integers(0, 5)
    if kind == 0:
        return random.lognormal(0.0, 1.2, (layers, experts))
    if kind == 1:
        return random.integers(0, 4, (layers, experts)).astype(np.float64)
    if kind == 2:
        return np.eye(experts)[random.integers(0, experts, layers)]
    return np.full((layers, experts), float(kind - 3))


@pytest.mark.parametrize("block", range(8))
def test_any_load_on_any_machine(block: int) -> None:
    for seed in range(block * 6, block * 6 + 6):
        random = np.random.default_rng(seed)
        layers, experts = int(random.integers(1, 4)), int(random.integers(1, 24))
        topology, load = machine(random), any_load(random, layers, experts)
        room = sum(min(slots, experts) for rank, slots in enumerate(topology.slots) if rank not in topology.failed)
        if room < experts:
            with pytest.raises(ValueError, match=f"give at least {experts}, for example"):
                plan_static(load, topology)
            continue
        plan = plan_static(load, topology)
        assert validate(plan.slot_to_expert, experts, topology) == [], seed
        assert (plan.imbalance >= plan.bound - 1e-9).all(), seed
        assert rank_loads(plan.slot_to_expert, load, topology).sum(1) == pytest.approx(load.sum(1)), seed
        assert plan.bytes_to_move == 0 and not plan.kept.any()
        again = plan_static(load, topology)
        assert (again.slot_to_expert == plan.slot_to_expert).all()  # all ranks that plan alike get the same plan


def test_previous_map_keeps_slots_and_is_charged() -> None:
    topology = Topology.even(n_slots=20, n_ranks=5)
    first = plan_static(skewed_load(3, 16, seed=1), topology)
    load = skewed_load(3, 16, seed=2)
    second = plan_static(load, topology, previous=first.slot_to_expert)
    stay = holds(first.slot_to_expert, 16, topology) & holds(second.slot_to_expert, 16, topology)
    same = (first.slot_to_expert == second.slot_to_expert) & (second.slot_to_expert >= 0)
    assert same.sum() == stay.sum()
    assert (second.moved == arrivals(first.slot_to_expert, second.slot_to_expert, 16, topology)).all()
    assert second.bytes_to_move == second.moved.sum() * second.expert_bytes > 0
    repeated = plan_static(load, topology, previous=second.slot_to_expert)
    assert repeated.moved.sum() == 0 and (repeated.slot_to_expert == second.slot_to_expert).all()


def test_keep_slots_only_reorders_within_ranks() -> None:
    topology = Topology(slots=(3, 2), nodes=(0, 0))
    before = np.array([[4, 1, 2, 0, 3]])
    after = np.array([[2, 4, 0, 3, -1]])
    assert keep_slots(before, after, topology).tolist() == [[4, 0, 2, -1, 3]]


def test_every_expert_twice_where_asked() -> None:
    topology = Topology.even(n_slots=40, n_ranks=8)
    plan = plan_static(skewed_load(4, 16, seed=3), topology, least_replicas=2)
    assert (holds(plan.slot_to_expert, 16, topology).sum(1) >= 2).all()
    assert (plan.bound <= plan.imbalance + 1e-9).all()
    with pytest.raises(ValueError, match="least_replicas must be 1 to 8"):
        plan_static(np.ones((1, 4)), topology, least_replicas=9)


def test_slow_ranks_get_less() -> None:
    topology = Topology(slots=(8, 8, 8, 8), nodes=(0, 0, 1, 1), speeds=(1.0, 1.0, 1.0, 0.5))
    load = skewed_load(6, 24, seed=4)
    plan = plan_static(load, topology)
    loads = rank_loads(plan.slot_to_expert, load, topology)
    assert loads[:, 3] / loads[:, :3].mean(1) == pytest.approx(0.5, abs=0.06)
    assert plan.imbalance.max() < 1.05


def test_slots_that_could_only_repeat_stay_empty() -> None:
    topology = Topology.even(n_slots=8, n_ranks=2)
    plan = plan_static(np.array([[3.0, 1.0]]), topology)
    assert sorted(plan.slot_to_expert[0].tolist()) == [-1, -1, -1, -1, 0, 0, 1, 1]
    assert plan.imbalance[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (np.ones(4), "load must be \\[layers, experts\\]"),
        (np.array([[1.0, -1.0]]), "found -1.0 for layer 0 expert 1"),
        (np.array([[np.nan, 1.0]]), "found nan for layer 0 expert 0"),
    ],
)
def test_impossible_loads_are_refused(load: np.ndarray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_static(load, Topology.even(n_slots=4, n_ranks=2))


def test_bound_of_no_load_is_one() -> None:
    assert bound(np.zeros((2, 4)), Topology.even(n_slots=4, n_ranks=2)).tolist() == [1.0, 1.0]
