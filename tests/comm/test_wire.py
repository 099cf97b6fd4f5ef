"""The layout of the workspace: sizes, places, limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rorqual.comm.blocks import Blocks
from rorqual.comm.checks import PAYLOADS
from rorqual.comm.dispatcher import EPSpec
from rorqual.comm.limits import check_room, largest_max_tokens
from rorqual.comm.wire import Wire, workspace_bytes

SPEC = EPSpec(n_ranks=8, n_slots=256, hidden=7168, top_k=8, max_tokens=128, payload="fp8", dtype="bfloat16")


def test_a_production_layout() -> None:
    wire = Wire.of(SPEC)
    assert wire.row_bytes == 7168 + 4 * 56 and wire.home_pitch == 2 * 7168
    rows = wire.home_at - wire.rows_at
    assert rows == 8 * 128 * 7392 and rows < 8 << 20
    assert workspace_bytes(SPEC) == 2 * wire.channel_bytes == 44_630_528


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_regions_cover_a_channel_and_none_overlaps(payload: str, deterministic: bool) -> None:
    spec = replace(SPEC, n_ranks=3, n_slots=6, hidden=53, top_k=3, max_tokens=7, payload=payload, deterministic=deterministic)
    wire = Wire.of(spec)
    for width in (wire, wire.narrowed(4)):
        spaces = torch.zeros(wire.total_bytes, dtype=torch.uint8)
        regions = [Blocks.of(width, spaces, channel) for channel in range(spec.depth)]
        parts = [getattr(b, name) for b in regions for name in ("flags", "ids", "weights", "rows", "home")]
        for number, part in enumerate(parts, 1):
            part.view(torch.uint8).fill_(number)
        for number, part in enumerate(parts, 1):
            assert bool((part.view(torch.uint8) == number).all()), "another region was written over it"
        assert wire.row_bytes % 16 == 0 and wire.home_pitch % 16 == 0


def test_values_and_scales_are_views_of_the_rows() -> None:
    wire = Wire.of(replace(SPEC, hidden=300, max_tokens=2, n_ranks=2, n_slots=4))
    blocks = Blocks.of(wire, torch.zeros(wire.total_bytes, dtype=torch.uint8), 1)
    assert blocks.scales is not None and blocks.scales.shape == (4, 3) and blocks.values.shape == (4, 300)
    blocks.values.view(torch.uint8)[3] = 7
    blocks.scales[3] = 0.5
    row = blocks.rows[1, 1]
    assert bool((row[:300] == 7).all()) and row[300:312].view(torch.float32).tolist() == [0.5] * 3 and not row[312:].any()


def test_what_is_too_large_is_told_what_fits() -> None:
    limit = 100 << 20
    most = largest_max_tokens(SPEC, limit)
    assert workspace_bytes(replace(SPEC, max_tokens=most)) <= limit < workspace_bytes(replace(SPEC, max_tokens=most + 1))
    check_room(replace(SPEC, max_tokens=most), limit, "symm")
    with pytest.raises(ValueError, match=f"'symm': max_tokens 1024 over 8 ranks needs .* max_tokens of at most {most} fits"):
        check_room(replace(SPEC, max_tokens=1024), limit, "symm")
    assert largest_max_tokens(SPEC, 1000) == 0
    with pytest.raises(ValueError, match="not even one token fits"):
        check_room(SPEC, 1000, "symm")
