"""Plain PyTorch twin of ``norm``."""

from __future__ import annotations

from typing import overload

import torch

from ...parallel.kernels.quantise_torch import quantise_activation


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: None = None) -> torch.Tensor: ...
@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Root-mean-square norm, after adding ``residual`` if given: see ``norm.rms_norm``, which does the same in one launch."""
    total = x if residual is None else x + residual
    wide = total.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = (weight * (wide * inverse).to(x.dtype)).to(x.dtype)
    return y if residual is None else (y, total)


def rms_norm_quantise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, *, keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The norm's result in FP8 with scales: see ``norm.rms_norm_quantise``, which does the same in one launch."""
    total = x if residual is None else x + residual
    y = rms_norm(total, weight, eps)
    codes, scales = quantise_activation(y)
    return codes, scales, y if keep else None, None if residual is None else total
