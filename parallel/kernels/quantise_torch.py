"""``quantise`` in plain PyTorch: the same signatures and results on any device, and the checks both share."""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCK = 128  # values that share a scale
E4M3_MAX = 448.0
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ALIGN = 16  # rows: a column of scales starts on 64 bytes


def check_rows(x: torch.Tensor) -> None:
    """Refuse what is not a float matrix with contiguous columns."""
    if x.dim() != 2 or x.dtype not in _DTYPES or (x.stride(1) != 1 and x.shape[1] > 1):
        found = f"{x.dtype} of shape {tuple(x.shape)} and strides {x.stride()}"
        raise ValueError(f"activations must be a bfloat16, float16 or float32 matrix with contiguous columns, found {found}; cast or copy")


def check_gate_up(gate_up: torch.Tensor) -> int:
    """Columns of the product; refuse what cannot be cut into a gate and an up half."""
    check_rows(gate_up)
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up needs an even number of columns (gate, then up), found {gate_up.shape[1]}; concatenate equal halves")
    return gate_up.shape[1] // 2


def empty_scales(n_rows: int, width: int, device: torch.device) -> torch.Tensor:
    """Unwritten scales [n_rows, ceil(width / 128)] for ``width`` columns of values, lying column by column."""
    pitch = max(-(-n_rows // _ALIGN), 1) * _ALIGN
    return torch.empty_strided((n_rows, -(-width // BLOCK)), (1, pitch), dtype=torch.float32, device=device)


def quantise_activation(x: torch.Tensor, *, count: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``quantise.quantise_activation``; ``count`` saves nothing here: all rows are computed."""
    check_rows(x)
    n_rows, width = x.shape
    scales = empty_scales(n_rows, width, x.device)
    blocks = F.pad(x.float(), (0, -width % BLOCK)).view(n_rows, scales.shape[1], BLOCK)
    largest = blocks.abs().amax(dim=-1) if blocks.numel() else scales
    # a number as divisor would be a multiplication by its rounded inverse on CUDA
    scales.copy_(torch.where(largest > 0, largest / torch.full_like(largest, E4M3_MAX), 1.0))
    scaled = (blocks / scales.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(n_rows, scales.shape[1] * BLOCK)[:, :width].contiguous(), scales


def silu_mul_quantise(gate_up: torch.Tensor, *, count: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``quantise.silu_mul_quantise``."""
    return quantise_activation(silu_mul(gate_up), count=count)


def silu_mul(gate_up: torch.Tensor, *, count: torch.Tensor | None = None) -> torch.Tensor:
    """See ``quantise.silu_mul``."""
    width = check_gate_up(gate_up)
    return (F.silu(gate_up[:, :width].float()) * gate_up[:, width:].float()).to(gate_up.dtype)
