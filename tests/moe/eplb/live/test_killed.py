"""kill -9 of a rank while experts move: survivors plan without it, load what nobody has, and give what the oracle gives."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from rorqual.moe.eplb.live.points import POINTS
from tests.moe.eplb.live.killed import survive, write_experts
from tests.ranks import collect_ranks

WORLD = 3


def kill(folder: Path, point: str, seed: int, victim: int, world: int = WORLD) -> dict[str, Any]:
    """One job; its survivors agree and are right."""
    write_experts(str(folder), 2 * world - 1)
    exits = collect_ranks(survive, world, str(folder), seed, victim, point, 2, timeout=100.0)
    assert exits[victim].code == -signal.SIGKILL, (exits[victim].code, exits[victim].error)
    survivors = [e for e in exits if e.rank != victim]
    assert all(e.code == 0 for e in survivors), [e.error or e.stderr for e in survivors]
    first = survivors[0].result
    for each in survivors:
        assert each.result["whole"] and each.result["lost_ranks"] == (victim,)
        assert all(each.result[name] == first[name] for name in ("slots", "lost_experts", "loaded", "steps"))
    slots = first["slots"]
    assert all(row[3 * victim : 3 * victim + 3] == [-1, -1, -1] and set(row) == {-1, *range(2 * world - 1)} for row in slots)
    assert {tuple(load[:2]) for load in first["loaded"]} == set(first["lost_experts"]), "every lost expert is loaded by one rank"
    return first


@pytest.mark.parametrize(("point", "victim"), [("any", 1), ("send", 2), ("commit-copied", 0)])
def test_survivors_go_on(tmp_path: Path, point: str, victim: int) -> None:
    kill(tmp_path, point, seed=victim, victim=victim)


def all_moments(folder: Path, seed: int) -> None:
    """The long form: at every moment (``python -m tests.moe.eplb.live.prove --kills``)."""
    for number, point in enumerate(("any", *POINTS)):
        if point == "load":  # happens in a recovery only
            continue
        victim = 0 if point in ("plan", "share") else (seed + number) % WORLD
        found = kill(folder, point, seed + number, victim)
        print(
            f"rank {victim} killed at {point}: {found['doubtful']} doubtful steps, {len(found['lost_experts'])} lost experts loaded",
            flush=True,
        )  # type: ignore[arg-type]
