"""The published algorithm as a peer: its own example, and its description written as plain loops."""

import numpy as np
import pytest

from rorqual.moe.eplb.plan import rank_loads
from rorqual.moe.eplb.simulation.published import published_plan
from rorqual.moe.eplb.topology import Topology

EXAMPLE = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]], dtype=np.float64
)


def packed(weights, packs):
    """Items of each pack: heaviest first, to the lightest pack that is not full."""
    room, found, sums = len(weights) // packs, [[] for _ in range(packs)], [0.0] * packs
    if room == 1:
        return [[item] for item in range(packs)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        pack = min((p for p in range(packs) if len(found[p]) < room), key=lambda p: sums[p])
        found[pack].append(item)
        sums[pack] += weights[item]
    return found


def by_loops(load, slots, groups, nodes, ranks):
    """One layer."""
    size, result = len(load) // groups, []
    for node in packed([load[g * size : (g + 1) * size].sum() for g in range(groups)], nodes):
        experts = [g * size + i for g in node for i in range(size)]
        copies = list(experts)
        while len(copies) < slots // nodes:
            copies.append(max(experts, key=lambda e: load[e] / copies.count(e)))
        each = [load[e] / copies.count(e) for e in copies]
        result += [copies[item] for pack in packed(each, ranks // nodes) for item in pack]
    return result


def test_the_published_example_is_reproduced():
    machine = Topology.even(n_slots=16, n_ranks=8, n_nodes=2)
    plan = published_plan(EXAMPLE, machine, n_groups=4)
    assert plan.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert rank_loads(plan, EXAMPLE, machine).max(1).tolist() == [156.0, 179.5]
    assert rank_loads(published_plan(EXAMPLE, machine), EXAMPLE, machine).max(1).tolist() == [138.5, 172.0]


@pytest.mark.parametrize(
    ("experts", "slots", "groups", "nodes", "ranks"), [(16, 24, 4, 2, 4), (12, 18, 1, 1, 6), (8, 8, 4, 4, 8), (16, 32, 3, 2, 8)]
)
def test_it_is_what_plain_loops_make(experts, slots, groups, nodes, ranks):
    load = np.random.default_rng(experts + slots).lognormal(size=(5, experts))
    machine = Topology.even(n_slots=slots, n_ranks=ranks, n_nodes=nodes)
    modes = (groups, nodes) if groups % nodes == 0 else (1, 1)
    assert published_plan(load, machine, n_groups=groups).tolist() == [by_loops(row, slots, *modes, ranks) for row in load]


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Topology.even(n_slots=17, n_ranks=8), "ranks of equal size"),
        (Topology.even(n_slots=16, n_ranks=8).without([3]), "all live"),
        (Topology.even(n_slots=8, n_ranks=8), "12 experts do not fit into 8 slots"),
    ],
)
def test_what_it_cannot_plan_for_is_said(machine, message):
    with pytest.raises(ValueError, match=message):
        published_plan(EXAMPLE, machine)
