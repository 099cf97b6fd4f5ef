"""Plans and bounds of small cases against the optimum that a solver proves."""

import pytest

pytest.importorskip("scipy")

from tests.moe.eplb.planner.milp import case, compare  # noqa: E402


@pytest.mark.parametrize("seed", range(8))
def test_plan_is_the_optimum_of_small_cases(seed: int) -> None:
    load, topology = case(seed)
    low, best, ours = compare(load, topology)
    assert low <= best * (1 + 1e-6)  # the bound is one
    assert best <= ours * (1 + 1e-6)  # the solver's model is of the same problem
    assert ours <= best * 1.03
