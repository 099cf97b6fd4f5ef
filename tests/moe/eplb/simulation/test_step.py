"""Cost of a step, against loops over slots."""

import numpy as np
import pytest

from rorqual.moe.eplb.cost import CostModel
from rorqual.moe.eplb.simulation.step import even, floor_seconds, in_order, step_cost
from rorqual.moe.eplb.topology import Topology

COST = CostModel(token_seconds=1.0, expert_seconds=10.0, fixed_seconds=100.0)


def by_loops(counts, slots, machine, speeds):
    seconds = 0.0
    for row, placed in zip(counts, slots, strict=True):
        busy = []
        for rank in range(machine.n_ranks):
            parts = [row[e] / (placed == e).sum() for e in placed[machine.rank_of_slot == rank] if e >= 0]
            busy.append(max(sum(parts) * COST.token_seconds, sum(min(1.0, p) for p in parts) * COST.expert_seconds) / speeds[rank])
        seconds += COST.fixed_seconds + max(busy)
    return seconds


@pytest.mark.parametrize("speeds", [None, (1.0, 2.0, 0.5)])
def test_seconds_are_those_of_loops(speeds):
    rng = np.random.default_rng(0)
    machine = Topology(slots=(3, 4, 2), nodes=(0, 0, 1), speeds=speeds)
    slots = np.array([[0, 1, 2, 3, 4, 0, -1, 5, 1], [5, 4, 3, 2, 1, 0, 0, -1, 0]])
    counts = rng.integers(0, 9, (2, 6))
    found = step_cost(counts, slots, machine, COST)
    relative = np.ones(3) if speeds is None else np.array(speeds) / np.mean(speeds)
    assert found.seconds == pytest.approx(by_loops(counts, slots, machine, relative))
    assert found.tokens.sum(1) == pytest.approx(counts.sum(1))
    assert found.tokens.shape == found.activated.shape == (2, 3)
    assert even(counts, slots, machine)[slots < 0].tolist() == [0.0, 0.0]


def test_no_placement_is_below_the_floor():
    rng = np.random.default_rng(1)
    machine = Topology.even(n_slots=12, n_ranks=4)
    for _ in range(50):
        counts = rng.integers(0, 5, (3, 8)) * rng.integers(0, 2, (3, 8))
        slots = np.stack([np.concatenate([rng.permutation(8), rng.integers(0, 8, 4)]) for _ in range(3)])
        assert step_cost(counts, slots, machine, COST).seconds >= floor_seconds(counts, machine, COST) - 1e-9


@pytest.mark.parametrize("slots", [12, 13, 16, 31])
@pytest.mark.parametrize("failed", [(), (1,), (0, 3)])
def test_experts_in_order_are_all_there_and_none_is_on_a_failed_rank(slots, failed):
    machine = Topology.even(n_slots=slots, n_ranks=4).without(failed)
    if machine.usable.sum() < 12:
        with pytest.raises(ValueError, match="12 experts do not fit"):
            in_order(2, 12, machine)
        return
    placed = in_order(2, 12, machine)
    assert (placed[0] == placed[1]).all() and (placed[0][~machine.usable] == -1).all()
    assert placed[0][placed[0] >= 0].tolist() == list(range(12))
    sizes = [(placed[0][machine.rank_of_slot == rank] >= 0).sum() for rank in range(4) if rank not in failed]
    assert max(sizes) - min(sizes) <= 1
