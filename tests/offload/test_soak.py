"""A few seconds of what ``tests.offload.soak`` does for as long as one likes."""

from __future__ import annotations

import pytest

from tests.offload.soak import soak


@pytest.mark.parametrize("policy", ["host", "hybrid"])
def test_oversubscription_with_random_aborts(policy):
    totals = soak(4.0, policy)
    assert totals["requests"] >= 20 and totals["dropped"] > 0 and totals["rows unwritten"] == 0
