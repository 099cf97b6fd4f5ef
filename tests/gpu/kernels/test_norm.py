"""The fused norm on the GPU, against its twin on the CPU and the module on the GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import norm, norm_torch
from rorqual.attention.norm import RMSNorm
from tests.attention.kernels.fused import codes_agree, gains, noise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
EPS = 1e-6


def inputs(tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (rows with NaN between them), residual, weight; on the CPU."""
    return noise(tokens, width, dtype=dtype, gap=64), noise(tokens, width, seed=4, dtype=dtype), gains(width, dtype=dtype)


def strided(x: torch.Tensor) -> torch.Tensor:
    """``x`` on the GPU with NaN after every row."""
    wide = torch.full((x.shape[0], x.shape[1] + 64), float("nan"), dtype=x.dtype, device="cuda")
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("width", [7168, 1536, 256])
def test_the_norm_is_the_twin_s(tokens, width):
    for dtype in (torch.bfloat16, torch.float32):
        x, residual, weight = inputs(tokens, width, dtype)
        near = {"rtol": 2**-6 if dtype == torch.bfloat16 else 2e-6, "atol": 0.0}  # two roundings, each a step at most
        got = norm.rms_norm(strided(x), weight.cuda(), EPS)
        torch.testing.assert_close(got.cpu(), norm_torch.rms_norm(x, weight, EPS), **near)
        y, total = norm.rms_norm(strided(x), weight.cuda(), EPS, residual.cuda())
        expected, expected_total = norm_torch.rms_norm(x, weight, EPS, residual)
        assert torch.equal(total.cpu(), expected_total)
        torch.testing.assert_close(y.cpu(), expected, **near)
        same = (y.cpu() == expected).float().mean()
        assert dtype == torch.float32 or float(same) > 0.99, "bf16 results differ where the sum's order moves a rounding, no more"
        module = RMSNorm(width).cuda()
        module.weight.data = weight.cuda()
        torch.testing.assert_close(got, module(x.cuda()).detach(), **near)


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize(("width", "keep"), [(7168, True), (1536, False)])
def test_the_quantised_norm_is_the_twin_s(tokens, width, keep):
    x, residual, weight = inputs(tokens, width, torch.bfloat16)
    x[0, :128], residual[0, :128] = 0, 0
    got = norm.rms_norm_quantise(strided(x), weight.cuda(), EPS, residual.cuda() if keep else None, keep=keep)
    expected = norm_torch.rms_norm_quantise(x, weight, EPS, residual if keep else None, keep=keep)
    codes_agree(got[0].cpu().view(torch.uint8), expected[0].view(torch.uint8), share=0.02)
    torch.testing.assert_close(got[1].cpu(), expected[1], rtol=8e-3, atol=0)
    assert float(got[1][0, 0]) == 1.0
    wide = [c.float() * s.float().repeat_interleave(128, 1) for c, s in ((got[0].cpu(), got[1].cpu()), expected[:2])]
    assert float((wide[0] - wide[1]).norm() / wide[1].norm()) < 1e-2
    if keep:
        torch.testing.assert_close(got[2].cpu(), expected[2], rtol=2**-6, atol=0)
        assert torch.equal(got[3].cpu(), expected[3])


def test_replays_are_equal():
    x, residual, weight = (tensor.cuda() for tensor in inputs(64, 7168, torch.bfloat16))
    expected = norm.rms_norm_quantise(x, weight, EPS, residual, keep=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = norm.rms_norm_quantise(x, weight, EPS, residual, keep=True)
    for _ in range(25):
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        assert all(
            torch.equal(
                a.view(torch.uint8) if a.dtype == torch.float8_e4m3fn else a, b.view(torch.uint8) if b.dtype == torch.float8_e4m3fn else b
            )
            for a, b in zip(captured, expected, strict=True)
        )
