"""The validator finds every way in which a map can be wrong."""

import numpy as np
import pytest

from rorqual.moe.eplb.topology import Topology
from rorqual.moe.eplb.validate import count_duplicates, validate

TOPOLOGY = Topology.even(n_slots=6, n_ranks=3)
GOOD = np.array([[0, 1, 2, 3, 0, -1], [3, 2, 1, 0, 2, 3]])


def test_good_map() -> None:
    assert validate(GOOD, 4, TOPOLOGY) == []


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        (GOOD[0], "found int64 [6]"),
        (GOOD[:, :5], "integers [layers, 6]"),
        (GOOD.astype(float), "found float64 [2, 6]"),
        (np.where(GOOD == 3, 4, GOOD), "3 slots hold no expert of 0 to 3: layer 0 slot 3 holds 4"),
        (np.where(GOOD == -1, -2, GOOD), "layer 0 slot 5 holds -2"),
        (np.where(GOOD == 1, 0, GOOD), "layer 0 has no slot for 1 experts: 1"),
        (np.array([[0, 0, 1, 2, 3, -1]]), "1 slots repeat an expert of their own rank, in layers 0"),
    ],
)
def test_wrong_maps(slots: np.ndarray, said: str) -> None:
    assert any(said in problem for problem in validate(slots, 4, TOPOLOGY))


def test_failed_ranks_hold_nothing_and_give_nothing() -> None:
    problems = validate(np.array([[0, 1, 2, 3, 0, 1]]), 4, TOPOLOGY.without([1]))
    assert "failed ranks [1]" in problems[0]
    assert "no slot for 2 experts: 2, 3" in problems[1]


def test_duplicates_may_be_allowed() -> None:
    slots = np.array([[0, 0, 1, 2, 3, 3]])
    assert validate(slots, 4, TOPOLOGY, duplicates=False) == []
    assert count_duplicates(slots, 4, TOPOLOGY).tolist() == [2]
