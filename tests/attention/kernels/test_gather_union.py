"""The gathered union of a prefill chunk's rows against its twin and plain sets."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import gather_union, gather_union_torch
from tests.attention.kernels.host_rows import Rows, noise

MODULES = [gather_union_torch]
if not torch.cuda.is_available():
    MODULES.append(gather_union)
PAGE = 8
LATENT = torch.tensor([3, -1, -1, 9, -1, -1], dtype=torch.int32)
HOST = torch.tensor([7, 2, -1, 0, 5, 1], dtype=torch.int32)  # page 2 is nowhere, pages 0 and 3 are on both sides


def row_of(position: int, host: Rows, pool: torch.Tensor) -> torch.Tensor | None:
    page, offset = divmod(position, PAGE)
    if LATENT[page] >= 0:
        return pool[int(LATENT[page]) * PAGE + offset]
    return host.bytes[int(HOST[page]) * PAGE + offset, : host.row_bytes] if HOST[page] >= 0 else None


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("row", "pitch"), [(656, 656), (68, 72)])
@pytest.mark.parametrize("context", [44, 48])
def test_every_position_finds_its_row(module, row, pitch, context):
    host, pool = Rows(64, row, pitch).noise(1), noise(80, row, 2)
    positions = torch.randint(-3, context, (5, 6), dtype=torch.int32, generator=torch.Generator().manual_seed(4))
    scratch, rows = module.gather_union(positions, LATENT, HOST, host, pool, page_size=PAGE, context=context)
    assert scratch.shape == (min(30, context), row) and scratch.dtype == torch.uint8 and rows.dtype == torch.int32
    there = sorted({p for p in positions.flatten().tolist() if p >= 0 and row_of(p, host, pool) is not None})
    for p, r in zip(positions.flatten().tolist(), rows.flatten().tolist(), strict=True):
        assert r == (there.index(p) if p in there else -1)
        if r >= 0:
            assert torch.equal(scratch[r], row_of(p, host, pool))


@pytest.mark.parametrize("module", MODULES)
def test_no_positions(module):
    host, pool = Rows(64, 64).noise(1), noise(80, 64, 2)
    none = torch.full((3, 4), -1, dtype=torch.int32)
    _, rows = module.gather_union(none, LATENT, HOST, host, pool, page_size=PAGE, context=48)
    assert bool((rows == -1).all())
    scratch, rows = module.gather_union(none[:0], LATENT, HOST, host, pool, page_size=PAGE, context=48)
    assert scratch.shape == (0, 64) and rows.shape == (0, 4)


@pytest.mark.parametrize("module", [gather_union, gather_union_torch])
def test_what_does_not_fit_is_refused(module):
    host, pool = Rows(64, 64), noise(80, 64, 2)
    positions = torch.zeros(2, 3, dtype=torch.int32)
    for arguments, words in (
        ((positions.long(), LATENT, HOST, host, pool), "positions must be contiguous int32"),
        ((positions[0], LATENT, HOST, host, pool), "positions must be \\[T, k\\]"),
        ((positions, LATENT[:2], HOST, host, pool), "table rows"),
        ((positions, LATENT, HOST, host, pool[:, :48]), "pool must be"),
    ):
        with pytest.raises(ValueError, match=words):
            module.gather_union(*arguments, page_size=PAGE, context=48)
