"""Products of a few rows with a small weight on a GPU, against fp64."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("triton")

from rorqual.parallel.kernels.wide_product import MOST_OUTPUTS, wide_product  # noqa: E402
from rorqual.parallel.linear import WideWeight  # noqa: E402


@pytest.mark.parametrize(("columns", "width"), [(64, 7168), (256, 7168), (3, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_fp64(columns, width, dtype):
    x, weight = (torch.randn(n, width, device="cuda").to(dtype) for n in (5, columns))
    got = wide_product(x, weight)
    torch.testing.assert_close(got.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-5 * width**0.5)
    assert torch.equal(torch.cat([wide_product(row[None], weight) for row in x]), got)


def test_few_rows_and_many_are_near():
    """On either side of where the router changes from this to a matrix product."""
    few = MOST_OUTPUTS // 256
    weight, wide = torch.randn(256, 7168, device="cuda").bfloat16().float(), WideWeight()
    wide.settle(weight)
    wide.fuse()
    x = torch.randn(few + 1, 7168, device="cuda").bfloat16()
    assert torch.equal(wide.product(x[:few], weight), wide_product(x[:few], weight.bfloat16()))
    torch.testing.assert_close(wide.product(x[:few], weight), wide.product(x, weight)[:few], rtol=1e-4, atol=1e-3)
