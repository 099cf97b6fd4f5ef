"""Grouped products in plain PyTorch: one product a slot, in fp32 or wider. Checks that both versions share."""

from __future__ import annotations

from typing import Any

import torch

from .permute_torch import Permutation, RowBlocks, segment_blocks

FP8 = torch.float8_e4m3fn
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
SCALED = 128


def check_operands(
    a: torch.Tensor, b: torch.Tensor, layout: RowBlocks, a_scales: torch.Tensor | None, b_scales: torch.Tensor | None, gather: bool
) -> None:
    """Refuse operands that do not fit each other; says what was found."""
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[2] or a.dtype != b.dtype:
        found = f"{a.dtype} {tuple(a.shape)} by {b.dtype} {tuple(b.shape)}"
        raise ValueError(f"a grouped product takes a [rows, K] by b [S, N, K] of one dtype, found {found}; cast or reshape them")
    if not b.is_contiguous() or a.stride(1) != 1:
        raise ValueError(f"rows of K must be contiguous and b without gaps, found strides {a.stride()} and {b.stride()}; copy them")
    scaled = a.dtype == FP8
    if scaled != (a_scales is not None) or scaled != (b_scales is not None) or (not scaled and a.dtype not in _PLAIN):
        raise ValueError(
            f"{FP8} operands take both scales and {_PLAIN} ones none, found {a.dtype} with {a_scales is not None}, {b_scales is not None}"
        )
    if a_scales is not None and b_scales is not None:
        blocks = (-(-b.shape[1] // SCALED), -(-b.shape[2] // SCALED))
        if (
            tuple(a_scales.shape) != (a.shape[0], blocks[1])
            or tuple(b_scales.shape) != (b.shape[0], *blocks)
            or not b_scales.is_contiguous()
        ):
            found = f"{tuple(a_scales.shape)} and {tuple(b_scales.shape)}"
            raise ValueError(
                f"scales must be [{a.shape[0]}, {blocks[1]}] and [{b.shape[0]}, {blocks[0]}, {blocks[1]}] contiguous, found {found}"
            )
    if gather and not isinstance(layout, Permutation):
        raise ValueError("only a Permutation says which token a row holds; permute the choices first, or copy the rows")


def _wide(values: torch.Tensor, scales: torch.Tensor | None, like: torch.dtype) -> torch.Tensor:
    """Values in fp32 (or ``like`` where wider), scales applied to blocks of columns (and of rows, for weights)."""
    wide = values.to(like)
    if scales is None:
        return wide
    spread = scales.to(like).repeat_interleave(SCALED, dim=-1)[..., : values.shape[-1]]
    if values.dim() == 3:
        spread = spread.repeat_interleave(SCALED, dim=1)[:, : values.shape[1]]
    return wide * spread


def grouped_gemm(
    a: torch.Tensor, b: torch.Tensor, layout: RowBlocks, *,
    a_scales: torch.Tensor | None = None, b_scales: torch.Tensor | None = None, gather: bool = False,
    out_dtype: torch.dtype | None = None, config: dict[str, Any] | None = None,
) -> torch.Tensor:  # fmt: skip
    """See ``grouped_gemm.grouped_gemm``; rows of no block are zeros, and float64 scales make everything float64."""
    check_operands(a, b, layout, a_scales, b_scales, gather)
    wide = torch.float64 if out_dtype == torch.float64 else torch.float32
    rows = _wide(a, a_scales, wide)
    if gather and isinstance(layout, Permutation):
        index = layout.sorted_index.long().clamp(min=0) // max(layout.k, 1)
        rows = rows[index] if len(rows) else rows.new_zeros(len(index), a.shape[1])
    out = rows.new_zeros((rows.shape[0], b.shape[1]))
    table = torch.stack([layout.block_slot, layout.block_row, layout.block_rows]).tolist()
    for slot, row, n in zip(*table, strict=True):
        if slot >= 0:
            weight = _wide(b[slot : slot + 1], None if b_scales is None else b_scales[slot : slot + 1], wide)[0]
            out[row : row + n] = rows[row : row + n] @ weight.t()
    return out.to(out_dtype or (torch.bfloat16 if a.dtype == FP8 else a.dtype))


def grouped_gemm_masked(
    a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, *, block: int = 64,
    a_scales: torch.Tensor | None = None, b_scales: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    config: dict[str, Any] | None = None,
) -> torch.Tensor:  # fmt: skip
    """See ``grouped_gemm.grouped_gemm_masked``."""
    slots, rows, width = a.shape
    layout = segment_blocks(counts, slots * rows, block, stride=rows)
    scales = None if a_scales is None else a_scales.reshape(slots * rows, -1)
    out = grouped_gemm(a.reshape(-1, width), b, layout, a_scales=scales, b_scales=b_scales, out_dtype=out_dtype)
    return out.view(slots, rows, -1)
