from functools import cache

import numpy as np
import pytest
import torch

from rorqual.moe.eplb.locality.coactivation import _pairs, coactivation, gather
from rorqual.moe.eplb.locality.fan_out import choose_even, fan_out, replica_table, sources
from rorqual.moe.eplb.locality.near import NearChoice, slot_loads
from rorqual.moe.eplb.locality.near_plan import plan_near
from rorqual.moe.eplb.locality.near_torch import NearTables
from rorqual.moe.eplb.locality.routing import Gate, Routing, count, make_router
from rorqual.moe.eplb.metrics import imbalance
from rorqual.moe.eplb.plan import rank_loads, replica_counts
from rorqual.moe.eplb.planner.static import plan_static
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.validate import validate

TOPOLOGY = Topology.even(n_slots=288, n_ranks=32, n_nodes=4)
SMALL = Gate(n_experts=32, top_k=4, n_groups=8, topk_groups=4)


@cache
def tokens():
    routing = make_router(n_layers=4, sigma=(0.65, 1.3), seed=1).sample(4096, seed=2)
    return routing.load, routing.tokens(0, 2048), routing.tokens(2048)


@cache
def near():
    load, sample, _ = tokens()
    return plan_near(load, sample, TOPOLOGY, n_groups=8)


def plain_choice(choice, layer, ids, place, rank_weight):
    """Slots of one token, in plain words."""
    table, widths = replica_table(choice.slot_to_expert, choice.n_experts)
    node, rank = choice.topology.node_of_slot, choice.topology.rank_of_slot
    options = {e: [s for s in table[layer, e] if s >= 0] for e in ids if e >= 0}
    nodes = {node[s[0]] for s in options.values() if len({node[x] for x in s}) == 1}
    ranks = {rank[s[0]] for s in options.values() if len(s) == 1}
    chosen = {e: s[0] for e, s in options.items() if len(s) == 1}
    for expert in sorted((e for e in options if len(options[e]) > 1), key=lambda e: (len(options[e]), list(ids).index(e))):
        cost = []
        for slot in options[expert]:
            mixed = (place * 2654435761 + slot * 2246822519) & 0xFFFFFFFF
            for _ in range(2):
                mixed = ((mixed ^ (mixed >> 16)) * 73244475) & 0xFFFFFFFF
            chance = 0.6 * (mixed ^ (mixed >> 16)) / 2.0**32
            cost.append(choice.price[layer, slot] + chance + (node[slot] not in nodes) + rank_weight * (rank[slot] not in ranks))
        slot = options[expert][int(np.argmin(cost))]
        chosen[expert] = slot
        nodes.add(node[slot])
        ranks.add(rank[slot])
    return [chosen.get(e, -1) for e in ids]


def test_choice_is_what_is_described():
    rng = np.random.default_rng(3)
    topology = Topology(slots=(9, 9, 9, 9, 12), nodes=(0, 0, 1, 1, 2))
    routing = make_router(n_layers=2, gate=SMALL).sample(60)
    ids = routing.ids.copy()
    ids[rng.random(ids.shape) < 0.1] = -1
    slots = np.stack([rng.permutation(np.concatenate([np.arange(32), rng.integers(-1, 32, 16)])) for _ in range(2)])
    choice = NearChoice(slot_to_expert=slots, n_experts=32, topology=topology, price=0.3 * rng.standard_normal(slots.shape))
    chosen = choice.choose(Routing(ids=ids, n_experts=32))
    for layer in range(2):
        for token in range(60):
            assert chosen[layer, token].tolist() == plain_choice(choice, layer, ids[layer, token], token, 0.3)


def test_tokens_go_to_fewer_nodes_and_ranks():
    """Before: planned and chosen for balance alone, 3.62 nodes and 7.3 ranks a token."""
    load, _, judges = tokens()
    before = fan_out(choose_even(judges, plan_static(load, TOPOLOGY).slot_to_expert), TOPOLOGY)
    plan = near()
    chosen = plan.choice.choose(judges)
    after = fan_out(chosen, TOPOLOGY)
    assert validate(plan.plan.slot_to_expert, 256, TOPOLOGY) == []
    held = np.take_along_axis(plan.plan.slot_to_expert, chosen.reshape(4, -1), axis=1).reshape(chosen.shape)
    assert (held == judges.ids).all()
    assert before.nodes.mean() > 3.55
    assert after.nodes.mean() < 2.95
    assert after.ranks.mean() < before.ranks.mean() - 0.4
    assert after.remote_nodes.mean() < before.remote_nodes.mean() - 0.5
    assert plan.plan.imbalance.mean() < 1.1


def test_prices_learn_from_loads():
    load, _, judges = tokens()
    choice, slots = near().choice, near().plan.slot_to_expert

    def balance():
        loads = rank_loads(slots, load, TOPOLOGY, slot_loads(count(choice.choose(judges), 288), slots, load))
        return loads, imbalance(loads, TOPOLOGY).mean()

    first = balance()[1]
    for turn in range(10):
        choice = choice.corrected(balance()[0], step=0.6 / (1 + turn / 3))
    assert balance()[1] < 1.03
    assert balance()[1] < first
    assert fan_out(choice.choose(judges), TOPOLOGY).nodes.mean() < 2.95


def test_own_node_is_free():
    _, _, judges = tokens()
    source = sources(judges.n_tokens, TOPOLOGY)
    blind, aware = (fan_out(near().choice.choose(judges, own), TOPOLOGY, source) for own in (None, source))
    assert aware.remote_nodes.mean() < blind.remote_nodes.mean() - 0.01


@pytest.mark.parametrize(
    "topology",
    [
        Topology.even(n_slots=32, n_ranks=8, n_nodes=4),
        Topology.even(n_slots=45, n_ranks=9, n_nodes=4),
        Topology(slots=(9, 5, 4, 8, 8, 9), nodes=(3, 3, 1, 1, 7, 7), failed=frozenset({1})),
        Topology(slots=(10,) * 4, nodes=(0, 0, 1, 1), speeds=(1.0, 1.0, 2.0, 1.0)),
        Topology.even(n_slots=64, n_ranks=16, n_nodes=16),
        Topology.even(n_slots=36, n_ranks=4),
    ],
)
def test_any_machine(topology):
    routing = make_router(n_layers=2, gate=SMALL, seed=3).sample(512)
    plan = plan_near(routing.load, routing, topology, n_groups=8)
    assert validate(plan.plan.slot_to_expert, 32, topology) == []
    assert (plan.choice.choose(routing) >= 0).all()
    assert (plan.plan.imbalance < 2.5).all()


def test_coactivation_counts_pairs():
    ids = np.array([[[0, 1, 2], [2, 1, -1], [3, 0, 1]]])
    together = coactivation(Routing(ids=ids, n_experts=4))[0]
    assert together.tolist() == [[0, 2, 1, 1], [2, 0, 2, 1], [1, 2, 0, 0], [1, 1, 0, 0]]


def test_experts_gather_within_nodes_and_balance():
    load, sample, judges = tokens()
    slots = plan_static(load, TOPOLOGY).slot_to_expert
    got = gather(slots, coactivation(sample), load, TOPOLOGY, tolerance=0.004)
    assert validate(got, 256, TOPOLOGY) == []
    assert (np.sort(got.reshape(4, 4, -1), 2) == np.sort(slots.reshape(4, 4, -1), 2)).all()
    before, after = (imbalance(rank_loads(way, load, TOPOLOGY), TOPOLOGY) for way in (slots, got))
    assert (after <= before + 0.004 + 1e-9).all()
    ranks = [fan_out(choose_even(judges, way), TOPOLOGY).ranks.mean() for way in (slots, got)]
    assert ranks[1] < ranks[0] - 0.01


@pytest.mark.parametrize("n", [2, 5, 8])
def test_everyone_meets_everyone(n):
    met = {frozenset(pair) for turn in range(n - 1 + n % 2) for pair in zip(*_pairs(n, turn), strict=True)}
    assert len(met) == n * (n - 1) // 2


def test_fan_out_counts():
    topology = Topology.even(n_slots=8, n_ranks=4, n_nodes=2)
    out = fan_out(np.array([[[0, 1, 2], [0, 4, 7], [6, -1, -1], [-1, -1, -1]]]), topology, source=np.array([0, 0, 0, 0]))
    assert (out.nodes[0], out.remote_nodes[0], out.ranks[0]) == (1.0, 0.5, 1.5)
    assert out.loads.tolist() == [[3, 1, 1, 2]]


def test_even_choice_is_even():
    load, _, judges = tokens()
    slots = plan_static(load, TOPOLOGY).slot_to_expert
    chosen = choose_even(judges, slots)
    assert (np.take_along_axis(slots, chosen.reshape(4, -1), axis=1).reshape(chosen.shape) == judges.ids).all()
    seen, counts = count(chosen, 288), replica_counts(slots, 256)
    for layer in range(4):
        for expert in np.flatnonzero(counts[layer] > 1):
            got = seen[layer, slots[layer] == expert]
            assert np.abs(got - got.mean()).max() <= 4.5 * np.sqrt(got.mean())


@pytest.mark.parametrize("aware", [False, True])
def test_device_form_chooses_the_same(aware):
    _, _, judges = tokens()
    few = judges.tokens(0, 400)
    ids = few.ids.copy()
    ids[:, 390:] = -1
    ids[np.random.default_rng(8).random(ids.shape) < 0.05] = -1
    source = sources(400, TOPOLOGY) if aware else None
    wanted = near().choice.choose(Routing(ids=ids, n_experts=256), source)
    own = None if source is None else torch.from_numpy(TOPOLOGY.node_of_rank[source])
    for layer in range(4):
        got = NearTables.of(near().choice, layer).choose(torch.from_numpy(ids[layer]), own)
        assert (got.numpy() == wanted[layer]).all()
