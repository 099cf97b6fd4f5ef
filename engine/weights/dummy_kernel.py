"""``dummy.noise`` on a GPU in one pass: the same bits as the tensor operations there."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@triton.jit
def _fill(
    out, start, columns, full_columns, first_column, n, out_stride, key, golden, mixer, final, scale, mean, std, BLOCK: tl.constexpr
) -> Any:
    """``out`` [rows, columns] from the linear indices of its place in the full tensor."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // columns, at % columns
    index = (start + row) * full_columns + first_column + column
    x = index * golden + key
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * mixer
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * final
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    total = (x & 0xFFFF) + ((x >> 16) & 0xFFFF) + ((x >> 32) & 0xFFFF) + ((x >> 48) & 0xFFFF)
    value = (total - 2 * 65535).to(tl.float32) * scale * std + mean
    tl.store(out + row * out_stride + column, value.to(out.dtype.element_ty), mask=at < n)


def fill_matrix(
    out: torch.Tensor, bounds: tuple[tuple[int, int], tuple[int, int]], full_columns: int, words: tuple[int, int, int, int], *,
    scale: float, mean: float, std: float,
) -> None:  # fmt: skip
    """Fill ``out`` [r1 - r0, c1 - c0], whose place in the full matrix is ``bounds``, with noise.

    ``words`` are the stream's key and the three multipliers of the mix, as signed 64-bit integers; a value is
    ``noise * scale * std + mean``, each product and the sum rounded to float32 on its own.
    """
    (r0, _), (c0, c1) = bounds
    n = out.numel()
    if n:
        key, golden, mixer, final = words
        _fill[(triton.cdiv(n, _BLOCK),)](
            out, r0, c1 - c0, full_columns, c0, n, out.stride(0), key, golden, mixer, final, scale, mean, std,
            BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
