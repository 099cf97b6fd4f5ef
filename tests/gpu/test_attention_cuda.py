"""Attention on CUDA against the same modules on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rorqual.attention.ops import AttentionOps
from tests.attention.common import DENSE, SPARSE, Paged, make_mla

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
LENGTHS = [1, 3, 8, 9, 20, 41, 300]
WIDE = dataclasses.replace(SPARSE, indexer=dataclasses.replace(SPARSE.indexer, topk=64))


@pytest.mark.parametrize("config", [DENSE, SPARSE, WIDE])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_fp32_equals_the_cpu(config, chunk):
    expected = Paged(config, LENGTHS).run(make_mla(config), 300)
    got = Paged(config, LENGTHS, device=torch.device("cuda")).run(make_mla(config).cuda(), chunk)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_narrow_formats_stay_near_the_cpu(dtype, compute):
    expected = Paged(DENSE, LENGTHS, dtype=dtype, compute=compute).run(make_mla(DENSE, dtype=compute), 100)
    got = Paged(DENSE, LENGTHS, dtype=dtype, compute=compute, device=torch.device("cuda")).run(make_mla(DENSE, dtype=compute).cuda(), 100)
    for a, b in zip(got, expected, strict=True):
        assert float((a.cpu().float() - b.float()).norm() / b.float().norm()) < (0.02 if compute == torch.bfloat16 else 0.005)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_selection_equals_the_cpu(dtype):
    (expected,) = Paged(SPARSE, [300], dtype=dtype).step(make_mla(SPARSE), [0], [300])[1]
    (got,) = Paged(SPARSE, [300], dtype=dtype, device=torch.device("cuda")).step(make_mla(SPARSE).cuda(), [0], [300])[1]
    same = sum(len(set(a) & set(b)) for a, b in zip(got.cpu().tolist(), expected.tolist(), strict=True))
    assert same >= 0.995 * sum(len(set(a)) for a in expected.tolist())


def fused(config, dtype=torch.float32):
    mla = make_mla(config, dtype=dtype).cuda()
    mla.fuse(AttentionOps.load("triton"))
    return mla


@pytest.mark.parametrize("config", [DENSE, SPARSE, WIDE])
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_fused_fp32_equals_the_cpu(config, chunk):
    expected = Paged(config, LENGTHS).run(make_mla(config), chunk)
    got = Paged(config, LENGTHS, device=torch.device("cuda")).run(fused(config), chunk)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_fused_narrow_rows_stay_near_the_cpu(dtype):
    expected = Paged(DENSE, LENGTHS, dtype=dtype, compute=torch.bfloat16).run(make_mla(DENSE, dtype=torch.bfloat16), 100)
    got = Paged(DENSE, LENGTHS, dtype=dtype, compute=torch.bfloat16, device=torch.device("cuda")).run(fused(DENSE, torch.bfloat16), 100)
    for a, b in zip(got, expected, strict=True):
        assert float((a.cpu().float() - b.float()).norm() / b.float().norm()) < 0.02
