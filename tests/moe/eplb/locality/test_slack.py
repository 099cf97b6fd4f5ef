import time

import numpy as np
import pytest

from rorqual.moe.eplb.choice.water import water_fill
from rorqual.moe.eplb.load.synth import popularity
from rorqual.moe.eplb.metrics import imbalance
from rorqual.moe.eplb.plan import rank_loads, replica_counts
from rorqual.moe.eplb.planner.slack import Graph, plan_slack
from rorqual.moe.eplb.planner.static import plan_static
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.validate import validate
from tests.moe.eplb.choice.linear import least_level

TOPOLOGY = Topology.even(n_slots=288, n_ranks=32)


def load_of(layers, seed=0):
    return popularity(layers, 256, sigma=(0.6, 1.35), seed=seed) * 65536


def noisy(load, noise, seed):
    return np.round(load * np.exp(noise * np.random.default_rng(seed).standard_normal(load.shape)))


def filled(plan, batch):
    split = water_fill(batch, plan.slot_to_expert, TOPOLOGY)
    return imbalance(rank_loads(plan.slot_to_expert, batch, TOPOLOGY, split), TOPOLOGY)


def test_noisy_batches_can_be_balanced():
    """20% noise of every expert: 1.07 with water filling is the target; an even split has 1.174, a plan without slack 1.092."""
    load = load_of(24)
    slack, plain = plan_slack(load, TOPOLOGY), plan_static(load, TOPOLOGY)
    batches = [noisy(load, 0.2, seed) for seed in range(2)]
    even = np.mean([imbalance(rank_loads(slack.slot_to_expert, batch, TOPOLOGY), TOPOLOGY) for batch in batches])
    ours, theirs = (np.mean([filled(plan, batch) for batch in batches]) for plan in (slack, plain))
    assert ours <= 1.05
    assert theirs > 1.08
    assert even > 1.15


def test_linear_program_agrees():
    load = load_of(6, seed=1)
    plan = plan_slack(load, TOPOLOGY)
    batch = noisy(load, 0.2, 5)
    mean = batch.sum(1) / TOPOLOGY.n_ranks
    best = np.array([least_level(*pair, TOPOLOGY) for pair in zip(batch, plan.slot_to_expert, strict=True)]) / mean
    assert best.mean() <= 1.06
    got = filled(plan, batch)
    assert (got >= best - 1e-6).all()
    assert (got <= best * 1.011).all()


def test_planned_load_is_balanced_as_well():
    load = load_of(24, seed=2)
    slack, plain = plan_slack(load, TOPOLOGY), plan_static(load, TOPOLOGY)
    assert validate(slack.slot_to_expert, 256, TOPOLOGY) == []
    assert slack.imbalance.mean() <= 1.001
    assert (replica_counts(slack.slot_to_expert, 256) == replica_counts(plain.slot_to_expert, 256)).all()


@pytest.mark.parametrize(
    "topology",
    [
        Topology.even(n_slots=30, n_ranks=7, n_nodes=2),
        Topology(slots=(5, 9, 3, 8, 7), nodes=(0, 0, 1, 1, 1), failed=frozenset({2})),
        Topology(slots=(8, 8, 8), nodes=(0, 0, 0), speeds=(1.0, 2.0, 1.0)),
        Topology.even(n_slots=24, n_ranks=24),
        Topology.even(n_slots=60, n_ranks=2),
    ],
)
def test_any_machine(topology):
    load = np.exp(np.random.default_rng(3).standard_normal((5, 20)))
    plan = plan_slack(load, topology)
    assert validate(plan.slot_to_expert, 20, topology) == []
    assert (plan.imbalance <= plan_static(load, topology).imbalance * 1.03 + 1e-9).all()


def test_coverage_can_be_asked_for():
    load = np.exp(np.random.default_rng(4).standard_normal((3, 20)))
    plan = plan_slack(load, Topology.even(n_slots=48, n_ranks=6), least_replicas=2)
    assert replica_counts(plan.slot_to_expert, 20).min() == 2


def test_experts_that_stay_keep_their_slots():
    load = load_of(2)
    first = plan_slack(load, TOPOLOGY)
    again = plan_slack(load, TOPOLOGY, previous=first.slot_to_expert)
    assert (again.slot_to_expert == first.slot_to_expert).all()
    assert again.bytes_to_move == 0


def test_graph_knows_the_shortest_ways():
    rng = np.random.default_rng(5)
    graph, edges = Graph(2, 12), np.zeros((2, 12, 12), dtype=bool)
    for _ in range(12):
        layer, row = rng.integers(2, size=1), rng.integers(12, size=1)
        others = np.zeros((1, 12), dtype=bool)
        others[0, rng.choice(np.delete(np.arange(12), row), 2, replace=False)] = True
        graph.join(layer, row, others)
        edges[layer[0], row[0]] |= others[0]
        edges[layer[0], :, row[0]] |= others[0]
        for one in range(2):
            steps = np.where(np.eye(12, dtype=bool), 0.0, np.where(edges[one], 1.0, np.inf))
            for middle in range(12):
                steps = np.minimum(steps, steps[:, middle, None] + steps[None, middle])
            assert (graph.steps[one] == steps).all()


def test_quick():
    """0.12 s for 58 layers when the machine is free; this guards against several times that."""
    load = load_of(58)
    taken = []
    for _ in range(2):
        start = time.process_time()
        plan_slack(load, TOPOLOGY)
        taken.append(time.process_time() - start)
    assert min(taken) < 1.0
