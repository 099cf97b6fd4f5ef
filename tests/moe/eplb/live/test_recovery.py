"""What survivors do about a move that was under way, and about experts that nobody holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rorqual.moe.eplb.live.agreement import Table
from rorqual.moe.eplb.live.decision import Decision, Status, Verdict, Vote, decide
from rorqual.moe.eplb.live.recovery import Recovery, RecoveryError, RecoveryReport, Replan, keep_and_fill
from rorqual.moe.eplb.replan.recovery import recover as planned
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.validate import validate
from tests.moe.eplb.live.placements import random_placement
from tests.moe.eplb.live.toy import expert_values
from tests.moe.eplb.live.virtual import Party, Target

TOPOLOGY = Topology.even(n_slots=16, n_ranks=4)
N_EXPERTS, VICTIM = 9, 3


def meeting(survivors: Sequence[int]) -> dict[int, Callable[[Sequence[int]], Table]]:
    """``exchange`` of each survivor, for threads."""
    board: Table = [None] * TOPOLOGY.n_ranks
    barrier = threading.Barrier(len(survivors))

    def exchange(rank: int, words: Sequence[int]) -> Table:
        board[rank] = list(words)
        barrier.wait(20)
        found = list(board)
        barrier.wait(20)
        return found

    return {rank: (lambda words, rank=rank: exchange(rank, words)) for rank in survivors}


def recover(
    made: Party, load: Callable[[int, int], object] | None = None, replan: Replan = lambda now, left: keep_and_fill(now, left, N_EXPERTS)
) -> list[RecoveryReport]:
    survivors = [rank for rank in range(TOPOLOGY.n_ranks) if rank != VICTIM]
    made.wires.cut.add(VICTIM)
    exchange = meeting(survivors)

    def run(rank: int) -> RecoveryReport:
        recovery = Recovery(
            balancer=made.ranks[rank], exchange=exchange[rank], replan=replan,
            load_expert=load or (lambda layer, expert: expert_values(layer, expert)), step=99, deadline_s=20.0,
        )  # fmt: skip
        return recovery.run([VICTIM])

    with ThreadPoolExecutor(len(survivors)) as pool:
        return list(pool.map(run, survivors))


def party(seed: int) -> tuple[Party, np.ndarray]:
    rng = np.random.default_rng(seed)
    old, new = (random_placement(rng, 2, N_EXPERTS, TOPOLOGY) for _ in range(2))
    made = Party(topology=TOPOLOGY, n_experts=N_EXPERTS, slots=old)
    made.plan = lambda load, now: Target(slot_to_expert=new)
    return made, new


def check(made: Party, reports: Sequence[RecoveryReport]) -> np.ndarray:
    first = made.ranks[0].slot_to_expert
    topology = TOPOLOGY.without([VICTIM])
    assert validate(first, N_EXPERTS, topology, duplicates=False) == []
    for rank, report in zip(range(3), reports, strict=True):
        assert np.array_equal(made.ranks[rank].slot_to_expert, first) and np.array_equal(made.tables[rank].slots, first)
        assert report.loaded == reports[0].loaded and report.lost_experts == reports[0].lost_experts
        for layer, experts in enumerate(made.layers[rank]):
            assert experts.holds(first[layer, 4 * rank : 4 * rank + 4].tolist())
    return first


def test_between_cycles() -> None:
    made, _ = party(0)
    held = made.slots
    reports = recover(made)
    now = check(made, reports)
    lost = {(layer, e) for layer in range(2) for e in range(N_EXPERTS) if e not in np.delete(held[layer], np.s_[12:16])}
    assert set(reports[0].lost_experts) == lost == {load[:2] for load in reports[0].loaded}
    changed = (now != np.where(TOPOLOGY.without([VICTIM]).usable, held, -1)).sum()
    assert changed == len(lost), "only what is missing moves"
    assert "ranks [3] are lost" in reports[0].line() and sum(report.loaded_here for report in reports) == len(lost)
    made.close()


def test_with_the_planner_that_weighs_loads() -> None:
    made, _ = party(5)
    load = np.random.default_rng(0).uniform(1, 9, (2, N_EXPERTS))
    reports = recover(made, replan=lambda now, left: planned(load, TOPOLOGY, previous=now, failed=[VICTIM])[0].slot_to_expert)
    check(made, reports)
    made.close()


@pytest.mark.parametrize("heard", [(0,), (1, 2), (0, 1, 2)])
def test_who_heard_the_last_vote_decides_for_all(heard: tuple[int, ...]) -> None:
    """The victim told its vote to some: they have committed the batch, and began the next. The others, who were ready, follow."""
    made, _ = party(1)
    for rank in made.ranks:
        rank.request()
    while not all(rank.cycle is not None and rank.cycle.moving is not None and rank.cycle.job.done for rank in made.ranks):
        made.boundary()
    assert made.ranks[0].cycle is not None and made.ranks[0].cycle.batch == 0
    after = made.ranks[0].cycle.moving.after
    before = made.ranks[0].slot_to_expert
    for rank in heard:
        made.ranks[rank].apply(Decision(verdict=Verdict.GO), made.step)
    reports = recover(made)
    now = check(made, reports)
    usable = TOPOLOGY.without([VICTIM]).usable
    kept = (now == after)[:, usable].mean()
    assert kept >= 0.8 and kept > (now == before)[:, usable].mean(), "the batch is committed on all"
    assert made.ranks[0].stats.cycles["aborted"] == 1
    for rank in made.ranks[:3]:
        assert rank.cycle is None and rank.serial == made.ranks[0].serial
    made.close()


def test_a_batch_that_nobody_committed_is_given_up() -> None:
    made, _ = party(2)
    for rank in made.ranks:
        rank.request()
    while not all(rank.cycle is not None and rank.cycle.moving is not None for rank in made.ranks):
        made.boundary()
    reports = recover(made)
    check(made, reports)
    assert made.ranks[1].stats.batches == reports[1].batches
    made.close()


def test_an_expert_that_cannot_be_loaded_ends_all_survivors() -> None:
    made, _ = party(0)

    def load(layer: int, expert: int) -> object:
        raise OSError("the disk is gone")

    with pytest.raises(RecoveryError, match="the disk is gone|it failed on another rank"):
        recover(made, load)
    made.close()


def test_recovery_can_be_replayed_and_says_when_there_is_no_room() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        slots = random_placement(rng, 3, N_EXPERTS, TOPOLOGY, empty=0.3)
        left = TOPOLOGY.without([int(rng.integers(0, 4))])
        now = np.where(left.usable, slots, -1)
        one, two = keep_and_fill(now, left, N_EXPERTS), keep_and_fill(now.copy(), left, N_EXPERTS)
        assert np.array_equal(one, two) and validate(one, N_EXPERTS, left, duplicates=False) == []
    with pytest.raises(ValueError, match="the 8 slots of the ranks that are left cannot hold 9 experts"):
        keep_and_fill(now, TOPOLOGY.without([1, 2]), N_EXPERTS)


def words(serial: int, status: Status, detail: int = 0, last: Verdict = Verdict.WAIT) -> list[int]:
    return Vote(serial=serial, status=status, detail=detail, last=last).words


def test_decisions() -> None:
    def verdict(*rows: list[int] | None, waited: int = 3) -> Decision:
        return decide(5, list(rows), waited=waited, patience=10, ranks=[7, 8, 9][: len(rows)])

    ready, working = words(5, Status.READY), words(5, Status.WORKING, 1 + 0)
    assert verdict(ready, ready, ready).verdict is Verdict.GO
    assert verdict(ready, working, ready).verdict is Verdict.WAIT
    late = verdict(ready, working, ready, waited=10)
    assert late.verdict is Verdict.STOP and "rank 8 (waiting for rank 7)" in late.reason
    assert verdict(ready, None, ready, waited=10).verdict is Verdict.WAIT, "nothing is decided without a rank"
    assert verdict(ready, None, words(6, Status.WORKING, last=Verdict.GO)).verdict is Verdict.GO, "but what others decided holds"
    assert verdict(ready, None, words(6, Status.IDLE, last=Verdict.STOP)).verdict is Verdict.STOP
    failed = verdict(ready, words(5, Status.FAILED, 1 + 2), ready)
    assert failed.verdict is Verdict.STOP and "rank 8 (because of rank 9)" in failed.reason and not failed.broken
    assert verdict(ready, words(5, Status.BROKEN), ready).broken
    differ = verdict(words(5, Status.READY, 1), words(5, Status.READY, 2))
    assert differ.verdict is Verdict.STOP and "different things: 1 on rank 7, 2 on rank 8" in differ.reason
