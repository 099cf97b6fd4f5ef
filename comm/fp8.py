"""FP8 e4m3 with one fp32 scale per 128 values: the activation format of DeepSeek-V3 (arXiv:2412.19437, section 3.3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 128  # values that share a scale
E4M3_MAX = 448.0
_MANTISSA, _EXPONENT = 0x7FFFFF, 0x7F800000  # bits of a float32


def power_of_two(scales: torch.Tensor) -> torch.Tensor:
    """The least power of two that is at least each of the positive float32 ``scales``; 2**-126 for smaller ones. Exact."""
    return ((scales.view(torch.int32) + _MANTISSA) & _EXPONENT).clamp(min=_MANTISSA + 1).view(torch.float32)


def quantise(x: torch.Tensor, *, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] -> (e4m3 [T, H], float32 scales [T, ceil(H / 128)]), x ~ e4m3 * scale.

    The scale is the block's largest magnitude / 448, or 1 for a block of zeros. The error of a value is at most 1/16
    of it (half a step of the 3 mantissa bits), or scale / 1024 near zero (half a step of the subnormals). With ``ue8m0``
    the scale is the next power of two from there, whose 8 exponent bits say all.
    """
    n, hidden = x.shape
    blocks = -(-hidden // BLOCK)
    padded = F.pad(x.float(), (0, blocks * BLOCK - hidden)).view(n, blocks, BLOCK)
    largest = padded.abs().amax(dim=-1)
    # By a tensor: CUDA divides by a number as a product with its rounded inverse, one bit away from the CPU.
    scales = torch.where(largest > 0, largest / torch.full_like(largest, E4M3_MAX), 1.0)
    if ue8m0:
        scales = power_of_two(scales)
    scaled = (padded / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    values = scaled.to(torch.float8_e4m3fn).view(n, blocks * BLOCK)[:, :hidden]
    return values.contiguous(), scales


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e4m3 [T, H] and float32 scales [T, ceil(H / 128)] -> [T, H] in ``dtype``."""
    hidden = values.shape[1]
    wide = scales.repeat_interleave(BLOCK, dim=1)[:, :hidden]
    return (values.float() * wide).to(dtype)
