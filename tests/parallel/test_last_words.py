"""What ranks tell before a failed job ends."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from rorqual.engine.plan import StepPlan
from rorqual.parallel.grid import Grid, GridSpec
from rorqual.parallel.last_words import last_words, table
from rorqual.parallel.progress import Progress
from rorqual.parallel.watchdog import guard
from tests.ranks import collect_ranks


def batch() -> StepPlan:
    """One decode row and a prefill row of five tokens."""
    rows = {"slots": np.arange(2, dtype=np.int32), "starts": np.array([4, 0], np.int32), "counts": np.array([1, 5], np.int32)}
    return StepPlan(step=17, samples=np.array([True, False]), dp_tokens=np.array([6, 0], np.int32), **rows)


def stuck_in_a_kernel(bad: int) -> None:
    grid = Grid.create(GridSpec(dp=2), torch.device("cpu"), 2.0)
    with guard(grid):
        grid.progress.step, grid.progress.batch = 17, batch().brief
        grid.world.all_reduce(torch.ones(3))
        if grid.rank == bad:
            time.sleep(60)
        grid.world.all_reduce(torch.ones(3))


def test_every_rank_tells_its_batch_step_and_last_collective() -> None:
    for e in collect_ranks(stuck_in_a_kernel, 2, 1, timeout=60.0):
        assert e.code == 1, e
        state = next(line for line in e.stderr.splitlines() if line.startswith(f"rank {e.rank}: state: at step 17"))
        assert "batch: 1 decode rows, 1 prefill rows of 5 tokens; tokens of all replicas [6, 0]; collectives entered:" in state
        assert "all_gather of group world" in state or "all_reduce of group world" in state, state
        assert "main thread, innermost last:" in e.stderr and "in stuck_in_a_kernel" in e.stderr
        if e.rank == 0:
            assert "last heartbeats of the other ranks:" in e.stderr
            assert any(line.startswith("  rank 1: ") and "batch: 1 decode rows" in line for line in e.stderr.splitlines()), e.stderr


def test_a_rank_that_has_run_nothing_has_words_too() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(last_words(Progress(rank=0))))
    thread.start()
    thread.join(10)
    assert "state: at step 0, before its first collective; batch: none; collectives entered: none" in found[0]
    assert "test_last_words.py" in found[0] or "threading.py" in found[0]  # where the main thread was


def test_words_about_a_batch_never_cost_the_heartbeat() -> None:
    def wrong() -> str:
        raise IndexError("boolean index did not match")

    progress = Progress(rank=0, batch=wrong)
    assert "unknown (IndexError: boolean index did not match)" in progress.encode(1)


def test_the_table_has_a_line_for_each_rank() -> None:
    records = {3: {**Progress(rank=3, step=9).record(), "beat": 4}, 1: {**Progress(rank=1).record(), "batch": "no rows"}}
    lines = table(records, lambda rank: rank / 2).splitlines()
    assert lines[1].startswith("  rank 1: 0.5 s ago at step 0") and lines[1].endswith("batch: no rows")
    assert lines[2].startswith("  rank 3: 1.5 s ago at step 9") and lines[2].endswith("batch: none")


@pytest.mark.parametrize("rows", [0, 2])
def test_a_plan_in_few_words(rows: int) -> None:
    plan = batch() if rows else StepPlan(step=1, dp_tokens=np.array([3], np.int32))
    assert plan.brief().startswith("1 decode rows, 1 prefill rows of 5 tokens;" if rows else "no rows; tokens of all replicas [3]")
