"""Experts move while processes compute: the short form of ``python -m tests.moe.eplb.live.prove``."""

from __future__ import annotations

import pytest

from tests.moe.eplb.live.rebalances import rebalance
from tests.ranks import run_ranks


@pytest.mark.parametrize(("world", "cycles"), [(4, 12)])
def test_outputs_never_change_and_memory_stays(world: int, cycles: int) -> None:
    found = run_ranks(rebalance, world, cycles, 3, timeout=120.0)
    assert all(each["ended"] + each["declined"] == cycles and each["ended"] > cycles // 2 for each in found)
    assert len({str(each["slots"]) for each in found}) == 1
    assert max(each["grown_tensors"] for each in found) <= 0
    assert max(each["grown_bytes"] for each in found) < 16 << 20
    assert sum(each["received"] for each in found) > cycles and max(each["longest"] for each in found) < 2000
