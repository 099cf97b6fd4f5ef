"""One launch from the projected latent to the cache: norm, RoPE of the shared key, FP8 rounding, write to the paged rows."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ...parallel.kernels.tuned import config_for
from .device import quotient, rope_factors, rope_partner

_GROUP = 128  # latent values that share one scale


@triton.jit(do_not_specialize=["n_tokens"])
def write_latent_kernel(
    kv,
    weight,
    turn,
    rows,
    pool,
    n_tokens,
    stride,
    eps,
    C: tl.constexpr,
    R: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    TOKENS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    """TOKENS tokens a program. GROUPS * GROUP >= C and BLOCK_R >= R are powers of two."""
    enter(EARLY)
    given = kv.dtype.element_ty
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.load(rows + t, mask=t < n_tokens, other=-1).to(tl.int64)
    live = row >= 0
    t = t.to(tl.int64)
    groups: tl.constexpr = (C + GROUP - 1) // GROUP
    row_bytes: tl.constexpr = C + 4 * groups + 2 * R

    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = live[:, None, None] & (column < C)[None]
    x = tl.load(kv + t[:, None, None] * stride + column[None], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < C, other=0.0).to(tl.float32)
    mean = tl.sum(tl.sum(x * x, 2), 1) / C
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    y = ((x * inverse[:, None, None]).to(given).to(tl.float32) * scale[None]).to(given)

    r = tl.arange(0, BLOCK_R)[None, :]
    rotated = live[:, None] & (r < R)
    source = kv + t[:, None] * stride + C
    key = tl.load(source + r, mask=rotated, other=0.0).to(tl.float32)
    partner = tl.load(source + rope_partner(tl.arange(0, BLOCK_R), R, INTERLEAVED)[None, :], mask=rotated, other=0.0).to(tl.float32)
    cos, sin = rope_factors(turn + t[:, None] * R, r, rotated, R, INTERLEAVED)
    key = (key * cos + partner * sin).to(given)

    if FP8:
        y = y.to(tl.float32)
        factor = tl.div_rn(tl.maximum(tl.max(tl.abs(y), 2), 1e-12), 448.0)
        codes = quotient(y, factor[:, :, None]).to(tl.float8e4nv)
        base = pool + row * row_bytes
        tl.store(base[:, None, None] + column[None], codes.to(tl.uint8, bitcast=True), mask=inside)
        g = tl.arange(0, GROUPS)[None, :]
        tl.store((base + C).to(tl.pointer_type(tl.float32))[:, None] + g, factor, mask=live[:, None] & (g < groups))
        tl.store((base + C + 4 * groups).to(tl.pointer_type(tl.bfloat16))[:, None] + r, key.to(tl.bfloat16), mask=rotated)
    else:
        start = pool + row * (C + R)
        tl.store(start[:, None, None] + column[None], y.to(pool.dtype.element_ty), mask=inside)
        tl.store(start[:, None] + C + r, key.to(pool.dtype.element_ty), mask=rotated)


def write_latent(
    kv: torch.Tensor, weight: torch.Tensor, eps: float, turn: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor, *, interleaved: bool
) -> None:
    """Norm the latents, rotate the keys and store both in the cache.

    The rounding order is that of the modules: the division of the norm in fp32, then a cast to the dtype of ``kv``, then the
    product with ``weight`` in that dtype; the rotated key is cast to it too; quantisation last (``kv.layout.quantise``).

    Args:
        kv: [T, C + R] bf16 or fp32, latent then key; rows may be further apart than they are wide, values may not.
        weight: [C] of the latent's norm.
        eps: of the norm.
        turn: fp32 [T, R / 2, 2], cos and sin of every pair, contiguous.
        rows: int64 [T], flat cache rows of the pool; a negative one writes nothing, one named twice holds either token (or a mix).
        pool: uint8 [n_rows, C + 4 * ceil(C / 128) + 2 * R] for FP8 rows, or bf16 / fp32 [n_rows, C + R]; contiguous.
        interleaved: RoPE pairs neighbours; False pairs value i with i + R / 2.

    Sources: arXiv:2405.04434, section 2.1 (the latent and its shared key); arXiv:1910.07467 (the norm).
    """
    if kv.shape[0]:
        launch(kv, weight, eps, turn, rows, pool, interleaved, _config(kv.shape[0]))


def launch(
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    turn: torch.Tensor,
    rows: torch.Tensor,
    pool: torch.Tensor,
    interleaved: bool,
    config: dict[str, Any],
) -> None:
    """``write_latent`` with given launch settings (TOKENS, num_warps) and at least one token."""
    tokens, width = kv.shape[0], weight.shape[0]
    rope = kv.shape[1] - width
    write_latent_kernel[(triton.cdiv(tokens, config["TOKENS"]),)](
        kv,
        weight,
        turn,
        rows,
        pool,
        tokens,
        kv.stride(0),
        eps,
        C=width,
        R=rope,
        GROUPS=triton.next_power_of_2(triton.cdiv(width, _GROUP)),
        GROUP=_GROUP,
        BLOCK_R=triton.next_power_of_2(rope),
        INTERLEAVED=interleaved,
        FP8=pool.dtype == torch.uint8,
        **early_start(kv.device),
        **config,
    )


@lru_cache(maxsize=4096)
def _config(tokens: int) -> dict[str, Any]:
    """Tokens and warps a program."""
    default = {"TOKENS": 1, "num_warps": 4} if tokens <= 256 else {"TOKENS": 4, "num_warps": 4}
    return config_for("write_latent", default, tokens=tokens)
