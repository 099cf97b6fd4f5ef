"""Products of groups of rows, each with the weights of its expert: contiguous, gathered and masked layouts.

All three are row blocks to the kernels: (slot, first row, rows in use), in slot order, counted on the device. FP8 operands
are summed in blocks of 128 of K, each scaled and added in fp32 (arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch

from .grouped_gemm_hopper import grouped_hopper, hopper_fits
from .grouped_gemm_tile import grouped_tiles
from .grouped_gemm_torch import FP8, check_operands
from .permute import segment_blocks
from .permute_torch import RowBlocks


def multiply(
    a: torch.Tensor, b: torch.Tensor, layout: RowBlocks, out: torch.Tensor, *,
    a_scales: torch.Tensor | None, b_scales: torch.Tensor | None, out_scales: torch.Tensor | None = None, gated: bool = False,
    gather: bool = False, config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """``grouped_gemm`` into ``out``, unchecked; ``gated`` makes it silu(gate) * up of b's halves, in FP8 where ``out_scales`` are given.

    Blocks of 64 rows and more go to the Hopper kernel where it fits; with fewer the plain kernel loads weights as fast and pads less.
    """
    settings = dict(config or {})
    path = settings.pop("path", None) or ("hopper" if layout.block >= 64 else "tile")
    scales = {"a_scales": a_scales, "b_scales": b_scales, "out_scales": out_scales}
    if path == "hopper" and not gather and hopper_fits(a, b):
        grouped_hopper(a, b, layout, out, **scales, gated=gated, config=settings)
    else:
        grouped_tiles(a, b, layout, out, **scales, gated=gated, gather=gather, config=settings)


def grouped_gemm(
    a: torch.Tensor, b: torch.Tensor, layout: RowBlocks, *,
    a_scales: torch.Tensor | None = None, b_scales: torch.Tensor | None = None, gather: bool = False,
    out_dtype: torch.dtype | None = None, config: dict[str, Any] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Row r of slot s: ``a[r] @ b[s].T``, accumulated in fp32.

    Args:
        a: [rows, K] float8_e4m3fn, bf16, fp16 or fp32; with ``gather`` the tokens [T, K] themselves, of which row r takes
            ``sorted_index[r] // k``.
        b: [S, N, K] contiguous, of a's dtype.
        layout: which rows belong to which slot.
        a_scales: float32 [rows, ceil(K / 128)], lying column by column; for FP8 only.
        b_scales: float32 [S, ceil(N / 128), ceil(K / 128)]; for FP8 only.
        gather: read A through the layout (a ``Permutation``).
        out_dtype: of the result; by default a's, bf16 for FP8.
        config: launch settings; ``{"path": "tile"}`` asks for the plain kernel, ``"hopper"`` for the other.

    Returns:
        [rows, N] (with ``gather`` as many rows as the layout). Rows of no choice keep whatever their memory held.

    Raises:
        ValueError: operands do not fit each other.
    """
    check_operands(a, b, layout, a_scales, b_scales, gather)
    rows = layout.sorted_index.shape[0] if gather else a.shape[0]  # type: ignore[attr-defined]
    dtype = out_dtype or (torch.bfloat16 if a.dtype == FP8 else a.dtype)
    out = torch.empty((rows, b.shape[1]), dtype=dtype, device=a.device)
    if out.numel() == 0 or a.shape[0] == 0:
        return out
    multiply(a, b, layout, out, a_scales=a_scales, b_scales=b_scales, gather=gather, config=config)
    return out


def grouped_gemm_masked(
    a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor, *, block: int = 64,
    a_scales: torch.Tensor | None = None, b_scales: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    config: dict[str, Any] | None = None,
) -> torch.Tensor:  # fmt: skip
    """``out[s, r] = a[s, r] @ b[s].T`` for r < counts[s].

    Args:
        a: [S, max_m, K] contiguous.
        b: [S, N, K].
        counts: int32 or int64 [S] on the device, at most max_m each.
        block: rows of a block; 64 for few rows a slot.
        a_scales: float32 [S, max_m, ceil(K / 128)], a view of [S * max_m, ..] lying column by column; for FP8 only.
        b_scales, out_dtype, config: as in ``grouped_gemm``.

    Returns:
        [S, max_m, N]; rows from counts[s] on keep whatever their memory held.

    Raises:
        ValueError: operands do not fit each other.
    """
    slots, rows, width = a.shape
    layout = segment_blocks(counts, slots * rows, block, stride=rows)
    scales = None if a_scales is None else a_scales.view(slots * rows, -1)
    out = grouped_gemm(a.view(-1, width), b, layout, a_scales=scales, b_scales=b_scales, out_dtype=out_dtype, config=config)
    return out.view(slots, rows, -1)
