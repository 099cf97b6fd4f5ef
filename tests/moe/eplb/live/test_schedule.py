"""Batches from one placement to another: valid in between, within bounds, without locks, from near sources."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from rorqual.moe.eplb.assess import arrivals
from rorqual.moe.eplb.live.batch import counts_of
from rorqual.moe.eplb.live.changes import NOBODY, Batch
from rorqual.moe.eplb.live.rounds import in_rounds
from rorqual.moe.eplb.live.schedule import make_schedule
from rorqual.moe.eplb.topology import Ints, Topology
from rorqual.moe.eplb.validate import validate
from tests.moe.eplb.live.placements import changed, random_placement


def apply(batch: Batch, now: Ints) -> Ints:
    after = now.copy()
    for change in batch.changes:
        after[change.layer, change.slot] = change.expert
    return after


def check(batches: list[Batch], old: Ints, new: Ints, topology: Topology, n_experts: int, staging: int, max_sends: int) -> None:
    """Every batch does only what its beginning allows, and leaves a valid placement."""
    now, rank_of = old, topology.rank_of_slot
    lost = [set(range(n_experts)) - set(row.tolist()) for row in old]
    for batch in batches:
        received, sent, loaded = counts_of(batch, topology.n_ranks)
        assert (received + loaded).max() <= staging and sent.max() <= max_sends
        for group in batch.rounds:
            assert max(Counter(m.source for m in group).values()) == 1 and max(Counter(m.target for m in group).values()) == 1
        assert len(batch.rounds) == max(received.max(), sent.max())
        got = {(m.layer, m.expert, m.target) for m in batch.transfers}
        assert len(got) == len(batch.transfers)
        for move in batch.transfers:
            assert move.expert not in now[move.layer][rank_of == move.target], "an expert that is there travels"
            if move.source == NOBODY:
                assert move.expert not in now[move.layer]
            else:
                assert now[move.layer, move.source_slot] == move.expert and rank_of[move.source_slot] == move.source != move.target
        after = apply(batch, now)
        for change in batch.changes:
            rank = rank_of[change.slot]
            there = change.expert in now[change.layer][rank_of == rank]
            assert change.expert < 0 or there or (change.layer, change.expert, rank) in got
            lost[change.layer].discard(change.expert)
        for layer, row in enumerate(after):
            assert set(range(n_experts)) - set(row.tolist()) <= lost[layer], "an expert has no slot"
        now = after
    assert np.array_equal(now, new)
    assert validate(now, n_experts, topology, duplicates=False) == []


@pytest.mark.parametrize("seed", range(40))
def test_random_moves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_ranks = int(rng.integers(1, 7))
    n_experts = int(rng.integers(2, 20))
    slots = tuple(int(n) for n in rng.integers(1, 6, n_ranks))
    if sum(slots) < n_experts:
        slots = (*slots[:-1], slots[-1] + n_experts - sum(slots) + int(rng.integers(0, 3)))
    topology = Topology(slots=slots, nodes=tuple(int(n) for n in np.sort(rng.integers(0, 2, n_ranks))))
    old, new = (random_placement(rng, 3, n_experts, topology, empty=0.3) for _ in range(2))
    staging, max_sends = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    batches = make_schedule(old, new, topology, staging=staging, max_sends=max_sends)
    check(batches, old, new, topology, n_experts, staging, max_sends)
    assert batches == make_schedule(old.copy(), new.copy(), topology, staging=staging, max_sends=max_sends)


def test_with_room_nothing_travels_twice() -> None:
    rng = np.random.default_rng(5)
    topology = Topology.even(n_slots=72, n_ranks=8, n_nodes=2)
    old = random_placement(rng, 6, 64, topology)
    new = changed(rng, old, 64, topology, 0.2)
    batches = make_schedule(old, new, topology, staging=9, max_sends=16)
    check(batches, old, new, topology, 64, 9, 16)
    assert sum(counts_of(batch, 8)[0].sum() for batch in batches) == arrivals(old, new, 64, topology).sum()


@pytest.mark.parametrize("staging", [1, 2, 3])
def test_one_cycle_through_all_slots_of_single_copies(staging: int) -> None:
    """No batch has room for the cycle, and no slot is to spare: it is cut into exchanges."""
    topology = Topology.even(n_slots=12, n_ranks=3)
    order = np.arange(12).reshape(3, 4).T.ravel()  # slot after slot on another rank
    old = np.arange(12, dtype=np.int64)[None]
    new = old.copy()
    new[0, order] = np.roll(order, -1)
    batches = make_schedule(old, new, topology, staging=staging, max_sends=staging)
    check(batches, old, new, topology, 12, staging, staging)
    travelled = sum(counts_of(batch, 3)[0].sum() for batch in batches)
    assert travelled <= 2 * 12 and len(batches) <= 11


def test_lost_experts_are_loaded_once_and_then_sent() -> None:
    topology = Topology.even(n_slots=8, n_ranks=4)
    old = np.array([[0, 1, 2, 0, 1, 2, -1, -1]])
    new = np.array([[0, 3, 3, 2, 3, 1, -1, 3]])
    batches = make_schedule(old, new, topology, staging=2, max_sends=2)
    check(batches, old, new, topology, 4, 2, 2)
    assert sum(len(batch.loads) for batch in batches) == 1


def test_sources_are_near_and_take_turns() -> None:
    topology = Topology(slots=(2,) * 6, nodes=(0, 0, 0, 1, 1, 1))
    #                rank 0   1     2     3     4     5
    old = np.array([[0, 1, 0, 1, 2, 3, 0, 1, 2, 2, 3, 3]] * 2)
    new = old.copy()
    new[:, 4], new[:, 8], new[:, 10] = 0, 0, 1  # on ranks 2, 4 and 5; experts 2 and 3 stay elsewhere
    (batch,) = make_schedule(old, new, topology, staging=4, max_sends=4)
    by_target = {(m.layer, m.target): m.source for m in batch.transfers}
    assert {by_target[layer, target] for layer in (0, 1) for target in (4, 5)} == {3}, "the node's own holder sends"
    assert {by_target[layer, 2] for layer in (0, 1)} == {0, 1}, "two holders on a node share the work"


def test_a_plan_without_an_expert_is_refused() -> None:
    topology = Topology.even(n_slots=4, n_ranks=2)
    with pytest.raises(ValueError, match=r"layer 0 has no slot for experts \[3\]"):
        make_schedule(np.array([[0, 1, 2, 3]]), np.array([[0, 1, 2, 2]]), topology, staging=1, max_sends=1)


@pytest.mark.parametrize("seed", range(20))
def test_rounds_are_as_few_as_the_busiest_rank_needs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = [(int(a), int(b)) for a, b in rng.integers(0, 9, (int(rng.integers(1, 80)), 2)) if a != b]
    found = in_rounds(pairs)
    busiest = max([*Counter(a for a, _ in pairs).values(), *Counter(b for _, b in pairs).values()], default=0)
    assert set(found) <= set(range(busiest))
    for side in (0, 1):
        assert len({(pair[side], place) for pair, place in zip(pairs, found, strict=True)}) == len(pairs)


@pytest.mark.parametrize("seed", range(10))
def test_no_order_of_ranks_locks(seed: int) -> None:
    """Ranks advance in random order; an operation ends when both ends have posted it, and a rank waits for both of a round."""
    rng = np.random.default_rng(seed)
    topology = Topology.even(n_slots=40, n_ranks=8, n_nodes=2)
    old, new = (random_placement(rng, 2, 32, topology) for _ in range(2))
    for batch in make_schedule(old, new, topology, staging=3, max_sends=3):
        mine = {r: [[m for m in g if r in (m.source, m.target)] for g in batch.rounds] for r in range(8)}
        at = dict.fromkeys(range(8), 0)  # round whose operations a rank has posted
        blocked = 0
        while any(place < len(batch.rounds) for place in at.values()):
            rank = int(rng.integers(0, 8))
            if at[rank] == len(batch.rounds):
                continue
            partners = {m.source if m.target == rank else m.target for m in mine[rank][at[rank]]}
            if all(at[partner] >= at[rank] for partner in partners):
                at[rank] += 1
                blocked = 0
            else:
                blocked += 1
                assert blocked < 10_000, f"ranks are locked at rounds {at}"


def test_a_whole_model_is_scheduled_quickly() -> None:
    rng = np.random.default_rng(0)
    topology = Topology.even(n_slots=288, n_ranks=32, n_nodes=4)
    old = random_placement(rng, 58, 256, topology)
    new = changed(rng, old, 256, topology, 0.04)
    times = []
    for _ in range(3):
        begin = time.process_time()
        batches = make_schedule(old, new, topology, staging=4, max_sends=8)
        times.append(time.process_time() - begin)
    assert len(batches) <= 40 and min(times) < 0.5, (len(batches), times)
