"""The small kernels of ``hits_first``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _found_kernel(rows, target, count, mark, stamp, found, n_mark, K: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid (R); one request a program."""
    request = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    n, now = tl.load(count + request), tl.load(stamp)
    fetched = tl.load(target + request * WIDTH + i, mask=(i < n) & (i < WIDTH), other=0)
    tl.store(mark + fetched, now, mask=(i < n) & (i < WIDTH))
    tl.debug_barrier()
    row = tl.load(rows + request * K + i, mask=i < K, other=-1)
    hot = (row >= 0) & (row < n_mark)
    fresh = tl.load(mark + row, mask=hot, other=0) == now
    tl.store(found + request * K + i, tl.where(hot & fresh, -1, row), mask=i < K)


@triton.jit  # type: ignore[untyped-decorator]
def _join_kernel(a, lse_a, b, lse_b, out, C, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid (T * H); one row of C values a program."""
    at = tl.program_id(0).to(tl.int64)
    x, y = tl.load(lse_a + at), tl.load(lse_b + at)
    high = tl.maximum(x, y)
    high = tl.where(high == float("-inf"), 0.0, high)
    wx, wy = tl.exp(x - high), tl.exp(y - high)
    total = tl.where(wx + wy == 0.0, 1.0, wx + wy)
    c = tl.arange(0, BLOCK)
    u = tl.load(a + at * C + c, mask=c < C, other=0.0).to(tl.float32)
    v = tl.load(b + at * C + c, mask=c < C, other=0.0).to(tl.float32)
    tl.store(out + at * C + c, ((u * wx + v * wy) / total).to(out.dtype.element_ty), mask=c < C)


def found_rows(rows: torch.Tensor, target: torch.Tensor, count: torch.Tensor, mark: torch.Tensor, stamp: torch.Tensor) -> torch.Tensor:
    """``hits_first.found_rows`` on CUDA."""
    found = torch.empty_like(rows)
    k, width = rows.shape[1], target.shape[1]
    size = triton.next_power_of_2(max(k, width))
    _found_kernel[(len(rows),)](rows, target, count, mark, stamp, found, len(mark), K=k, WIDTH=width, N=size, num_warps=8)
    return found


def join(a: torch.Tensor, lse_a: torch.Tensor, b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """``hits_first.join`` on CUDA."""
    out = torch.empty_like(a)
    tokens, heads, width = a.shape
    _join_kernel[(tokens * heads,)](a, lse_a, b, lse_b, out, width, BLOCK=triton.next_power_of_2(width), num_warps=2)
    return out
