"""Attention over selected latent rows for many tokens: chooses the kernel that fits heads, widths and cache format.

Twin: ``sparse_attention_torch.sparse_attention``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
import triton

from ...parallel.kernels.tuned import config_for
from ..kv.layout import n_scales
from .sparse_attention_torch import check_arguments
from .sparse_prefill_few import sparse_prefill_few_kernel
from .sparse_prefill_pair import sparse_prefill_pair_kernel
from .sparse_prefill_tile import sparse_prefill_tile_kernel
from .sparse_prefill_unpack import unpack
from .sparse_prefill_wide import sparse_prefill_wide_kernel

_LOG2_E = 1.4426950408889634
_UNPACK_FROM = 1 << 19  # chosen rows from which dequantising each of them once pays


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How to launch. ``kernel``: "pair" (float rows, 16 heads a program), "few" (FP8, 16 or 32), "wide" (64) or "tile" (anything)."""

    kernel: str = "tile"
    head_block: int = 16
    key_block: int = 64  # of "tile"
    warps: int = 4  # of "tile" all, else those that gather
    stages: int = 2  # of "tile"
    registers: int = 72  # of a gathering thread
    compute_registers: int = 160
    fence: bool = False  # the gathering side, not the reading side, makes its writes visible to the tensor cores


def sparse_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float,
    sink: torch.Tensor | None = None,
    n_keys: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every query attends the pool rows it names: (out [T, H, C] in q's dtype, lse fp32 [T, H]).

    Arguments, results and errors are those of ``sparse_attention_torch.sparse_attention``; ``scale`` must be positive.
    ``launch`` overrides the choice of kernel. Made for hundreds of tokens and more: one token is one program a head block.
    """
    check_arguments(q_latent, q_rope, pool, rows, sink=sink, n_keys=n_keys)
    tokens, heads, latent = q_latent.shape
    out = torch.empty((tokens, heads, latent), dtype=q_latent.dtype, device=q_latent.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q_latent.device)
    if tokens * heads == 0:
        return out, lse
    rows = rows if rows.is_contiguous() else rows.contiguous()
    if launch is None and pool.dtype == torch.uint8 and rows.numel() >= _UNPACK_FROM and hopper_fits(q_latent, q_rope, pool):
        plain = unpack(pool, rows, latent, q_rope.shape[2], q_latent.dtype)
        launch = choose(q_latent, q_rope, plain.pool)
        _RUN[launch.kernel](q_latent, q_rope, plain.pool, plain.rows, scale, sink, n_keys, out, lse, plain.fits, launch)
        if plain.fails is None:
            return out, lse
        gate, launch = plain.fails, choose(q_latent, q_rope, pool)
    else:
        gate, launch = None, launch or choose(q_latent, q_rope, pool)
    _RUN[launch.kernel](q_latent, q_rope, pool, rows, scale, sink, n_keys, out, lse, gate, launch)
    return out, lse


def choose(q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor) -> Launch:
    """The launch for these operands: Hopper's own kernels where widths, dtypes and alignment allow."""
    heads, latent = q_latent.shape[1:]
    fp8 = pool.dtype == torch.uint8
    if hopper_fits(q_latent, q_rope, pool):
        if fp8 and heads <= 32:
            default = Launch(kernel="few", head_block=16 if heads <= 16 else 32, warps=8, registers=128, fence=True)
        elif fp8:
            default = Launch(kernel="wide", head_block=64, registers=128, fence=True)
        else:
            default = Launch(kernel="pair") if heads <= 16 else Launch(kernel="wide", head_block=64, compute_registers=192)
        return Launch(**config_for("sparse_prefill", asdict(default), heads=heads, fp8=fp8))
    launch = Launch(head_block=16 if heads <= 16 else min(64, triton.next_power_of_2(heads)))
    if q_latent.dtype == torch.float32 or latent > 512:
        launch = replace(launch, head_block=16, key_block=16, warps=8)
    elif launch.head_block > 16:
        launch = replace(launch, warps=8)
    return launch


def hopper_fits(q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor) -> bool:
    """Whether the kernels written for Hopper take these operands."""
    if q_latent.device.type != "cuda" or torch.cuda.get_device_capability(q_latent.device) != (9, 0):
        return False
    dtypes = (torch.bfloat16,) if pool.dtype == torch.uint8 else (torch.bfloat16, torch.float16)
    size = pool.element_size()
    return (
        q_latent.dtype in dtypes
        and pool.dtype in (torch.uint8, q_latent.dtype)
        and (q_latent.shape[2], q_rope.shape[2]) == (512, 64)
        and pool.data_ptr() % 16 == 0
        and pool.stride(0) * size % 16 == 0
        and all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 and t.stride(1) % 8 == 0 for t in (q_latent, q_rope))
    )


def _strides(q_latent: torch.Tensor, q_rope: torch.Tensor) -> tuple[int, int, int, int]:
    return q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1)


def _wide(
    q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, scale: float,
    sink: torch.Tensor | None, n_keys: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, gate: torch.Tensor | None, launch: Launch,
) -> None:  # fmt: skip
    tokens, heads, latent = q_latent.shape
    fp8 = pool.dtype == torch.uint8
    words = pool.view(torch.int32) if fp8 else pool
    scales, tails = (pool.view(torch.float32), pool.view(torch.bfloat16)) if fp8 else (None, None)
    sparse_prefill_wide_kernel[(tokens * triton.cdiv(heads, 64),)](
        q_latent, q_rope, words, scales, tails, rows, n_keys, sink, out, lse, gate, None, None,
        len(pool), rows.shape[1], scale * _LOG2_E, heads, *_strides(q_latent, q_rope),
        stride=words.stride(0), C=latent, R=q_rope.shape[2], FP8=fp8, SINK=sink is not None, COUNTS=n_keys is not None, PAGE=0, B=1,
        LATE=launch.fence, VALUE_REGS=launch.compute_registers, LOAD_REGS=launch.registers, num_warps=4,
    )  # fmt: skip


def _few(
    q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, scale: float,
    sink: torch.Tensor | None, n_keys: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, gate: torch.Tensor | None, launch: Launch,
) -> None:  # fmt: skip
    tokens, heads, latent = q_latent.shape
    words = pool.view(torch.int32)
    sparse_prefill_few_kernel[(tokens * triton.cdiv(heads, launch.head_block),)](
        q_latent, q_rope, words, pool.view(torch.float32), rows, n_keys, sink, out, lse, gate, None, None,
        len(pool), rows.shape[1], scale * _LOG2_E, heads, *_strides(q_latent, q_rope),
        stride=words.stride(0), C=latent, R=q_rope.shape[2], M=launch.head_block, SINK=sink is not None, COUNTS=n_keys is not None,
        PAGE=0, B=1, FENCE=launch.fence, LOAD_WARPS=launch.warps, LOAD_REGS=launch.registers, num_warps=4,
    )  # fmt: skip


def _pair(
    q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, scale: float,
    sink: torch.Tensor | None, n_keys: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, gate: torch.Tensor | None, launch: Launch,
) -> None:  # fmt: skip
    tokens, heads, latent = q_latent.shape
    sparse_prefill_pair_kernel[(tokens * triton.cdiv(heads, launch.head_block),)](
        q_latent, q_rope, pool, rows, n_keys, sink, out, lse, gate, None, None,
        len(pool), rows.shape[1], scale * _LOG2_E, heads, *_strides(q_latent, q_rope),
        stride=pool.stride(0), C=latent, R=q_rope.shape[2], M=launch.head_block, SINK=sink is not None, COUNTS=n_keys is not None,
        PAGE=0, B=1, LOAD_WARPS=launch.warps, LOAD_REGS=launch.registers, REGS=launch.compute_registers, num_warps=4,
    )  # fmt: skip


def _tile(
    q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, rows: torch.Tensor, scale: float,
    sink: torch.Tensor | None, n_keys: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, gate: torch.Tensor | None, launch: Launch,
) -> None:  # fmt: skip
    tokens, heads, latent = q_latent.shape
    fp8 = pool.dtype == torch.uint8
    width = min(128, triton.next_power_of_2(latent)) if fp8 else triton.next_power_of_2(latent)
    codes = pool.view(torch.float8_e4m3fn) if fp8 else pool
    scales = pool.view(torch.float32) if fp8 else None
    tails = pool.view(torch.bfloat16) if fp8 else pool
    sparse_prefill_tile_kernel[(tokens * triton.cdiv(heads, launch.head_block),)](
        q_latent, q_rope, codes, scales, tails, rows, n_keys, sink, out, lse, None, None, None,
        len(pool), rows.shape[1], scale * _LOG2_E, heads, *_strides(q_latent, q_rope),
        codes.stride(0), scales.stride(0) if scales is not None else 0, tails.stride(0),
        C=latent, R=q_rope.shape[2], TAIL=(latent + 4 * n_scales(latent)) // 2 if fp8 else latent,
        G=triton.next_power_of_2(n_scales(latent)) if fp8 else 1, W=width, RP=max(16, triton.next_power_of_2(q_rope.shape[2])),
        M=launch.head_block, N=launch.key_block, FP8=fp8, SINK=sink is not None, COUNTS=n_keys is not None,
        PRECISION="ieee" if q_latent.dtype == torch.float32 else "tf32", STAGES=launch.stages, PAGE=0, B=1,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip


_RUN = {"wide": _wide, "few": _few, "pair": _pair, "tile": _tile}
