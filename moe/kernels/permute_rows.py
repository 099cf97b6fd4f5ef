"""Rows of tokens to the rows of a permutation, in block FP8 where wanted, and the weighted sum on the way back."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ...parallel.kernels.quantise import quantise_tile
from ...parallel.kernels.quantise_torch import BLOCK as SCALED
from ...parallel.kernels.quantise_torch import empty_scales
from .permute_torch import Permutation, row_form


@triton.jit(do_not_specialize=["step_stride"])
def permute_rows_kernel(
    x, steps, place, rows, scales, width, x_stride, step_stride, scale_pitch,
    K: tl.constexpr, CHOICES: tl.constexpr, FORM: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (t, g): GROUPS * 128 columns of token t to the rows of all its choices, converted once; nothing for a token without.

    FORM: "plain" converts to the rows' dtype, "quantise" makes block FP8, "scaled" takes block FP8 as it is, "widen" undoes it.
    """
    enter(EARLY)
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, CHOICES)
    if tl.max(tl.load(place + token * K + choice, mask=choice < K, other=-1), axis=0) >= 0:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask, there = column < width, group * BLOCK < width
        tile = tl.load(x + token * x_stride + column, mask=mask, other=0.0)
        if FORM == "quantise":
            tile, scale = quantise_tile(tile.to(tl.float32))
        if FORM == "scaled" or FORM == "widen":
            scale = tl.load(steps + token * step_stride + group, mask=there, other=0.0)
        if FORM == "widen":
            tile = (tile.to(tl.float32) * scale[:, None]).to(rows.dtype.element_ty)
        for c in range(K):
            row = tl.load(place + token * K + c).to(tl.int64)
            if row >= 0:
                tl.store(rows + row * width + column, tile, mask=mask)
                if FORM == "quantise" or FORM == "scaled":
                    tl.store(scales + group.to(tl.int64) * scale_pitch + row, scale, mask=there)


def permute_rows(
    x: torch.Tensor, layout: Permutation, *,
    quantise: bool = False, x_scales: torch.Tensor | None = None, dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The rows of a layout, copied from the tokens.

    Args:
        x: [T, K] floats, or e4m3 with ``x_scales``; rows may be strided.
        quantise: the rows are block FP8, as ``parallel.kernels.quantise`` makes them; what is FP8 already is copied.
        x_scales: float32 [T, ceil(K / 128)], one for each 128 values of an e4m3 ``x``; rows may be strided.
        dtype: of the rows where they are not FP8; x's by default.

    Returns:
        (rows [B * block, K], None) or (e4m3 [B * block, K], float32 scales [B * block, ceil(K / 128)] lying column by column).
        Padding rows keep whatever their memory held.
    """
    n, width = layout.sorted_index.shape[0], x.shape[1]
    form = row_form(x, x_scales, quantise)
    rows = torch.empty((n, width), dtype=torch.float8_e4m3fn if quantise else dtype or x.dtype, device=x.device)
    scales = empty_scales(n, width, x.device) if quantise else None
    groups = 8 if x.shape[0] > 64 else 2
    if x.shape[0] and layout.k and width:
        source, target = (x.view(torch.uint8), rows.view(torch.uint8)) if form == "scaled" else (x, rows)
        permute_rows_kernel[(x.shape[0], triton.cdiv(width, groups * SCALED))](
            source, x_scales, layout.place, target, scales, width,
            x.stride(0), 0 if x_scales is None else x_scales.stride(0), 0 if scales is None else scales.stride(1),
            K=layout.k, CHOICES=triton.next_power_of_2(layout.k), FORM=form, GROUPS=groups, BLOCK=SCALED,
            num_warps=groups // 2, **early_start(x.device),
        )  # fmt: skip
    return rows, scales


@triton.jit(do_not_specialize=["width"])
def unpermute_kernel(
    y, place, weights, out, width, y_stride, weight_stride,
    K: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (t, c): BLOCK columns of token t. A lower row is a lower slot, so rows in ascending order are slots in ascending order."""
    enter(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    choice = tl.arange(0, CHOICES)
    row = tl.load(place + token * K + choice, mask=choice < K, other=-1)
    weight = tl.load(weights + token * weight_stride + choice, mask=choice < K, other=0.0)
    key = tl.where(row < 0, 2147483647, row)
    before = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (choice[None, :] < choice[:, None]))
    rank = tl.sum(before.to(tl.int32), axis=1)
    total = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(K):
        picked = rank == c
        source = tl.max(tl.where(picked, row, -1), axis=0)
        factor = tl.sum(tl.where(picked, weight, 0.0), axis=0)
        values = tl.load(y + source.to(tl.int64) * y_stride + column, mask=mask & (source >= 0), other=0.0).to(tl.float32)
        total += tl.where(source >= 0, factor, 0.0) * values
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=mask)


def unpermute(y: torch.Tensor, place: torch.Tensor, weights: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
    """Every token's weighted sum over its choices, in fp32, slots ascending.

    Args:
        y: [rows, H] outputs of the experts, bf16, fp16 or fp32.
        place: int32 [T, k] row of every choice, -1 for none (it adds nothing).
        weights: float32 [T, k].

    Returns:
        [T, H] in ``out_dtype``; zeros for a token without choices.
    """
    n, k = place.shape
    out = torch.empty((n, y.shape[1]), dtype=out_dtype, device=y.device)
    if n and out.shape[1]:
        block = min(triton.next_power_of_2(out.shape[1]), 512)
        unpermute_kernel[(n, triton.cdiv(out.shape[1], block))](
            y, place, weights, out, out.shape[1], y.stride(0), weights.stride(0),
            K=k, CHOICES=triton.next_power_of_2(max(k, 1)), BLOCK=block, num_warps=4, **early_start(y.device),
        )  # fmt: skip
    return out
