"""Replicas for slots that a plan leaves empty."""

import numpy as np
import pytest

from rorqual.moe.eplb.assess import arrivals
from rorqual.moe.eplb.plan import rank_loads
from rorqual.moe.eplb.planner.fill import fill
from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.validate import count_duplicates, validate

LOAD = np.random.default_rng(3).lognormal(size=(6, 16))


def holed(machine, seed=0):
    rng = np.random.default_rng(seed)
    slots = np.full((6, machine.n_slots), -1)
    for row in slots:
        usable = np.flatnonzero(machine.usable)
        row[rng.permutation(usable)[:16]] = rng.permutation(16)
    return slots


@pytest.mark.parametrize(
    "machine", [Topology.even(n_slots=24, n_ranks=4), Topology(slots=(9, 8, 7), nodes=(0, 0, 1), speeds=(2.0, 1.0, 1.0))]
)
def test_every_slot_is_filled_and_no_rank_has_an_expert_twice(machine):
    filled = fill(holed(machine), LOAD, machine)
    assert (filled >= 0).all() and validate(filled, 16, machine) == []
    assert not count_duplicates(filled, 16, machine).any()


def test_the_best_replica_is_taken():
    machine = Topology.even(n_slots=4, n_ranks=2)
    filled = fill(np.array([[0, 1, 2, -1]]), np.array([[10.0, 4.0, 1.0]]), machine)
    assert filled.tolist() == [[0, 1, 2, 0]]  # half of expert 0: 9 and 6; of expert 1 it would be 12 and 3


def test_failed_ranks_stay_empty_and_what_a_rank_has_is_kept_within_the_moves_that_are_left():
    machine = Topology.even(n_slots=24, n_ranks=4).without([2])
    start = holed(machine)
    before = fill(start, LOAD, machine)
    again = fill(start, LOAD, machine, previous=before, most_moves=0)
    assert (again[:, ~machine.usable] == -1).all() and (again[:, machine.usable] >= 0).all()
    assert arrivals(before, again, 16, machine).sum() == 0
    busiest = [rank_loads(one, LOAD, machine).max(1).mean() for one in (start, before)]
    assert busiest[1] < busiest[0]


def test_a_rank_with_all_experts_gets_one_twice():
    machine = Topology(slots=(3, 1), nodes=(0, 0))
    filled = fill(np.array([[0, 1, -1, 0]]), np.array([[5.0, 3.0]]), machine)
    assert filled[0, 2] in (0, 1)
