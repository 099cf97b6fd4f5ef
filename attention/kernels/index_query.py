"""One launch from the projected index queries to what the scores need: RoPE, Hadamard's transform, FP8 rounding, head weights."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ...parallel.kernels.tuned import config_for
from .device import butterfly_largest, butterfly_scaled, halves, in_order, low_half, rope_factors, rope_partner, swap_neighbours


@triton.jit
def index_query_kernel(
    q,
    weights,
    turn,
    out,
    out_weights,
    token_stride,
    head_stride,
    weight_stride,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSFORM: tl.constexpr,
    FP8: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """HEADS heads of a token a program. BLOCK = 2**(LOW + HIGH) >= D, equal to it with the transform; NORM = D ** -0.5."""
    enter(EARLY)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (h[:, None] < H) & (column < D)
    source = q + t * token_stride + h[:, None].to(tl.int64) * head_stride
    x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    if INTERLEAVED:
        partner = swap_neighbours(x, HEADS, BLOCK)
    else:  # the partner is another thread's: read it again
        other = rope_partner(tl.arange(0, BLOCK), R, INTERLEAVED)[None, :]
        partner = tl.load(source + other, mask=inside & (column < R), other=0.0).to(tl.float32)
    c = tl.arange(0, BLOCK)
    cos, sin = rope_factors(turn + t * R, c, c < R, R, INTERLEAVED)
    x = x * cos[None, :] + partner * sin[None, :]
    stages: tl.constexpr = HIGH if TRANSFORM else 0
    if TRANSFORM:
        x = low_half(x, HEADS, LOW, HIGH)
    factor = NORM if TRANSFORM else 1.0

    w = tl.load(weights + t * weight_stride + h, mask=h < H, other=0.0) * scale
    factors = tl.full([HEADS, 1], factor, tl.float32)
    if FP8:
        largest = tl.max(butterfly_largest(x, stages), 1) * factor
        full = largest > 1e-30
        largest = tl.where(full, largest, 448.0)
        w = w * tl.div_rn(largest, 448.0)
        factors = tl.div_rn(448.0, largest)[:, None] * factors
    tl.store(out_weights + t * H + h, w, mask=h < H)
    x = butterfly_scaled(x, factors, stages, out.dtype.element_ty)
    if TRANSFORM:
        x = in_order(x, HEADS, LOW, HIGH)
    tl.store(out + (t * H + h[:, None]) * D + column, x, mask=inside)


def index_query(
    q: torch.Tensor, weights: torch.Tensor, turn: torch.Tensor, *, interleaved: bool, rotate: bool, fp8: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and head weights of the indexer, ready for ``sum_h w_h * relu(q_h . k)``.

    Args:
        q: [T, H, D] bf16 or fp32, not rotated; any token and head strides.
        weights: [T, H] fp32, as ``weights_proj`` gives them.
        turn: fp32 [T, R / 2, 2], cos and sin of every pair, contiguous; the FIRST R values are rotated.
        interleaved: RoPE pairs neighbours (GLM); False pairs value i with i + R / 2 (DeepSeek-V3.2).
        rotate: apply the orthonormal Walsh-Hadamard transform, D a power of two.
        fp8: quantise every head's query with its own scale ``amax / 448`` (1 when all its values are below 1e-30).
        scale: factor on the weights, ``D ** -0.5 * H ** -0.5``.

    Returns:
        The queries [T, H, D], float8_e4m3fn or (``fp8`` False) in the dtype of ``q``, and the weights fp32 [T, H]:
        ``weights * scale``, times the query's scale with ``fp8``.

    Raises:
        ValueError: ``rotate``, but D is no power of two.

    Source: arXiv:2512.02556, section 2.1.
    """
    tokens, heads, width = q.shape
    if rotate and width & (width - 1):
        raise ValueError(f"the Hadamard transform needs a width that is a power of two, got {width}; use a float cache")
    out = torch.empty(tokens, heads, width, dtype=torch.float8_e4m3fn if fp8 else q.dtype, device=q.device)
    out_weights = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if tokens:
        launch(q, weights, turn, out, out_weights, interleaved, rotate, scale, _config(tokens, heads))
    return out, out_weights


def launch(
    q: torch.Tensor,
    weights: torch.Tensor,
    turn: torch.Tensor,
    out: torch.Tensor,
    out_weights: torch.Tensor,
    interleaved: bool,
    rotate: bool,
    scale: float,
    config: dict[str, Any],
) -> None:
    """``index_query`` into ``out`` and ``out_weights`` with given launch settings (HEADS, num_warps) and at least one token."""
    tokens, heads, width = q.shape
    block = triton.next_power_of_2(width)
    low, high = halves(block)
    index_query_kernel[(tokens, triton.cdiv(heads, config["HEADS"]))](
        q,
        weights,
        turn,
        out,
        out_weights,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        scale,
        H=heads,
        D=width,
        R=2 * turn.shape[1],
        BLOCK=block,
        LOW=low,
        HIGH=high,
        INTERLEAVED=interleaved,
        TRANSFORM=rotate,
        FP8=out.dtype == torch.float8_e4m3fn,
        NORM=width**-0.5,
        **early_start(q.device),
        **config,
    )


@lru_cache(maxsize=4096)
def _config(tokens: int, heads: int) -> dict[str, Any]:
    """Heads and warps a program: small programs while there are few, for latency."""
    at_once = min(triton.next_power_of_2(heads), 16 if tokens <= 64 else 32)
    return config_for("index_query", {"HEADS": at_once, "num_warps": 4 if tokens <= 64 else 2}, tokens=tokens, heads=heads)
