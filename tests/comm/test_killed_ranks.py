"""kill -9 of a rank at a random moment: survivors report it within the deadline, or go on without it; nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.comm.killing import going_on, until_failure
from tests.ranks import collect_ranks

WORLD, TIMEOUT_MS = 3, 1500
KILLS = int(os.environ.get("RORQUAL_TEST_KILLS", "2"))  # of either kind


@pytest.mark.parametrize("seed", range(KILLS))
def test_survivors_report_within_the_deadline(seed: int) -> None:
    before = set(Path("/dev/shm").iterdir())
    exits = collect_ranks(until_failure, WORLD, seed, "shm", WORLD, TIMEOUT_MS, timeout=40.0)
    victim = seed % WORLD
    assert exits[victim].code == -signal.SIGKILL
    survivors = [e for e in exits if e.rank != victim]
    assert all(e.code == 0 for e in survivors), [e.error or e.stderr for e in survivors]
    named = [e.result[0] for e in survivors]
    assert victim in named and set(named) <= set(range(WORLD)), named  # who stopped because of it may be named by another
    assert all(e.result[1] == 1 and e.result[2] < 2 * TIMEOUT_MS / 1000 + 1.5 for e in survivors), [e.result for e in survivors]
    assert {path for path in set(Path("/dev/shm").iterdir()) - before if "rorqual" in path.name} == set()


@pytest.mark.parametrize("seed", range(7, 7 + KILLS))
def test_survivors_go_on(seed: int) -> None:
    exits = collect_ranks(going_on, WORLD, seed, "shm", WORLD, TIMEOUT_MS, timeout=40.0)
    victim = seed % WORLD
    assert exits[victim].code == -signal.SIGKILL
    mask = [rank != victim for rank in range(WORLD)]
    survivors = [e for e in exits if e.rank != victim]
    assert all(e.result == (mask, 8) for e in survivors), [(e.result, e.error or e.stderr) for e in survivors]
