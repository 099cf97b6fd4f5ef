"""Block-FP8 products by DeepGEMM; its JIT compiles a kernel for every new (N, K)."""

from __future__ import annotations

import deep_gemm
import torch

from .fp8_gemm_torch import check_operands, output
from .quantise import quantise_activation


def fp8_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As ``fp8_gemm.fp8_gemm``, but DeepGEMM gives bf16: other dtypes, and a sum with the bias, are made of rounded values.

    It takes K and N that are multiples of 128 and 64; others raise there.
    """
    check_operands(a, a_scale, b, b_scale, bias)
    result = output(a, b, torch.bfloat16, out if out_dtype == torch.bfloat16 else None)
    if len(a):
        deep_gemm.fp8_gemm_nt((a, a_scale.contiguous()), (b, b_scale), result, disable_ue8m0_cast=True)
    if bias is not None:
        result += bias
    if out_dtype == torch.bfloat16:
        return result
    return result.to(out_dtype) if out is None else out.copy_(result)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``fp8_gemm.fp8_linear``."""
    values, scales = quantise_activation(x)
    return fp8_gemm(values, scales, weight, weight_scale, out_dtype=out_dtype or x.dtype, bias=bias)
