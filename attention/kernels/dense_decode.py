"""Absorbed attention over every visible key of a paged cache, split over the keys. Twin: ``dense_decode_torch``."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton

from ...parallel.kernels.tuned import config_for
from ..kv.layout import n_scales
from .dense_decode_plan import dense_decode_combine_kernel, dense_decode_plan_kernel
from .dense_decode_torch import check_paging
from .sparse_attention_torch import check_arguments
from .sparse_prefill import hopper_fits
from .sparse_prefill_few import sparse_prefill_few_kernel
from .sparse_prefill_pair import sparse_prefill_pair_kernel
from .sparse_prefill_tile import sparse_prefill_tile_kernel
from .sparse_prefill_wide import sparse_prefill_wide_kernel

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class DecodeLaunch:
    """How to launch. ``kernel`` is one of "wide", "few", "tile", as for sparse prefill."""

    kernel: str = "tile"
    head_block: int = 16  # rows (heads times tokens) of a program
    key_block: int = 64  # of "tile"
    warps: int = 4
    stages: int = 2  # of "tile"
    registers: int = 72  # of a gathering thread
    fence: bool = False
    programs: int = 132  # aimed at
    least: int = 256  # keys that are worth a program


def dense_decode(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    token_row: torch.Tensor,
    limit: torch.Tensor,
    *,
    page_size: int,
    scale: float,
    max_context: int,
    max_query: int,
    launch: DecodeLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token attends the first ``limit`` keys of its request: (out [T, H, C] in q's dtype, lse fp32 [T, H]).

    Arguments, results and errors are those of ``dense_decode_torch.dense_decode``. Keys are cut into spans on the device, by the
    lengths found there; results depend on lengths, never on timing. ``launch`` overrides the choice of kernel.
    """
    check_paging(page_table, token_row, limit, q_latent.shape[0], page_size)
    check_arguments(q_latent, q_rope, pool, limit[:, None], sink=None, n_keys=None)
    tokens, heads, latent = q_latent.shape
    device = q_latent.device
    out = torch.empty((tokens, heads, latent), dtype=q_latent.dtype, device=device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    if tokens * heads == 0:
        return out, lse
    if launch is None:
        launch = choose_decode(q_latent, q_rope, pool, max_query)
    together = max(1, min(max_query, launch.head_block // heads))
    groups = triton.cdiv(heads * together, launch.head_block)
    programs = max(1, launch.programs // groups)
    n_units = tokens + min(programs, tokens * triton.cdiv(max(max_context, 1), 64))
    units = torch.empty((n_units, 8), dtype=torch.int32, device=device)
    of_token = torch.empty((tokens, 4), dtype=torch.int32, device=device)
    n_parts = min(2 * programs, n_units)  # a request is cut when it has more than an aim's keys: fewer than `programs` requests
    parts = torch.empty((n_parts, together * heads, latent), dtype=torch.float32, device=device)
    part_lse = torch.empty((n_parts, together * heads), dtype=torch.float32, device=device)
    dense_decode_plan_kernel[(triton.cdiv(n_units, 64),)](
        token_row, limit, units, of_token, tokens, n_units, programs, launch.least,
        B=together, BT=min(1024, max(16, triton.next_power_of_2(tokens))), U=64,
    )  # fmt: skip
    run = {"wide": _wide, "few": _few, "pair": _pair, "tile": _tile}[launch.kernel]
    run(
        q_latent, q_rope, pool, page_table, limit, out, lse, units, parts, part_lse, scale, page_size, together, groups, launch
    )  # fmt: skip
    block = 4 if heads >= 4 else 1
    dense_decode_combine_kernel[(tokens, triton.cdiv(heads, block))](
        parts, part_lse, of_token, out, lse, heads,
        ROWS=together * heads, C=latent, CP=triton.next_power_of_2(latent), HB=block,
    )  # fmt: skip
    return out, lse


def choose_decode(q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, max_query: int) -> DecodeLaunch:
    """The launch for these operands."""
    heads, latent = q_latent.shape[1:]
    rows = heads * max_query
    fp8 = pool.dtype == torch.uint8
    if hopper_fits(q_latent, q_rope, pool):
        if fp8 and rows <= 32:
            default = DecodeLaunch(kernel="few", head_block=16 if rows <= 16 else 32, warps=8, registers=128, fence=True)
        elif fp8:
            default = DecodeLaunch(kernel="wide", head_block=64, registers=128, fence=True)
        else:
            default = DecodeLaunch(kernel="pair") if rows <= 16 else DecodeLaunch(kernel="wide", head_block=64)
        return DecodeLaunch(**config_for("dense_decode", asdict(default), rows=min(rows, 64), heads=heads, fp8=fp8))
    if q_latent.dtype == torch.float32 or latent > 512:
        return DecodeLaunch(head_block=16, key_block=16, warps=8)
    return DecodeLaunch(head_block=16 if rows <= 16 else min(64, triton.next_power_of_2(rows)), warps=4 if rows <= 16 else 8)


def _wide(
    q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, page_table: torch.Tensor, limit: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, units: torch.Tensor, parts: torch.Tensor, part_lse: torch.Tensor,
    scale: float, page_size: int, together: int, groups: int, launch: DecodeLaunch,
) -> None:  # fmt: skip
    heads, latent = q_latent.shape[1:]
    fp8 = pool.dtype == torch.uint8
    words = pool.view(torch.int32) if fp8 else pool
    scales, tails = (pool.view(torch.float32), pool.view(torch.bfloat16)) if fp8 else (None, None)
    sparse_prefill_wide_kernel[(len(units) * groups,)](
        q_latent, q_rope, words, scales, tails, page_table, limit, None, out, lse, units, parts, part_lse,
        len(pool), page_table.stride(0), scale * _LOG2_E, heads,
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1),
        stride=words.stride(0), C=latent, R=q_rope.shape[2], FP8=fp8, SINK=False, COUNTS=True, PAGE=page_size, B=together,
        LATE=launch.fence, VALUE_REGS=160 if fp8 else 192, LOAD_REGS=launch.registers, num_warps=4,
    )  # fmt: skip


def _few(
    q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, page_table: torch.Tensor, limit: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, units: torch.Tensor, parts: torch.Tensor, part_lse: torch.Tensor,
    scale: float, page_size: int, together: int, groups: int, launch: DecodeLaunch,
) -> None:  # fmt: skip
    heads, latent = q_latent.shape[1:]
    words = pool.view(torch.int32)
    sparse_prefill_few_kernel[(len(units) * groups,)](
        q_latent, q_rope, words, pool.view(torch.float32), page_table, limit, None, out, lse, units, parts, part_lse,
        len(pool), page_table.stride(0), scale * _LOG2_E, heads,
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1),
        stride=words.stride(0), C=latent, R=q_rope.shape[2], M=launch.head_block, SINK=False, COUNTS=True, PAGE=page_size,
        B=together, FENCE=launch.fence, LOAD_WARPS=launch.warps, LOAD_REGS=launch.registers, num_warps=4,
    )  # fmt: skip


def _pair(
    q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, page_table: torch.Tensor, limit: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, units: torch.Tensor, parts: torch.Tensor, part_lse: torch.Tensor,
    scale: float, page_size: int, together: int, groups: int, launch: DecodeLaunch,
) -> None:  # fmt: skip
    heads, latent = q_latent.shape[1:]
    sparse_prefill_pair_kernel[(len(units) * groups,)](
        q_latent, q_rope, pool, page_table, limit, None, out, lse, units, parts, part_lse,
        len(pool), page_table.stride(0), scale * _LOG2_E, heads,
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1),
        stride=pool.stride(0), C=latent, R=q_rope.shape[2], M=launch.head_block, SINK=False, COUNTS=True, PAGE=page_size,
        B=together, LOAD_WARPS=launch.warps, LOAD_REGS=launch.registers, REGS=160, num_warps=4,
    )  # fmt: skip


def _tile(
    q_latent: torch.Tensor, q_rope: torch.Tensor, pool: torch.Tensor, page_table: torch.Tensor, limit: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, units: torch.Tensor, parts: torch.Tensor, part_lse: torch.Tensor,
    scale: float, page_size: int, together: int, groups: int, launch: DecodeLaunch,
) -> None:  # fmt: skip
    heads, latent = q_latent.shape[1:]
    fp8 = pool.dtype == torch.uint8
    codes = pool.view(torch.float8_e4m3fn) if fp8 else pool
    scales = pool.view(torch.float32) if fp8 else None
    tails = pool.view(torch.bfloat16) if fp8 else pool
    sparse_prefill_tile_kernel[(len(units) * groups,)](
        q_latent, q_rope, codes, scales, tails, page_table, limit, None, out, lse, units, parts, part_lse,
        len(pool), page_table.stride(0), scale * _LOG2_E, heads,
        q_latent.stride(0), q_latent.stride(1), q_rope.stride(0), q_rope.stride(1),
        codes.stride(0), scales.stride(0) if scales is not None else 0, tails.stride(0),
        C=latent, R=q_rope.shape[2], TAIL=(latent + 4 * n_scales(latent)) // 2 if fp8 else latent,
        G=triton.next_power_of_2(n_scales(latent)) if fp8 else 1,
        W=min(128, triton.next_power_of_2(latent)) if fp8 else triton.next_power_of_2(latent),
        RP=max(16, triton.next_power_of_2(q_rope.shape[2])), M=launch.head_block, N=launch.key_block, FP8=fp8, SINK=False,
        COUNTS=True, PRECISION="ieee" if q_latent.dtype == torch.float32 else "tf32", STAGES=launch.stages,
        PAGE=page_size, B=together, num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
