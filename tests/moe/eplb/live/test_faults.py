"""A rank fails at each moment of a cycle: afterwards the old or the new placement is whole on all ranks, and the next cycle works."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rorqual.moe.eplb.live.points import COMMITTING, DECIDING, PLANNING, POINTS, PREPARING
from rorqual.moe.eplb.live.report import Outcome
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.live.placements import random_placement
from tests.moe.eplb.live.virtual import Party, Target

TOPOLOGY = Topology.even(n_slots=12, n_ranks=3)
LEADER_ONLY = ("plan", "share")


class Failing:
    """Raises at the ``which``-th time that ``point`` is reached, ``times`` times in a row."""

    def __init__(self, point: str, which: int, times: int = 1) -> None:
        self.point, self.left, self.times = point, which, times
        self.raised = 0

    def __call__(self, point: str) -> None:
        if point != self.point:
            return
        self.left -= 1
        if self.left < 0 and self.raised < self.times:
            self.raised += 1
            raise OSError(f"injected at {point}")


def party(seed: int) -> tuple[Party, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    old, new = (random_placement(rng, 2, 9, TOPOLOGY, empty=0.3) for _ in range(2))
    made = Party(topology=TOPOLOGY, n_experts=9, slots=old)
    made.plan = lambda load, now: Target(slot_to_expert=new)
    return made, old, new


def must_be_whole(made: Party) -> None:
    assert made.is_whole()


@pytest.mark.parametrize("point", [p for p in POINTS if p != "load"])  # nothing is loaded but after ranks are lost
def test_a_fault_leaves_a_whole_placement(point: str) -> None:
    """On every rank, at the first and at a later time that it comes to the moment."""
    hit = 0
    for rank, which in itertools.product(range(3), (0, 2)):
        if point in LEADER_ONLY and rank:
            continue
        made, old, new = party(10 * rank + which)
        made.faults[rank] = fault = Failing(point, which)
        report = made.cycle(after_step=lambda made=made: must_be_whole(made))
        now = made.ranks[0].slot_to_expert
        if not fault.raised:  # it comes to this moment less often
            assert report.outcome is Outcome.ENDED
        elif point in COMMITTING or point == "decide":  # forward only
            assert report.outcome is Outcome.ENDED and np.array_equal(now, new), report.line()
        else:
            assert report.outcome is Outcome.ABORTED and "injected" in made.reports[rank][0].reason, report.line()
            assert report.batches or np.array_equal(now, old)
        assert made.is_whole(now)
        hit += fault.raised
        made.faults[rank] = lambda _: None
        assert made.cycle().outcome is (Outcome.DECLINED if np.array_equal(now, new) else Outcome.ENDED)
        assert made.is_whole(new)
        made.close()
    assert hit >= 1 if point in LEADER_ONLY else hit >= 3, f"{point} was never reached"


def test_moments_are_all_there_are() -> None:
    made, _, _ = party(1)
    seen: set[str] = set()
    for rank in range(3):
        made.faults[rank] = lambda point: seen.add(point)
    made.cycle()
    assert seen | {"load"} == set(POINTS) == {*PLANNING, *PREPARING, *DECIDING, *COMMITTING}
    made.close()


def test_every_copy_of_a_commit_can_fail_twice() -> None:
    """As often as it is tried again, at each of its copies and on all ranks at once."""
    for which in range(6):
        made, _, new = party(which)
        made.faults = [Failing("commit-copied" if rank % 2 else "commit-copy", which, times=2) for rank in range(3)]
        assert made.cycle(after_step=lambda made=made: must_be_whole(made)).outcome is Outcome.ENDED
        assert made.is_whole(new)
        made.close()
