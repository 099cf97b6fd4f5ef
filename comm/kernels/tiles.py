"""Rows of several tokens as one tile, so that warps work on tokens of their own and never wait for each other.

A tile has ROWS rows of COLS values: GROUPS neighbouring pieces of every token, token by token. FP8 is made from tiles with 128
columns, so a row is a block with one scale; other payloads have whole pieces of words in a row, and GROUPS is 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device import pointer_at

_GROUP = tl.constexpr(128)  # values that share a scale
_E4M3_MAX = tl.constexpr(448.0)
_MANTISSA = tl.constexpr(0x7FFFFF)
_EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def load_tile(x, x_pitch, token, column, inside, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """``x`` [T, WIDTH] at rows ``token`` [ROWS], from columns ``column`` [ROWS] on: [ROWS, COLS]; zeros unless ``inside`` [ROWS]."""
    at = column[:, None] + tl.arange(0, COLS)[None, :]
    return tl.load(x + token.to(tl.int64)[:, None] * x_pitch + at, mask=inside[:, None] & (at < WIDTH), other=0)


@triton.jit
def store_tile(address, column, value, hit, WIDTH: tl.constexpr, COLS: tl.constexpr):
    """Store ``value`` [ROWS, COLS] into the rows at ``address`` (int64 [ROWS], multiples of 16), where ``hit`` [ROWS]."""
    at = column[:, None] + tl.arange(0, COLS)[None, :]
    tl.store(pointer_at(address, value.dtype)[:, None] + at, value, mask=hit[:, None] & (at < WIDTH))


@triton.jit
def store_scales(address, column, scale, hit, WIDTH: tl.constexpr, ON_GPU: tl.constexpr):
    """Store ``scale`` [ROWS] behind the WIDTH bytes of the rows at ``address``.

    On a GPU by an instruction of our own: a store of the language would first hand the scales to other threads, through shared
    memory and two barriers that all warps wait at. For the same reason addresses and hits must come from ``whose`` of
    ``quantise_tile``, which lies where the scales lie.
    """
    to = pointer_at(address, tl.float32) + ((WIDTH + 3) // 4 + column // _GROUP)
    inside = hit & (column < WIDTH)
    if ON_GPU:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [to.to(tl.int64), scale.to(tl.int32, bitcast=True), inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(to, scale, mask=inside)


@triton.jit
def _larger(one, whose, other, _):
    """Of two values of a row the larger; whose they are is the same."""
    return tl.maximum(one, other), whose


@triton.jit
def _to_e4m3(x, ON_GPU: tl.constexpr):
    """fp32 -> e4m3 as bytes, to the nearest, ties to even, saturating. On a GPU four at a time, without a turn through 16 bits."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
            " mov.b32 $0, {low, high}; }",
            "=r,r,r,r,r",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def quantise_tile(x, whose, UE8M0: tl.constexpr, FIXES: tl.constexpr, ON_GPU: tl.constexpr):
    """fp32 [ROWS, 128], integers ``whose`` [ROWS] -> (e4m3 as bytes [ROWS, 128], fp32 scales [ROWS], ``whose`` beside them).

    The bits are those of ``comm.fp8.quantise`` but for the sign of 0. A value is multiplied with the rounded inverse of its scale;
    FIXES is how often the product is corrected by its exact remainder (Markstein) before it is rounded to e4m3, where a last bit
    decides only beside a tie. Once is enough for 16-bit floats: all pairs of them were compared with division.
    """
    largest, whose = tl.reduce((tl.abs(x), tl.broadcast_to(whose[:, None], x.shape)), 1, _larger)
    scale = tl.where(largest > 0, tl.div_rn(largest, tl.full(largest.shape, _E4M3_MAX, tl.float32)), 1.0)
    if UE8M0:
        bits = tl.maximum((scale.to(tl.int32, bitcast=True) + _MANTISSA) & _EXPONENT, _MANTISSA + 1)
        scale = bits.to(tl.float32, bitcast=True)
        scaled = x * (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]  # 2^-e has the exponent 254 - (e + 127)
    else:
        shift = tl.where(scale < 1e-25, 1.2089258196146292e24, tl.where(scale > 1e25, 8.271806125530277e-25, 1.0))  # 2^80, 2^-80
        x = x * shift[:, None]
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale * shift)[:, None]
        inverse = tl.broadcast_to(inverse, x.shape)
        negated = tl.broadcast_to((-(scale * shift))[:, None], x.shape)  # so that no product needs to be
        scaled = x * inverse
        for _ in tl.static_range(FIXES):
            scaled = tl.fma(tl.fma(scaled, negated, x), inverse, scaled)
    return _to_e4m3(scaled, ON_GPU), scale, whose
