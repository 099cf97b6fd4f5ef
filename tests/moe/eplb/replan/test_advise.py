"""How many spare slots are enough."""

import numpy as np
import pytest

from rorqual.moe.eplb.cost import CostModel
from rorqual.moe.eplb.replan.advise import advise
from tests.moe.eplb.replan.cases import skewed


@pytest.mark.parametrize(("ranks", "slots"), [(32, 288), (72, 288), (144, 432)])
def test_the_fewest_spare_slots(ranks: int, slots: int) -> None:
    """32 spare slots do up to 72 ranks of DeepSeek-V3's experts; 144 ranks need three slots each."""
    load = skewed(4)
    advice = advise(load, n_ranks=ranks, target=1.02)
    assert advice.chosen is not None and advice.chosen.slots == slots
    smaller = [one for one in advice.options if one.rank_bytes < advice.chosen.rank_bytes]
    assert all(one.imbalance > 1.02 for one in smaller)
    assert advice.chosen.rank_bytes == slots // ranks * 4 * CostModel().expert_bytes
    assert advice.chosen.spare_bytes == (slots - 256) * 4 * CostModel().expert_bytes
    assert "<-" in advice.text()


def test_pareto_marks_what_nothing_betters() -> None:
    advice = advise(skewed(2, 32), n_ranks=8, slots=(33, 36, 40, 41, 48), target=1.0)
    for one in advice.options:
        bettered = any(
            other.rank_bytes <= one.rank_bytes
            and other.imbalance <= one.imbalance
            and (other.rank_bytes, other.imbalance) != (one.rank_bytes, one.imbalance)
            for other in advice.options
        )
        assert one.pareto == (not bettered)
    assert [one.slots for one in advice.options] == [33, 36, 40, 41, 48]
    assert all(one.imbalance >= one.bound - 1e-9 for one in advice.options)


def test_no_option_is_enough() -> None:
    load = np.array([[100.0, 1.0, 1.0, 1.0]])
    advice = advise(load, n_ranks=2, slots=(4,), target=1.01)
    assert advice.chosen is None and "none of these reaches" in advice.text()


def test_wrong_questions() -> None:
    load = np.ones((1, 8))
    for wrong, words in (({"slots": ()}, "slots"), ({"target": 0.5}, "target"), ({"slots": (4,)}, "slots")):
        with pytest.raises(ValueError, match=words):
            advise(load, n_ranks=2, **wrong)
