"""Grouped products for Hopper: which operands fit, how tiles are cut, the launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...parallel.kernels.hopper import multiprocessors
from .grouped_gemm_hopper_kernel import ROWS, grouped_kernel
from .permute_torch import RowBlocks

_STAGED = 200 * 1024  # bytes of shared memory for tiles on their way
_LAYOUTS = {bits: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)}
_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)


@lru_cache(maxsize=8)
def hopper_programs(device: torch.device) -> int:
    """SMs of a Hopper GPU; 0 for any other device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return multiprocessors(device)


def hopper_fits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the kernel takes these operands."""
    n, k = b.shape[1:]
    aligned = a.stride(0) * a.element_size() % 16 == 0 and a.data_ptr() % 16 == 0 and b.data_ptr() % 16 == 0
    shaped = n % 256 == 0 and k % 128 == 0 and a.shape[0] > 0
    return a.dtype in _DTYPES and shaped and aligned and hopper_programs(a.device) > 0


def default_config(fp8: bool, gated: bool, consumers: int) -> dict[str, Any]:
    """Launch settings: how the columns of a tile are cut into parts and passes, so that sums and products fit the registers."""
    cut = {"block_n": 128, "parts": 2, "passes": 1}
    if fp8:
        cut = {"block_n": 64, "parts": 4, "passes": 1} if consumers == 2 else {"block_n": 64, "parts": 2, "passes": 2 if gated else 1}
    return {**cut, "stages": 0, "group": 8}


def grouped_hopper(
    a: torch.Tensor, b: torch.Tensor, layout: RowBlocks, out: torch.Tensor, *,
    a_scales: torch.Tensor | None, b_scales: torch.Tensor | None, out_scales: torch.Tensor | None = None, gated: bool = False,
    config: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """out[rows of block m] = a[rows of block m] @ b[slot of block m].T, or silu(gate) * up of its halves, in FP8 if ``out_scales``.

    Arguments as checked by ``grouped_gemm``; rows of A that belong to no block are read, and change nothing.
    """
    n, k = b.shape[1:]
    fp8 = a.dtype == torch.float8_e4m3fn
    consumers = max(layout.block // ROWS, 1)
    chosen = {**default_config(fp8, gated, consumers), **(config or {})}
    parts, block_n, block_k = chosen["parts"], chosen["block_n"], 128 // a.element_size()
    stages = chosen["stages"] or _STAGED // ((consumers * ROWS + parts * block_n) * 128)
    shared = _LAYOUTS[8 * a.element_size()]
    nothing = layout.n_blocks
    n_tiles = n // 256 if gated else n // (parts * block_n)
    grouped_kernel[(min(hopper_programs(a.device), layout.max_blocks * n_tiles),)](
        TensorDescriptor(a, list(a.shape), list(a.stride()), [ROWS, block_k], shared),
        TensorDescriptor(b, [b.shape[0] * n, k], [k, 1], [block_n, block_k], shared),
        nothing if a_scales is None else a_scales, nothing if b_scales is None else b_scales,
        out, nothing if out_scales is None else out_scales,
        layout.block_slot, layout.block_row, layout.block_rows, layout.n_blocks,
        n_tiles, k // block_k, n, n // 2, 0 if a_scales is None else a_scales.stride(1), 0 if b_scales is None else b_scales.stride(0),
        out.stride(0), 0 if out_scales is None else out_scales.stride(1),
        CONSUMERS=consumers, PARTS=parts, PASSES=chosen["passes"], STAGES=stages, GROUP=chosen["group"], ROWS=ROWS,
        BLOCK_N=block_n, BLOCK_K=block_k,
        GATED=gated, QUANTISE=out_scales is not None, FP8=fp8, num_warps=4, launch_pdl=True,
    )  # fmt: skip
