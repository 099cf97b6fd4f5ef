"""Load of the link by rate of misses: the arithmetic of DeepSeek-V3.2's 61 layers."""

from __future__ import annotations

import pytest

from rorqual.engine.offload.link_load import link_loads


def test_loads_of_61_layers_of_fp8_rows() -> None:
    loads = link_loads(layers=61, topk=2048, row_bytes=656, link_bytes_per_s=50e9, context=131072)
    assert [load.miss_rate for load in loads] == [0.067, 0.134, 0.30, 0.50, 0.65]
    assert [round(load.rows) for load in loads] == [137, 274, 614, 1024, 1331]
    assert [round(load.bytes_per_token / 1e6, 1) for load in loads] == [5.5, 11.0, 24.6, 41.0, 53.3]
    for load, cap in zip(loads, [9106, 4553, 2034, 1220, 939], strict=True):
        assert load.tokens_per_s == pytest.approx(cap, rel=1e-3)


def test_contexts_that_are_read_whole_fetch_nothing() -> None:
    assert link_loads(layers=61, topk=2048, row_bytes=656, link_bytes_per_s=50e9, context=2048) == []
