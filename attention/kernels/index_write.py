"""One launch from the projected index key to its cache: LayerNorm, RoPE, Hadamard's transform, FP8 or FP4 rounding, paged write."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...parallel.kernels.overlap import early_start, enter
from ...parallel.kernels.tuned import config_for
from .device import butterfly, halves, in_order, low_half, quotient, rope_factors, rope_partner, swap_neighbours
from .index_write_fp4 import fp4_words
from .indexer_logits_torch import is_fp4


@triton.jit(do_not_specialize=["n_tokens"])
def write_index_kernel(
    k,
    weight,
    bias,
    turn,
    rows,
    pool,
    n_tokens,
    stride,
    eps,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TRANSFORM: tl.constexpr,
    FP8: tl.constexpr,
    FP4: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """TOKENS tokens a program. BLOCK = 2**(LOW + HIGH) >= D, equal to it for FP8 and FP4; NORM = D ** -0.5."""
    enter(EARLY)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.load(rows + t, mask=t < n_tokens, other=-1).to(tl.int64)
    live = row >= 0
    t = t.to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    inside = live[:, None] & (column < D)
    source = k + t[:, None] * stride
    x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=column < D, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / D
    centred = tl.where(inside, x - mean[:, None], 0.0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, 1) / D + eps))
    x = centred * inverse[:, None] * w + b

    rotated = live[:, None] & (column < R)
    if INTERLEAVED:
        partner = swap_neighbours(x, TOKENS, BLOCK)
    else:  # the partner is another thread's: read it again
        other = rope_partner(tl.arange(0, BLOCK), R, INTERLEAVED)[None, :]
        partner = tl.load(source + other, mask=rotated, other=0.0).to(tl.float32)
        w = tl.load(weight + other, mask=column < R, other=0.0).to(tl.float32)
        b = tl.load(bias + other, mask=column < R, other=0.0).to(tl.float32)
        partner = (partner - mean[:, None]) * inverse[:, None] * w + b
    cos, sin = rope_factors(turn + t[:, None] * R, column, rotated, R, INTERLEAVED)
    x = x * cos + partner * sin
    if TRANSFORM:
        x = in_order(butterfly(low_half(x, TOKENS, LOW, HIGH), HIGH), TOKENS, LOW, HIGH) * NORM

    if FP4:
        words, scales = fp4_words(x, TOKENS, D)
        page = pool + row // PAGE * (PAGE * (D // 2 + 4))
        offset = row % PAGE
        values = (page + offset * (D // 2)).to(tl.pointer_type(tl.int32))
        tl.store(values[:, None] + tl.arange(0, D // 8)[None, :], words, mask=live[:, None])
        tl.store((page + PAGE * (D // 2)).to(tl.pointer_type(tl.int32)) + offset, scales, mask=live)
    elif FP8:
        factor = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), 1e-12), 448.0)
        codes = quotient(x, factor[:, None]).to(tl.float8e4nv)
        page = pool + row // PAGE * (PAGE * (D + 4))
        offset = row % PAGE
        tl.store(page[:, None] + offset[:, None] * D + column, codes.to(tl.uint8, bitcast=True), mask=inside)
        tl.store((page + PAGE * D).to(tl.pointer_type(tl.float32)) + offset, factor, mask=live)
    else:
        tl.store(pool + row[:, None] * D + column, x.to(pool.dtype.element_ty), mask=inside)


def write_index(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    turn: torch.Tensor,
    rows: torch.Tensor,
    pool: torch.Tensor,
    *,
    page_size: int,
    interleaved: bool,
    rotate: bool,
) -> None:
    """Norm, rotate, transform and store the index keys of a step.

    Args:
        k: [T, D] bf16 or fp32; rows may be further apart than they are wide, values may not.
        weight: [D] of the LayerNorm.
        bias: [D] of the LayerNorm, which is computed in fp32.
        eps: of the LayerNorm.
        turn: fp32 [T, R / 2, 2], cos and sin of every pair, contiguous; the FIRST R values are rotated.
        rows: int64 [T], flat cache rows of the pool; a negative one writes nothing, one named twice holds either token (or a mix).
        pool: uint8 [n_pages, page_size * (D + 4)] for FP8, all e4m3 values of a page before its fp32 scales, D a power of two;
            uint8 [n_pages, page_size * (D / 2 + 4)] for FP4, all values of a page before its words of scales (``kv/fp4.py``),
            D a power of two, 32 or more; or bf16 / fp32 [n_rows, D]. Contiguous.
        page_size: rows a page.
        interleaved: RoPE pairs neighbours (GLM); False pairs value i with i + R / 2 (DeepSeek-V3.2).
        rotate: apply the orthonormal Walsh-Hadamard transform, D a power of two.

    Raises:
        ValueError: D is no power of two, but FP8, FP4 or the transform needs one.

    Source: arXiv:2512.02556, section 2.1.
    """
    width, coded = k.shape[1], pool.dtype == torch.uint8
    if (coded or rotate) and width & (width - 1):
        what = "FP8 and FP4 index keys and the Hadamard transform"
        raise ValueError(f"{what} need a width that is a power of two, got {width}; use a float cache")
    if k.shape[0]:
        config = _config(k.shape[0], is_fp4(pool, page_size, width))
        launch(k, weight, bias, eps, turn, rows, pool, page_size, interleaved, rotate, config)


def launch(
    k: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    turn: torch.Tensor,
    rows: torch.Tensor,
    pool: torch.Tensor,
    page_size: int,
    interleaved: bool,
    rotate: bool,
    config: dict[str, Any],
) -> None:
    """``write_index`` with given launch settings (TOKENS, num_warps) and at least one token."""
    tokens, width = k.shape
    block = triton.next_power_of_2(width)
    low, high = halves(block)
    fp4 = is_fp4(pool, page_size, width)
    write_index_kernel[(triton.cdiv(tokens, config["TOKENS"]),)](
        k,
        weight,
        bias,
        turn,
        rows,
        pool,
        tokens,
        k.stride(0),
        eps,
        D=width,
        R=2 * turn.shape[1],
        BLOCK=block,
        LOW=low,
        HIGH=high,
        PAGE=page_size,
        INTERLEAVED=interleaved,
        TRANSFORM=rotate,
        FP8=pool.dtype == torch.uint8 and not fp4,
        FP4=fp4,
        NORM=width**-0.5,
        **early_start(k.device),
        **config,
    )


@lru_cache(maxsize=4096)
def _config(tokens: int, fp4: bool) -> dict[str, Any]:
    """Tokens and warps a program."""
    default = {"TOKENS": 1, "num_warps": 1} if tokens <= 256 else {"TOKENS": 4, "num_warps": 1}
    return config_for("write_index_fp4" if fp4 else "write_index", default, tokens=tokens)
