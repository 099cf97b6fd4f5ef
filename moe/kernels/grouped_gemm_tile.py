"""Grouped products, one program a tile, for every dtype and width: fp32 (exactly), odd shapes, GPUs without TMA, few rows an expert.

With SWAP the weights take wgmma's 64-row side and the rows of tokens its narrow one, so that 16 tokens of an expert are not
padded to 64; without it tokens take the rows. Rows may be gathered from the tokens on the way in.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ...parallel.kernels.quantise import quantise_tile
from .permute_torch import Permutation, RowBlocks


@triton.jit
def _product(acc, a, b, scale_a, scale_b, SWAP: tl.constexpr, FP8: tl.constexpr):
    """acc + a @ b.T (b @ a.T with SWAP). An FP8 product of 128 values is summed on its own, scaled, then added."""
    if FP8:
        if SWAP:
            acc += tl.dot(b, a.T) * (scale_b[:, None] * scale_a[None, :])
        else:
            acc += tl.dot(a, b.T) * (scale_a[:, None] * scale_b[None, :])
    elif SWAP:
        acc = tl.dot(b, a.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["n_tiles"])
def grouped_tile_kernel(
    a, b, a_scales, b_scales, out, out_scales, sorted_index, block_slot, block_row, block_rows, n_blocks,
    n_tiles, N, K, a_stride, a_pitch, b_stride, b_scale_stride, out_stride, out_pitch,
    TOP_K: tl.constexpr, SWAP: tl.constexpr, FP8: tl.constexpr, GATED: tl.constexpr, QUANTISE: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program: one row block by BLOCK_N columns of the output, of N. GROUP row blocks share their weights in the L2 while columns go by.

    GATED: b has 2 * N rows a slot, and column n is silu(a @ b[n]) * (a @ b[N + n]).
    """
    enter(EARLY)
    pid = tl.program_id(0)
    blocks = tl.load(n_blocks)
    if pid < blocks * n_tiles:
        first = pid // (GROUP * n_tiles) * GROUP
        size = tl.minimum(blocks - first, GROUP)
        inside = pid % (GROUP * n_tiles)
        m = first + inside % size
        n = inside // size
        slot = tl.load(block_slot + m).to(tl.int64)
        row = tl.load(block_row + m)
        local = tl.arange(0, BLOCK_M)
        real = local < tl.load(block_rows + m)
        if TOP_K > 0:
            source = tl.load(sorted_index + row + local, mask=real, other=0) // TOP_K
        else:
            source = row + local
        column = n * BLOCK_N + tl.arange(0, BLOCK_N)
        wanted = column < N
        k = tl.arange(0, BLOCK_K)
        a_tile = a + source.to(tl.int64)[:, None] * a_stride + k[None, :]
        b_tile = b + slot * b_stride + column.to(tl.int64)[:, None] * K + k[None, :]
        if FP8:
            sa = a_scales + source
            sb = b_scales + slot * b_scale_stride + column // 128 * tl.cdiv(K, 128)
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
        acc1 = acc
        scale_a = tl.zeros((BLOCK_M,), tl.float32)
        scale_b = tl.zeros((BLOCK_N,), tl.float32)
        scale_b1 = scale_b
        for step in range(tl.cdiv(K, BLOCK_K)):
            left = k < K - step * BLOCK_K
            if EVEN:
                x = tl.load(a_tile, mask=real[:, None], other=0.0)
                w = tl.load(b_tile)
                if GATED:
                    w1 = tl.load(b_tile + N.to(tl.int64) * K)
            else:
                x = tl.load(a_tile, mask=real[:, None] & left[None, :], other=0.0)
                w = tl.load(b_tile, mask=wanted[:, None] & left[None, :], other=0.0)
                if GATED:
                    w1 = tl.load(b_tile + N.to(tl.int64) * K, mask=wanted[:, None] & left[None, :], other=0.0)
            if FP8:
                scale_a = tl.load(sa, mask=real, other=0.0)
                scale_b = tl.load(sb, mask=wanted, other=0.0)
                if GATED:
                    scale_b1 = tl.load(sb + N // 128 * tl.cdiv(K, 128), mask=wanted, other=0.0)
                sa += a_pitch
                sb += 1
            acc = _product(acc, x, w, scale_a, scale_b, SWAP, FP8)
            if GATED:
                acc1 = _product(acc1, x, w1, scale_a, scale_b1, SWAP, FP8)
            a_tile += BLOCK_K
            b_tile += BLOCK_K
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * acc1
        if SWAP:
            acc = acc.T
        if QUANTISE:
            value, scale = quantise_tile(acc)
            tl.store(out_scales + n * out_pitch + row + local, scale, mask=real)
        else:
            value = acc.to(out.dtype.element_ty)
        target = out + (row + local).to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(target, value, mask=real[:, None] & wanted[None, :])


def default_config(a: torch.Tensor, n: int, block: int, gated: bool) -> dict[str, Any]:
    """Launch settings by dtype, columns and row block."""
    if a.dtype == torch.float32:
        return {"swap": False, "block_n": 32, "block_k": 32, "group": 8, "num_warps": 4, "num_stages": 2}
    bytes_k = 128 // a.element_size()
    if block <= 32:
        return {"swap": n >= 64, "block_n": 128, "block_k": bytes_k, "group": 4, "num_warps": 4, "num_stages": 3}
    block_n = 64 if gated else 128
    return {"swap": False, "block_n": block_n, "block_k": bytes_k, "group": 8, "num_warps": block // 16, "num_stages": 4}


def grouped_tiles(
    a: torch.Tensor, b: torch.Tensor, layout: RowBlocks, out: torch.Tensor, *,
    a_scales: torch.Tensor | None, b_scales: torch.Tensor | None, out_scales: torch.Tensor | None = None, gather: bool = False,
    gated: bool = False, config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """out[rows of block m] = a[rows of block m] @ b[slot of block m].T, or silu(gate) * up of its halves, in FP8 if ``out_scales``.

    Arguments as checked by ``grouped_gemm``.
    """
    n, k = out.shape[1], b.shape[2]
    chosen = {**default_config(a, n, layout.block, gated), **(config or {})}
    fp8 = a_scales is not None
    block_n, block_k = 128 if out_scales is not None else chosen["block_n"], 128 if fp8 else chosen["block_k"]
    n_tiles = triton.cdiv(n, block_n)
    permutation = layout if isinstance(layout, Permutation) else None
    grouped_tile_kernel[(layout.max_blocks * n_tiles,)](
        a, b, a_scales, b_scales, out, out_scales, permutation.sorted_index if permutation is not None else None,
        layout.block_slot, layout.block_row, layout.block_rows, layout.n_blocks,
        n_tiles, n, k, a.stride(0), 0 if a_scales is None else a_scales.stride(1), b.stride(0),
        0 if b_scales is None else b_scales.stride(0), out.stride(0), 0 if out_scales is None else out_scales.stride(1),
        TOP_K=permutation.k if gather and permutation is not None else 0, SWAP=chosen["swap"], FP8=fp8,
        GATED=gated, QUANTISE=out_scales is not None, EVEN=n % block_n == 0 and k % block_k == 0, GROUP=chosen["group"],
        BLOCK_M=layout.block, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=chosen["num_warps"], num_stages=chosen["num_stages"], **early_start(a.device),
    )  # fmt: skip
