"""The fused norm against its twin, and the twin against the module."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rorqual.attention.kernels import norm, norm_torch
from rorqual.attention.norm import RMSNorm
from tests.attention.kernels.fused import codes_agree, gains, noise
from tests.kernels import casts
from tests.kernels.offline import SMEM_LIMIT, Spec, compile_reports

casts.repair()
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where no GPU is")
CASES = [
    (3, 7168, torch.bfloat16, torch.bfloat16),
    (2, 1536, torch.bfloat16, torch.float32),
    (3, 256, torch.float32, torch.float32),
    (1, 48, torch.float32, torch.float32),
    (0, 128, torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twin_is_the_module(dtype):
    module = RMSNorm(48)
    module.weight.data = gains(48, dtype=dtype)
    x, residual = noise(5, 48, dtype=dtype), noise(5, 48, seed=4, dtype=dtype)
    assert torch.equal(norm_torch.rms_norm(x, module.weight, module.eps), module(x))
    y, total = norm_torch.rms_norm(x, module.weight, module.eps, residual)
    assert torch.equal(total, x + residual) and torch.equal(y, module(x + residual))


@on_cpu
@pytest.mark.parametrize(("tokens", "width", "given", "weights"), CASES)
def test_the_kernel_is_the_twin(tokens, width, given, weights):
    x, residual, weight = noise(tokens, width, dtype=given, gap=8), noise(tokens, width, seed=4, dtype=given), gains(width, dtype=weights)
    near = {"rtol": 2**-6 if given == torch.bfloat16 else 2e-6, "atol": 0.0}
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), norm_torch.rms_norm(x, weight, 1e-6), **near)
    got, expected = norm.rms_norm(x, weight, 1e-6, residual), norm_torch.rms_norm(x, weight, 1e-6, residual)
    torch.testing.assert_close(got[0], expected[0], **near)
    assert torch.equal(got[1], expected[1])


@on_cpu
@pytest.mark.parametrize(("tokens", "width", "given", "weights"), CASES)
def test_the_quantising_kernel_is_the_twin(tokens, width, given, weights):
    x, residual, weight = noise(tokens, width, dtype=given, gap=8), noise(tokens, width, seed=4, dtype=given), gains(width, dtype=weights)
    if tokens > 1:
        x[1], residual[1] = 0, 0
    for added, keep in ((None, False), (residual, True)):
        got = norm.rms_norm_quantise(x, weight, 1e-6, added, keep=keep)
        expected = norm_torch.rms_norm_quantise(x, weight, 1e-6, added, keep=keep)
        assert got[0].dtype == torch.float8_e4m3fn and got[1].stride() == expected[1].stride()
        codes_agree(got[0].view(torch.uint8), expected[0].view(torch.uint8))
        torch.testing.assert_close(got[1], expected[1], rtol=8e-3 if given == torch.bfloat16 else 2e-6, atol=0)
        for a, b in zip(got[2:], expected[2:], strict=True):
            assert (a is None) == (b is None) == (added is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=2**-6 if given == torch.bfloat16 else 2e-6, atol=0)


def test_compiles_for_hopper():
    pointers = dict.fromkeys(("x", "residual", "weight", "y", "total"), "*bf16") | {"codes": "*fp8e4nv", "scales": "*fp32"}
    strides = {"x_stride": "i32", "residual_stride": "i32", "scale_stride": "i32"}
    specs = [
        Spec(
            fn="rorqual.attention.kernels.norm:rms_norm_kernel",
            signature={**pointers, **strides, "eps": "fp32"},
            constexprs={"W": width, "GROUPS": groups, "GROUP": 128, "ADD": True, "KEEP": True, "QUANTISE": quantise, "EARLY": True},
            aligned=(*pointers, *strides),
            options={"num_warps": warps},
        )
        for width, groups, warps, quantise in ((7168, 64, 8, False), (7168, 64, 8, True), (1536, 16, 2, True))
    ]
    for report in compile_reports(specs):
        assert report.spill_bytes == 0 and report.shared <= SMEM_LIMIT
