"""``fp8_gemm`` in plain PyTorch: the same signatures, the promoted sum written out, and the checks both share."""

from __future__ import annotations

import torch

from .quantise_torch import BLOCK, quantise_activation

_OUT = (torch.bfloat16, torch.float16, torch.float32)


def check_operands(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Refuse operands that do not fit together."""
    e4m3 = a.dtype == b.dtype == torch.float8_e4m3fn
    if e4m3 and bias is None and a.dim() == b.dim() == 2 and a.stride(1) == b.stride(1) == b_scale.stride(-1) == 1:
        (n_rows, width), (n_features, also) = a.shape, b.shape
        blocks = -(-width // BLOCK)
        fits = a_scale.shape == (n_rows, blocks) and b_scale.shape == (-(-n_features // BLOCK), blocks)
        if fits and width == also and width and n_features and a_scale.dtype == b_scale.dtype == torch.float32:
            return  # the usual case, in few steps: this is on the path of every layer
    if a.dtype != torch.float8_e4m3fn or b.dtype != torch.float8_e4m3fn:
        raise ValueError(f"both operands must be float8_e4m3fn, found {a.dtype} and {b.dtype}; quantise them (quantise_activation)")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"operands must be [M, K] and [N, K], found {tuple(a.shape)} and {tuple(b.shape)}; pass the weight untransposed")
    (n_rows, width), n_features = a.shape, b.shape[0]
    if not width or not n_features:
        raise ValueError(f"N and K must be positive, found N = {n_features}, K = {width}; skip the product of nothing")
    blocks = -(-width // BLOCK)
    wanted = (n_rows, blocks), (-(-n_features // BLOCK), blocks)
    if (tuple(a_scale.shape), tuple(b_scale.shape)) != wanted or a_scale.dtype != torch.float32 or b_scale.dtype != torch.float32:
        found = f"{a_scale.dtype} {tuple(a_scale.shape)} and {b_scale.dtype} {tuple(b_scale.shape)}"
        raise ValueError(f"scales must be float32 of shapes {wanted[0]} and {wanted[1]}, found {found}; decode or cut them to these")
    if a.stride(1) != 1 or b.stride(1) != 1 or b_scale.stride(1) != 1:
        raise ValueError("the columns of both operands and of the weight's scales must be contiguous; copy what is transposed")
    if bias is not None and (bias.shape != (n_features,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be contiguous of shape ({n_features},), found {tuple(bias.shape)}; one value an output column")


def output(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    """``out`` after checks, or a new one."""
    if out_dtype not in _OUT:
        raise ValueError(f"out_dtype must be one of bfloat16, float16, float32, found {out_dtype}; cast afterwards")
    if out is None:
        return torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if out.shape != (a.shape[0], b.shape[0]) or out.dtype != out_dtype or out.stride(1) != 1:
        wanted = f"{out_dtype} of shape {(a.shape[0], b.shape[0])} with contiguous columns"
        raise ValueError(f"out must be {wanted}, found {out.dtype} {tuple(out.shape)} with strides {out.stride()}; allocate it so")
    return out


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
    """See ``fp8_gemm.fp8_gemm``: sum over blocks of K of a_scale * b_scale * (a . b), in float32."""
    check_operands(a, a_scale, b, b_scale, bias)
    out = output(a, b, out_dtype, out)
    total = torch.zeros(out.shape, dtype=torch.float32, device=a.device)
    for block in range(a_scale.shape[1]):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        feature_scale = b_scale[:, block].repeat_interleave(BLOCK)[: b.shape[0]]
        total += (a[:, part].float() @ b[:, part].float().T) * (a_scale[:, block, None] * feature_scale)
    return out.copy_(total if bias is None else total + bias.float())


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
