"""Whatever fails on one rank, at any moment of a move: all ranks have the old or the new placement, whole, and tokens go on."""

from __future__ import annotations

import os
from typing import Any

from rorqual.moe.eplb.live.points import POINTS
from tests.checkpoints import checkpoint
from tests.engine.eplb.jobs import DEBUG, DP, Found, balanced, check_whole, run
from tests.engine.parity import greedy_tokens, ragged_prompts
from tests.ranks import collect_ranks, run_ranks

N = 48
MOVES = {"policy": "random", "step_interval": 1, "num_redundant_experts": 8, "staging_experts": 24}
LEADS = ("plan", "share")  # what the first expert rank does alone
NEVER = ("load", "commit-derive")  # experts are not reloaded here, and nothing is derived from them


def failing_job(folder: str, prompts: list[list[int]], cycles: int) -> tuple[Found, list[str]]:
    """Each moment fails once, one a cycle, on the last rank or where it comes about; what did not fail is returned."""
    rank = int(os.environ["RANK"])
    left = [point for point in POINTS if point not in NEVER and (rank == 0) == (point in LEADS)] if rank in (0, 1) else []

    armed = False

    def probe(point: str) -> None:
        nonlocal armed
        armed = armed or point == "sum"  # the first moment of a cycle
        if armed and left and point == left[0]:
            armed = False
            left.pop(0)
            raise RuntimeError(f"planted at {point}")

    def prepare(llm: Any) -> None:
        llm.engine.experts.live.mover.probe = probe

    return run(folder, prompts, N, {DP: 2, **balanced(**MOVES)}, prepare=prepare, cycles=cycles), left


def test_a_fault_at_each_moment_leaves_slots_whole():
    prompts = ragged_prompts(2)
    expected = greedy_tokens(checkpoint("v32"), prompts=prompts, n=N)
    by_rank = run_ranks(failing_job, 2, str(checkpoint("v32")), prompts, 14, env=DEBUG, timeout=240.0)
    found = [rank for rank, _ in by_rank]
    assert found[0].tokens == expected * (len(found[0].tokens) // len(expected))
    check_whole(found)
    assert [left for _, left in by_rank] == [[], []]
    cycles = found[0].stats["cycles"]
    assert found[1].stats["cycles"] == cycles and cycles["aborted"] >= 10 and cycles["ended"] >= 8


def stuck_commit_job(folder: str) -> None:
    """The last rank cannot copy what has arrived, however often it tries."""

    def probe(point: str) -> None:
        if point == "commit-copy" and os.environ["RANK"] == "1":
            raise RuntimeError("planted for good")

    def prepare(llm: Any) -> None:
        llm.engine.experts.live.mover.probe = probe

    run(folder, ragged_prompts(4), 400, {DP: 2, **balanced(**MOVES)}, prepare=prepare)


def test_a_rank_that_cannot_take_its_place_ends_all_with_the_reason():
    exits = collect_ranks(stuck_commit_job, 2, str(checkpoint("v32")), env=DEBUG, timeout=120.0)
    assert all(e.code not in (0, None) for e in exits), [e.code for e in exits]
    assert all("the commit failed 3 times" in e.stderr and "planted for good" in e.stderr for e in exits), exits[0].stderr[-2000:]
