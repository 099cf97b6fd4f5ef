"""RoPE of the last values of every query, out of place: the other values stay where the projection put them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ...parallel.kernels.tuned import config_for


@triton.jit
def query_rope_kernel(
    q,
    turn,
    out,
    token_stride,
    head_stride,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """HEADS heads of a token a program; PAIRS >= R / 2 is a power of two."""
    enter(EARLY)
    t = tl.program_id(0).to(tl.int64)
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    both = tl.arange(0, 2 * PAIRS)
    cos, sin = tl.split(tl.reshape(tl.load(turn + t * R + both, mask=both < R, other=0.0), [PAIRS, 2]))
    source = q + t * token_stride + h.to(tl.int64) * head_stride + NOPE
    target = out + (t * H + h) * R
    if INTERLEAVED:
        inside = (h < H) & (both < R)[None, :]
        x = tl.load(source + both[None, :], mask=inside, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, [HEADS, PAIRS, 2]))
        turned = tl.join(first * cos[None] - second * sin[None], second * cos[None] + first * sin[None])
        tl.store(target + both[None, :], tl.reshape(turned, [HEADS, 2 * PAIRS]).to(out.dtype.element_ty), mask=inside)
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        inside = (h < H) & (pair < R // 2)
        first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + R // 2 + pair, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + pair, (first * cos[None] - second * sin[None]).to(out.dtype.element_ty), mask=inside)
        tl.store(target + R // 2 + pair, (second * cos[None] + first * sin[None]).to(out.dtype.element_ty), mask=inside)


def query_rope(q: torch.Tensor, turn: torch.Tensor, *, interleaved: bool, dtype: torch.dtype) -> torch.Tensor:
    """Rotated RoPE part of the queries.

    Args:
        q: [T, H, nope + R] bf16 or fp32; the LAST R values are rotated. Any token and head strides.
        turn: fp32 [T, R / 2, 2], cos and sin of every pair, contiguous.
        interleaved: pair neighbours; False pairs value i with i + R / 2. The order of values is kept.
        dtype: of the result; the arithmetic is fp32.

    Returns:
        [T, H, R] in ``dtype``.
    """
    tokens, heads, _ = q.shape
    out = torch.empty(tokens, heads, 2 * turn.shape[1], dtype=dtype, device=q.device)
    if tokens:
        launch(q, turn, out, interleaved, _config(tokens, heads))
    return out


def launch(q: torch.Tensor, turn: torch.Tensor, out: torch.Tensor, interleaved: bool, config: dict[str, Any]) -> None:
    """``query_rope`` into ``out`` with given launch settings (HEADS, num_warps) and at least one token."""
    tokens, heads, width = q.shape
    query_rope_kernel[(tokens, triton.cdiv(heads, config["HEADS"]))](
        q,
        turn,
        out,
        q.stride(0),
        q.stride(1),
        H=heads,
        NOPE=width - out.shape[2],
        R=out.shape[2],
        PAIRS=triton.next_power_of_2(turn.shape[1]),
        INTERLEAVED=interleaved,
        **early_start(q.device),
        **config,
    )


@lru_cache(maxsize=4096)
def _config(tokens: int, heads: int) -> dict[str, Any]:
    """Heads and warps a program: small programs while there are few, for latency."""
    at_once = min(triton.next_power_of_2(heads), 16 if tokens <= 64 else 128)
    return config_for(
        "query_rope", {"HEADS": at_once, "num_warps": 1 if tokens <= 64 else max(at_once // 16, 1)}, tokens=tokens, heads=heads
    )
