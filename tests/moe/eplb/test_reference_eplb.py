"""The peer reproduces the example that EPLB publishes."""

import numpy as np
import pytest

from rorqual.moe.eplb.plan import rank_loads, replica_counts
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.reference_eplb import README, README_SHAPE, eplb, pack, replicate


def test_readme_example() -> None:
    slots = eplb(README, **README_SHAPE)
    assert slots.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert replica_counts(slots, 12)[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert rank_loads(slots, README, Topology.even(n_slots=16, n_ranks=8)).max(1).tolist() == [156.0, 179.5]


def test_groups_that_do_not_divide_mean_global() -> None:
    slots = eplb(README, n_slots=16, n_groups=3, n_nodes=2, n_ranks=8)
    assert rank_loads(slots, README, Topology.even(n_slots=16, n_ranks=8)).max(1).tolist() == [138.5, 172.0]


def test_parts() -> None:
    assert replicate([4.0, 1.0], 5) == [0, 1, 0, 0, 0]
    assert pack([1.0, 2.0, 3.0, 4.0], 2) == [[3, 0], [2, 1]]
    assert pack([1.0, 9.0], 2) == [[0], [1]]


def test_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="found 15 slots"):
        eplb(np.ones((1, 12)), n_slots=15, n_groups=1, n_nodes=1, n_ranks=8)
