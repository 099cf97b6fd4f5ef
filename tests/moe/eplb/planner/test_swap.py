"""Packing, swaps and exchanges keep what they must keep, and only make things better."""

import numpy as np
import pytest

from rorqual.moe.eplb.planner.exchange import exchange
from rorqual.moe.eplb.planner.pack import pack
from rorqual.moe.eplb.planner.replicate import share_out
from rorqual.moe.eplb.planner.search import placed, search, slowest
from rorqual.moe.eplb.planner.seats import Seats
from rorqual.moe.eplb.planner.swap import refine
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.reference_eplb import pack as plain_pack
from tests.moe.eplb.reference_eplb import replicate, skewed_load

MACHINES = [
    Topology.even(n_slots=40, n_ranks=10),
    Topology.even(n_slots=40, n_ranks=20),
    Topology.even(n_slots=39, n_ranks=13),
    Topology(slots=(5, 4, 6, 3, 8, 7, 5), nodes=(0,) * 7, failed=frozenset([2]), speeds=(1.0, 1.0, 0.7, 1.2, 1.0, 0.9, 1.0)),
]


@pytest.mark.parametrize("topology", MACHINES)
def test_swaps_keep_replicas_and_never_slow_a_layer(topology: Topology) -> None:
    load = skewed_load(5, 28, seed=7)
    seats = Seats(topology=topology, n_experts=28)
    counts, _ = share_out(load, seats.total, most=seats.n_rows)
    table = pack(load, counts, seats)
    assert (placed(table, seats) == counts).all()
    before = slowest(table, load, seats)
    refine(table, load / counts, seats, goal=np.zeros(5))
    assert (placed(table, seats) == counts).all()
    assert (slowest(table, load, seats) <= before * (1 + 1e-9)).all()
    assert (table[:, ~seats.open] == 28).all()
    for row in table.reshape(-1, table.shape[2]):
        held = row[row < 28]
        assert len(set(held.tolist())) == len(held)


def test_counts_and_packing_are_those_of_the_plain_loops() -> None:
    load = skewed_load(4, 12, seed=8)
    seats = Seats(topology=Topology.even(n_slots=16, n_ranks=4), n_experts=12)
    counts, peaks = share_out(load, 16, most=16)
    for layer in range(4):
        holders = replicate(load[layer].tolist(), 16)
        assert counts[layer].tolist() == [holders.count(expert) for expert in range(12)]
        assert peaks[layer, -1] == pytest.approx((load[layer] / counts[layer]).max())
    single = Seats(topology=Topology.even(n_slots=12, n_ranks=4), n_experts=12)
    table = pack(load, np.ones((4, 12), dtype=np.int64), single)
    for layer in range(4):
        plain = plain_pack(load[layer].tolist(), 4)
        assert sorted(load[layer][pack_].sum() for pack_ in plain) == pytest.approx(sorted(load[layer][table[layer]].sum(1)))
    assert seats.total == 16


@pytest.mark.parametrize("may_empty", [True, False])
@pytest.mark.parametrize("topology", MACHINES[1:3])
def test_exchanges_lower_what_the_slowest_rank_must_carry(topology: Topology, may_empty: bool) -> None:
    load = skewed_load(6, 24, seed=9)
    seats = Seats(topology=topology, n_experts=24)
    counts, _ = share_out(load, seats.total, most=seats.n_rows)
    before = counts.copy()
    after = exchange(load, counts, seats, goal=np.zeros(6), may_empty=may_empty)
    assert (counts == before).all() and (after != before).any()
    assert after.min() >= 1 and (after.sum(1) <= seats.total).all()
    assert may_empty or (after.sum(1) == seats.total).all()
    if topology.slots[0] == 2:  # heaviest with lightest is exact then
        assert (_folded(load, after, 20) <= _folded(load, before, 20) * (1 + 1e-6)).all()


def _folded(load: np.ndarray, counts: np.ndarray, rows: int) -> np.ndarray:
    result = []
    for weight, count in zip(load, counts, strict=True):
        replicas = np.repeat(weight / count, count)
        rising = np.sort(np.append(replicas, np.zeros(2 * rows - len(replicas))))
        result.append((rising[rows:] + rising[:rows][::-1]).max())
    return np.array(result)


def test_search_keeps_the_best_and_fills_where_it_must() -> None:
    load = skewed_load(2, 8, seed=10)
    seats = Seats(topology=Topology.even(n_slots=12, n_ranks=6), n_experts=8)
    counts, _ = share_out(load, 12, most=6)
    table = pack(load, counts, seats)
    before = slowest(table, load, seats)
    found = search(load, table.copy(), seats, goal=np.zeros(2), may_empty=False)
    assert (slowest(found, load, seats) <= before).all()
    assert (placed(found, seats).sum(1) == 12).all()


def test_replicas_without_a_rank_are_mended() -> None:
    # every expert twice on three ranks of four: the last replicas meet their own expert everywhere, unless another makes room
    load = np.array([[4.0, 4.0, 4.0, 1.0, 1.0, 1.0]])
    seats = Seats(topology=Topology.even(n_slots=12, n_ranks=3), n_experts=6)
    table = pack(load, np.full((1, 6), 2), seats)
    assert (placed(table, seats) == 2).all()
