"""Expanded attention over ragged requests, and the rows it is expanded from. Twins: ``dense_prefill_torch``."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton

from ...parallel.kernels.tuned import config_for
from ..kv.layout import n_scales
from .dense_prefill_kernels import gather_latent_kernel, varlen_attention_kernel
from .dense_prefill_torch import check_gather, check_varlen

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class VarlenLaunch:
    """How to launch ``varlen_attention``."""

    queries: int = 128  # of a program
    keys: int = 64  # of a step
    warps: int = 8
    stages: int = 3


def varlen_attention(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    key_start: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    max_query: int,
    max_key: int,
    launch: VarlenLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of every request's queries over its own keys: (out [T, H, v] in q's dtype, lse fp32 [T, H]).

    Arguments, results and errors are those of ``dense_prefill_torch.varlen_attention``; nothing is read back from the device.
    nope 128, rope 64, v 128 in bf16 are the fast case.
    """
    check_varlen(q, k_nope, k_rope, v, query_start, key_start)
    tokens, heads, _ = q.shape
    nope, rope, value = k_nope.shape[2], k_rope.shape[1], v.shape[2]
    out = torch.empty((tokens, heads, value), dtype=q.dtype, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    requests = len(query_start) - 1
    if tokens * heads == 0 or requests == 0:
        return out, lse
    if launch is None:
        launch = _choose(q, nope + rope + value)
    grid = (heads, triton.cdiv(max(max_query, 1), launch.queries), requests)
    varlen_attention_kernel[grid](
        q, k_nope, k_rope, v, query_start, key_start, out, lse, scale * _LOG2_E, heads,
        q.stride(0), q.stride(1), k_nope.stride(0), k_nope.stride(1), k_rope.stride(0), v.stride(0), v.stride(1),
        D=nope, R=rope, V=value, DP=_pad(nope), RP=_pad(rope), VP=_pad(value), M=launch.queries, N=launch.keys, CAUSAL=causal,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", STAGES=launch.stages,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    return out, lse


def _pad(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _choose(q: torch.Tensor, width: int) -> VarlenLaunch:
    if q.dtype == torch.float32 or width > 640:
        return VarlenLaunch(queries=32, keys=32, warps=4, stages=2)
    return VarlenLaunch(**config_for("dense_prefill", asdict(VarlenLaunch()), width=width))


def gather_latent(pool: torch.Tensor, rows: torch.Tensor, latent: int, rope: int, dtype: torch.dtype) -> torch.Tensor:
    """Pool rows as [S, latent + rope] in ``dtype``, FP8 rows multiplied by their scales.

    Arguments, results and errors are those of ``dense_prefill_torch.gather_latent``.
    """
    check_gather(pool, rows, latent, rope)
    out = torch.empty((len(rows), latent + rope), dtype=dtype, device=pool.device)
    if len(rows) == 0:
        return out
    fp8 = pool.dtype == torch.uint8
    codes = pool.view(torch.float8_e4m3fn) if fp8 else pool
    scales = pool.view(torch.float32) if fp8 else None
    tails = pool.view(torch.bfloat16) if fp8 else pool
    block = 16
    gather_latent_kernel[(triton.cdiv(len(rows), block),)](
        codes, scales, tails, rows if rows.is_contiguous() else rows.contiguous(), out, len(pool), len(rows),
        codes.stride(0), scales.stride(0) if scales is not None else 0, tails.stride(0),
        C=latent, R=rope, TAIL=(latent + 4 * n_scales(latent)) // 2 if fp8 else latent,
        G=triton.next_power_of_2(n_scales(latent)) if fp8 else 1,
        W=min(128, triton.next_power_of_2(latent)) if fp8 else triton.next_power_of_2(latent),
        RP=_pad(rope), N=block, FP8=fp8, num_warps=4,
    )  # fmt: skip
    return out
