"""Cycles over ranks of one process: they end, decline or abort, on all ranks alike, and say so."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from rorqual.moe.eplb.live.commit import CommitError
from rorqual.moe.eplb.live.mover import _compare
from rorqual.moe.eplb.live.report import Outcome
from rorqual.moe.eplb.plan import rank_loads
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.live.placements import random_placement
from tests.moe.eplb.live.virtual import Party, Target, with_config

TOPOLOGY = Topology.even(n_slots=16, n_ranks=4, n_nodes=2)
N_EXPERTS = 12


def party(seed: int = 0, topology: Topology = TOPOLOGY, **more: object) -> tuple[Party, np.ndarray]:
    """Ranks at a random placement, whose planner wants another one."""
    rng = np.random.default_rng(seed)
    old, new = (random_placement(rng, 2, N_EXPERTS, topology, empty=0.2) for _ in range(2))
    made = Party(topology=topology, n_experts=N_EXPERTS, slots=old, **more)  # type: ignore[arg-type]
    made.plan = lambda load, now: Target(slot_to_expert=new)
    return made, new


def test_a_cycle_moves_everything() -> None:
    made, new = party()
    assert made.is_whole()
    report = made.cycle(after_step=lambda: _must(made.is_whole()))
    assert report.outcome is Outcome.ENDED and report.batches == report.of_batches > 1, report.line()
    assert np.array_equal(made.ranks[0].slot_to_expert, new) and made.is_whole(new)
    assert sum(rank.stats.received for rank in made.ranks) > 0
    assert made.ranks[1].stats.cycles == {"ended": 1, "declined": 0, "aborted": 0}
    made.close()


def _must(good: bool) -> None:
    assert good


def test_uneven_ranks_and_budgets_of_less_than_an_expert() -> None:
    topology = Topology(slots=(3, 5, 2, 6), nodes=(0, 0, 1, 1))
    made, new = party(3, topology, config=with_config(bytes_per_step=64, staging=1, max_sends=1))
    pace = made.ranks[0].mover.pace
    assert pace.pieces > 2 and pace.per_step == 1
    report = made.cycle()
    assert report.outcome is Outcome.ENDED and made.is_whole(new)
    assert report.boundaries >= pace.pieces * report.batches, "no faster than the budget"
    assert max(n for _, n in made.wires.bytes) <= 64
    made.close()


def test_loads_after_a_cycle_are_as_the_plan_predicts() -> None:
    """A plan that changes tables or weights, but not both, would have no effect (or a wrong one)."""
    made, new = party(7)
    load = np.random.default_rng(1).integers(1, 100, (2, N_EXPERTS)).astype(float)
    made.cycle()
    seen = np.zeros((2, 4))
    for rank, layers in enumerate(made.layers):
        for index, layer in enumerate(layers):  # tokens go where tables say; the rank knows its experts by their bytes
            row = made.tables[rank].slots[index]
            assert layer.holds(row[4 * rank : 4 * rank + 4].tolist())
            for expert in row[4 * rank : 4 * rank + 4]:
                if expert >= 0:
                    seen[index, rank] += load[index, expert] / (row == expert).sum()
    assert np.allclose(seen, rank_loads(new, load, TOPOLOGY))
    made.close()


def test_nothing_to_do_is_declined_and_costs_nothing() -> None:
    made, _ = party()
    made.plan = lambda load, now: Target(slot_to_expert=now, reason="0.001 s gained, 2 s to move")
    sent, before = made.wires.sent, made.bytes()
    report = made.cycle()
    assert report.outcome is Outcome.DECLINED and "2 s to move" in report.line()
    assert made.wires.sent == sent + 6 and made.bytes() == before and made.tables[0].writes == 0, "counts up, plan down, no more"
    made.close()


@pytest.mark.parametrize("kind", ["missing", "range", "shape", "raises"])
def test_a_plan_that_cannot_be_leaves_every_byte(kind: str) -> None:
    made, new = party()
    wrong = {"missing": np.where(new == 3, 4, new), "range": np.where(new == 3, N_EXPERTS, new), "shape": new[:1]}

    def plan(load: object, now: np.ndarray) -> Target:
        if kind == "raises":
            raise ValueError("the load has a hole")
        return Target(slot_to_expert=wrong[kind])

    made.plan = plan
    before = made.bytes()
    for _ in range(2):
        report = made.cycle(after_step=made.catch_up)  # else another rank's thread may be the first to know, and rank 0 says which
        assert report.outcome is Outcome.ABORTED and made.bytes() == before and made.tables[2].writes == 0
        words = {"missing": "no slot for 1 experts: 3", "range": "hold no expert of 0 to 11", "shape": "shape", "raises": "has a hole"}
        assert words[kind] in report.reason
    made.plan = lambda load, now: Target(slot_to_expert=new)
    assert made.cycle().outcome is Outcome.ENDED and made.is_whole(new), "the next cycle works"
    made.close()


def test_counts_of_all_ranks_are_summed() -> None:
    made, _ = party()
    seen = []
    made.counts = None
    for rank, balancer in enumerate(made.ranks):
        table = np.full((2, N_EXPERTS), 10**rank, dtype=np.int64)
        balancer.counts = (lambda t: lambda: t)(table) if rank % 2 else (lambda t: lambda: lambda: t)(table)  # at once, or by the worker
    made.plan = lambda load, now: seen.append(load) or Target(slot_to_expert=now)
    made.cycle()
    assert (seen[0] == 1111).all() and seen[0].shape == (2, N_EXPERTS)
    made.ranks[2].counts = lambda: np.ones(3)
    report = made.cycle()
    assert report.outcome is Outcome.ABORTED and "1 ranks have no counts" in report.reason, report.reason
    made.close()


def test_a_late_rank_is_named_and_the_cycle_is_given_up() -> None:
    made, new = party(config=with_config(patience=40), pause=0.01)
    made.faults[2] = lambda point: time.sleep(1.2) if point == "send" else None
    before = made.ranks[0].slot_to_expert
    report = made.cycle()
    assert report.outcome is Outcome.ABORTED and "patience" in report.reason and "rank 2" in report.reason, report.reason
    assert report.batches == 0 and made.is_whole(before)
    made.faults[2] = lambda point: None
    time.sleep(2.5)
    again = made.cycle()
    assert again.outcome is Outcome.ENDED and made.is_whole(new), again.line()
    made.close()


def test_a_rank_that_does_not_answer_while_planning() -> None:
    made, _ = party(config=with_config(patience=15), pause=0.02)
    made.faults[1] = lambda point: time.sleep(1.0) if point == "sum" else None
    report = made.cycle()
    assert report.outcome is Outcome.ABORTED and "rank 1" in report.reason and report.boundaries <= 17, report.reason
    made.close()


def test_a_cycle_has_a_longest_time() -> None:
    made, new = party(config=with_config(max_steps=25, bytes_per_step=64, staging=1), pause=0.005)
    before = made.ranks[0].slot_to_expert
    report = made.cycle()
    assert report.outcome is Outcome.ABORTED and 25 <= report.boundaries <= 27, report.line()
    assert made.is_whole() and (report.batches > 0 or np.array_equal(before, made.ranks[0].slot_to_expert))
    for _ in range(20):  # what is left is done in later cycles
        if made.cycle().outcome is Outcome.ENDED:
            break
    assert made.is_whole(new)
    made.close()


def test_bytes_that_change_on_the_way_are_found() -> None:
    made, new = party()
    before = made.bytes()

    def flip(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.uint8:
            tensor[37] ^= 16
        return tensor

    made.wires.corrupt = flip
    report = made.cycle()
    assert report.outcome is Outcome.ABORTED and "checksum" in " ".join(r[0].reason for r in made.reports), report.line()
    assert made.bytes() == before
    made.wires.corrupt = lambda tensor: tensor
    assert made.cycle().outcome is Outcome.ENDED and made.is_whole(new)
    made.close()


def test_a_lost_connection_ends_balancing_and_says_so() -> None:
    made, _ = party()
    before = made.bytes()
    made.wires.cut.add(3)
    report = made.cycle()
    assert report.outcome is Outcome.ABORTED and "no cycle begins again" in report.reason and made.bytes() == before
    for rank in made.ranks:
        rank.request()
    assert all(found is None for _ in range(5) for found in made.boundary()) and all(rank.cycle is None for rank in made.ranks)
    made.close()


def test_intervals_count_boundaries() -> None:
    made, _ = party(config=with_config(interval=40, first=10), pause=0.01)
    made.plan = lambda load, now: Target(slot_to_expert=now)
    for _ in range(100):
        made.boundary()
    assert [report.begun for report in made.reports[0]] == [9, 49, 89]
    made.close()


def test_a_commit_that_cannot_be_finished_is_fatal() -> None:
    made, _ = party()

    def fail(point: str) -> None:
        if point == "commit-tables":
            raise RuntimeError("the table is gone")

    made.faults[1] = fail
    with pytest.raises(CommitError, match="failed 3 times at its step .*commit-tables.*the table is gone"):
        made.cycle()
    made.close()


def test_a_rank_with_different_settings_is_refused_by_all() -> None:
    """None is left waiting for one that has raised already."""
    made, _ = party()
    with ThreadPoolExecutor(4) as pool:
        given = [made.config, with_config(staging=3), made.config, made.config]
        jobs = [pool.submit(_compare, rank.mover, config, made.slots) for rank, config in zip(made.ranks, given, strict=True)]
        for rank, job in enumerate(jobs):
            odd = "0, 2, 3" if rank == 1 else "1"
            with pytest.raises(ValueError, match=rf"rank {rank} .* different settings .* than ranks \[{odd}\]: LiveConfig"):
                job.result()
    made.close()


def test_a_budget_that_would_take_for_ever_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bytes_per_step 16 is too little for experts of .* give at least"):
        from rorqual.moe.eplb.live.pace import Pace

        Pace.of(44_000_064, 16)


def test_an_audit_finds_slots_that_hold_another_expert() -> None:
    made, new = party(2)

    def audit() -> list[str]:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda rank: rank.audit(), made.ranks))
        assert all(problems == found[0] for problems in found)
        return found[0]

    assert audit() == []
    assert made.cycle().outcome is Outcome.ENDED and audit() == [], "the same experts elsewhere"
    row = made.ranks[0].slot_to_expert[1]
    copies = next(np.flatnonzero(row == e) for e in row if (row == e).sum() > 1)
    slot = int(copies[-1])
    made.layers[slot // 4][1].scale[slot % 4] += 1  # one number of one copy
    assert audit() == [f"MoE layer 1: slot {slot} does not hold the same expert {row[slot]} as slot {copies[0]}"]
    for copy in copies:
        made.layers[int(copy) // 4][1].scale[int(copy) % 4] = 7
    assert audit() == [f"MoE layer 1: slot {copies[0]} does not hold the expert {row[slot]} of the first audit"]
    for rank in made.ranks:
        rank.request()
    made.boundary()
    with pytest.raises(RuntimeError, match="is under way"):
        made.ranks[0].audit()
    made.close()


def test_between_cycles_nobody_is_asked_and_nothing_is_spent() -> None:
    made, _ = party(config=with_config(interval=1_000_000))
    sent = made.wires.sent
    for _ in range(5):
        made.boundary()
        assert made.board.write == [None] * 4, "a vote without a cycle"
    assert made.wires.sent == sent and all(rank.mover.worker._thread is None for rank in made.ranks)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for step in range(100):
            made.ranks[0].boundary(step)
        times.append((time.perf_counter() - begin) / 100)
    assert min(times) < 50e-6, times
    print(f"{min(times) * 1e6:.2f} us a boundary")
    made.close()
