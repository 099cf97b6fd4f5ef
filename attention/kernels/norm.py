"""Root-mean-square norm in one launch, with the residual's addition before it and FP8 rounding after it if wanted."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, overload

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ...parallel.kernels.quantise_torch import BLOCK, empty_scales
from ...parallel.kernels.tuned import config_for
from .device import quotient


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    y,
    total,
    codes,
    scales,
    x_stride,
    residual_stride,
    scale_stride,
    eps,
    W: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    QUANTISE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token a program, its values as [GROUPS, GROUP] with GROUPS * GROUP >= W, both powers of two."""
    enter(EARLY)
    given = x.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = column < W
    wide = tl.load(x + t * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + t * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        added = wide.to(given)
        tl.store(total + t * W + column, added, mask=inside)
        wide = added.to(tl.float32)
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(wide * wide, 1), 0) / W
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    normed = ((wide * inverse).to(given).to(tl.float32) * w).to(given)
    if KEEP:
        tl.store(y + t * W + column, normed, mask=inside)
    if QUANTISE:
        wide = normed.to(tl.float32)
        largest = tl.max(tl.abs(wide), 1)
        factor = tl.where(largest > 0, tl.div_rn(largest, 448.0), 1.0)
        rounded = quotient(wide, factor[:, None]).to(codes.dtype.element_ty)
        tl.store(codes + t * W + column, rounded, mask=inside)
        tl.store(scales + t + group.to(tl.int64) * scale_stride, factor, mask=group < (W + GROUP - 1) // GROUP)


def launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    y: torch.Tensor | None,
    total: torch.Tensor | None,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
    config: dict[str, Any] | None = None,
) -> None:
    """Fill those of ``y``, ``total``, ``codes`` and ``scales`` that are given; ``config`` sets num_warps."""
    tokens, width = x.shape
    if tokens == 0:
        return
    groups = triton.next_power_of_2(triton.cdiv(width, BLOCK))
    rms_norm_kernel[(tokens,)](
        x,
        residual,
        weight,
        y,
        total,
        codes,
        scales,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        0 if scales is None else scales.stride(1),
        eps,
        W=width,
        GROUPS=groups,
        GROUP=BLOCK,
        ADD=residual is not None,
        KEEP=y is not None,
        QUANTISE=codes is not None,
        **early_start(x.device),
        **(config or _config(tokens, width, codes is not None)),
    )


@lru_cache(maxsize=4096)
def _config(tokens: int, width: int, quantise: bool) -> dict[str, Any]:
    """Warps a program: for latency while programs are few, and enough for a row's registers."""
    groups = triton.next_power_of_2(triton.cdiv(width, BLOCK))
    warps = min(max(groups // (16 if tokens >= 1024 and groups <= 16 else 4), 1), 8)
    return config_for("rms_norm", {"num_warps": warps}, tokens=tokens, width=width, quantise=quantise)


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: None = None) -> torch.Tensor: ...
@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``weight * (x / sqrt(mean(x**2) + eps))``, after ``x + residual`` if a residual is given.

    The sum is rounded to the dtype of ``x`` before it is normed; the division is done in fp32 and rounded to that dtype before
    the product with ``weight``, as in ``attention.norm.RMSNorm``.

    Args:
        x: [T, W] bf16 or fp32; rows may be further apart than they are wide.
        weight: [W].
        eps: added to the mean square.
        residual: [T, W] in the dtype of ``x``, or None.

    Returns:
        The normed values [T, W] in the dtype of ``x``; with a residual, that and the sum [T, W].

    Source: arXiv:1910.07467.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if residual is None:
        launch(x, weight, eps, None, y, None, None, None)
        return y
    total = torch.empty_like(y)
    launch(x, weight, eps, residual, y, total, None, None)
    return y, total


def rms_norm_quantise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, *, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """``rms_norm`` whose result is rounded to FP8 with one scale per 128 values, ready for a block FP8 product.

    Args:
        x: [T, W] bf16 or fp32; rows may be further apart than they are wide.
        weight: [W].
        eps: added to the mean square.
        residual: [T, W] in the dtype of ``x``, or None.
        keep: return the values before FP8 rounding too.

    Returns:
        float8_e4m3fn [T, W]; fp32 scales [T, ceil(W / 128)], ``amax / 448`` (1 for a block of zeros), lying column by column as
        ``parallel.kernels.quantise`` lays them; the normed values [T, W] in the dtype of ``x``, or None without ``keep``; the sum
        ``x + residual`` [T, W], or None without a residual.
    """
    tokens, width = x.shape
    codes = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = empty_scales(tokens, width, x.device)
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device) if keep else None
    total = None if residual is None else torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    launch(x, weight, eps, residual, y, total, codes, scales)
    return codes, scales, y, total
