"""The fused path, run by the kernels' plain twins, against the torch path."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rorqual.attention.batch import AttentionBatch
from rorqual.attention.ops import AttentionOps
from tests.attention.common import DENSE, SPARSE, Paged, make_mla

LENGTHS = [1, 3, 8, 9, 20, 41, 300]
WIDE = dataclasses.replace(SPARSE, indexer=dataclasses.replace(SPARSE.indexer, topk=64))
NO_LORA = dataclasses.replace(DENSE, q_lora_rank=None)


def fused(config, **more):
    mla = make_mla(config, **more)
    ops = AttentionOps.load("torch")
    mla.fuse(ops)
    return mla


@pytest.mark.parametrize("config", [DENSE, SPARSE, WIDE, NO_LORA])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_fp32_equals_the_torch_path(config, chunk):
    expected = Paged(config, LENGTHS).run(make_mla(config), chunk)
    got = Paged(config, LENGTHS).run(fused(config), chunk)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 100])
def test_fp8_rows_equal_the_torch_path(chunk):
    expected = Paged(DENSE, LENGTHS, dtype="fp8").run(make_mla(DENSE), chunk)
    got = Paged(DENSE, LENGTHS, dtype="fp8").run(fused(DENSE), chunk)
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5


def test_rows_name_the_positions_the_torch_path_selects():
    there, here = Paged(SPARSE, [300]), Paged(SPARSE, [300])
    _, (positions,) = there.step(make_mla(SPARSE), [0], [300])
    _, (rows,) = here.step(fused(SPARSE), [0], [300])
    table, page = here.table[0].long(), here.cache.page_size
    expected = torch.where(positions < 0, -1, table[positions.clamp(min=0) // page] * page + positions % page)
    assert torch.equal(rows.long(), expected)


@pytest.mark.parametrize("config", [DENSE, SPARSE])
def test_a_static_batch_with_padding_gives_the_same_rows(config):
    """Decode with three padded rows on the dummy page and a bound far past the contexts."""
    one, two = Paged(config, [30, 41]), Paged(config, [30, 41])
    for paged, mla in ((one, make_mla(config)), (two, fused(config))):
        paged.step(mla, [0, 1], [29, 40])
    (a, b), _ = one.step(make_mla(config), [0, 1], [1, 1])
    mla = fused(config)
    dummy = torch.full((3, two.table.shape[1]), two.cache.dummy_page, dtype=torch.int32)
    batch = AttentionBatch.static(
        torch.tensor([29, 40, 0, 0, 0]),
        torch.arange(5),
        torch.cat((two.table, dummy)),
        two.cache.page_size,
        max_context=two.table.shape[1] * two.cache.page_size,
        n_valid=torch.tensor([2], dtype=torch.int32),
    )
    x = torch.cat((two.x[0][29:], two.x[1][40:], torch.randn(3, config.hidden)))
    with torch.inference_mode():
        out, _ = mla(x, batch, two.cache.layers[0], None)
    torch.testing.assert_close(out[:2], torch.cat((a, b)), atol=5e-6, rtol=1e-5)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("config", [DENSE, SPARSE])
def test_a_rank_without_tokens_runs_all_the_same(config):
    paged, mla = Paged(config, [4]), fused(config)
    batch = AttentionBatch.build(np.zeros(0, np.int64), np.zeros(0, np.int64), paged.table[:0], paged.cache.page_size, torch.device("cpu"))
    with torch.inference_mode():
        out, rows = mla(paged.x[0][:0], batch, paged.cache.layers[0], None)
    assert out.shape == (0, config.hidden) and rows is None


def test_a_static_batch_needs_the_fused_path():
    paged, mla = Paged(SPARSE, [4]), fused(SPARSE)
    mla.selection = "recent"
    batch = AttentionBatch.static(torch.tensor([0]), torch.tensor([0]), paged.table, paged.cache.page_size, max_context=4)
    with pytest.raises(AssertionError, match="a static batch has no tiles"):
        mla(paged.x[0][:1], batch, paged.cache.layers[0], None)
