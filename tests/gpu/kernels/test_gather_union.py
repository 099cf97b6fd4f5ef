"""The gathered union over the real link, against its twin."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import gather_union, gather_union_torch
from tests.attention.kernels.host_rows import Rows, release

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PAGE = 64


@pytest.fixture(autouse=True)
def _memory():
    yield
    release()


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


@pytest.mark.parametrize(("row", "pitch"), [(656, 656), (1152, 1152), (196, 208)])
@pytest.mark.parametrize(("tokens", "k", "context"), [(1, 5, 300), (100, 256, 6400), (300, 2048, 6399)])
def test_the_rows_are_the_twin_s(row, pitch, tokens, k, context):
    generator = torch.Generator().manual_seed(tokens)
    host, pool = Rows(100 * PAGE, row, pitch), noise(90 * PAGE, row, seed=1)
    host.bytes[:, :row] = noise(100 * PAGE, row, seed=2).cpu()
    latent = torch.randperm(90, generator=generator).int().repeat(2)[:100]
    host_pages = torch.randperm(100, generator=generator).int()
    latent[torch.rand(100, generator=generator) < 0.7] = -1
    host_pages[torch.rand(100, generator=generator) < 0.1] = -1
    positions = torch.randint(-20, context, (tokens, k), generator=generator, dtype=torch.int32)
    arguments = (positions.cuda(), latent.cuda(), host_pages.cuda(), host, pool)
    expected, expected_rows = gather_union_torch.gather_union(*arguments, page_size=PAGE, context=context)
    n = int(expected_rows.max()) + 1
    for _ in range(3):
        got, rows = gather_union.gather_union(*arguments, page_size=PAGE, context=context)
        assert got.shape == expected.shape and torch.equal(rows, expected_rows) and torch.equal(got[:n], expected[:n])
