"""Rounding of an index key to FP4, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from ..kv.fp4 import FULL
from .device import quotient

_FULL = tl.constexpr(FULL)


@triton.jit
def _multiplier(number):
    """The multiplier of this number: 1.5, 1.25 or 1 times ``2 ** (5 - number // 3)``."""
    return (1.5 - 0.25 * (number % 3)) * ((132 - number // 3) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(units, factor):
    """Values ``factor`` times the magnitudes nearest to ``units / factor``; ties to even codes."""
    value = tl.where(units > 0.25 * factor, 0.5 * factor, 0.0)
    value = tl.where(units >= 0.75 * factor, factor, value)
    value = tl.where(units > 1.25 * factor, 1.5 * factor, value)
    value = tl.where(units >= 1.75 * factor, 2.0 * factor, value)
    value = tl.where(units > 2.5 * factor, 3.0 * factor, value)
    value = tl.where(units >= 3.5 * factor, 4.0 * factor, value)
    return tl.where(units > 5.0 * factor, 6.0 * factor, value)


@triton.jit
def _codes(units, factor):
    """Codes int32 of the same magnitudes."""
    code = (units > 0.25 * factor).to(tl.int32)
    code = tl.where(units >= 0.75 * factor, 2, code)
    code = tl.where(units > 1.25 * factor, 3, code)
    code = tl.where(units >= 1.75 * factor, 4, code)
    code = tl.where(units > 2.5 * factor, 5, code)
    code = tl.where(units >= 3.5 * factor, 6, code)
    return tl.where(units > 5.0 * factor, 7, code)


@triton.jit
def _error(units, factor):
    """Sum of squared errors of each block, [ROWS, 4], of ``units`` [ROWS, D / 16, 4, 4] rounded to ``factor`` [ROWS, 4]."""
    off = units - _nearest(units, factor[:, None, :, None])
    return tl.sum(tl.sum(off * off, 3), 1)


@triton.jit
def fp4_words(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Words int32 [ROWS, D / 8] and words of scales int32 [ROWS] of keys ``x`` fp32 [ROWS, D], as ``kv.fp4.quantise`` makes them."""
    sound = tl.where(x == x, tl.abs(x), float("inf"))
    largest = tl.max(sound, 1)
    scale = tl.maximum(largest, 1e-12) / _FULL  # a power of two
    scale = ((scale.to(tl.int32, bitcast=True) + 65535) & -65536).to(tl.float32, bitcast=True)
    units = tl.reshape(quotient(tl.abs(x), scale[:, None]), [ROWS, D // 16, 4, 4])  # a block has a quarter of each 16
    top = tl.max(tl.max(units, 3), 1)
    smallest = tl.zeros_like(top).to(tl.int32)
    for number in tl.static_range(1, 16):  # multipliers fall: count those that clip nothing
        smallest += (6.0 * ((1.5 - 0.25 * (number % 3)) * 2.0 ** (5 - number // 3)) >= top).to(tl.int32)
    best = tl.maximum(smallest - 1, 0)
    least = _error(units, _multiplier(best))
    for step in tl.static_range(0, 3):
        number = tl.minimum(smallest + step, 15)
        error = _error(units, _multiplier(number))
        best = tl.where(error < least, number, best)
        least = tl.minimum(error, least)
    code = _codes(units, _multiplier(best)[:, None, :, None])
    column = tl.arange(0, D)[None, :]
    second = column // 16 % 2
    bits = tl.reshape(code, [ROWS, D]) << (16 * second + 4 * (column % 4))
    bits |= (x < 0).to(tl.int32) << (8 * (column % 4) + 7 - 4 * second)
    parts = tl.reshape(bits, [ROWS, D // 32, 2, 4, 4])
    words = tl.sum(tl.sum(parts, 4), 2)  # no two values share a bit
    words = tl.reshape(tl.permute(words, [0, 2, 1]), [ROWS, D // 8])
    numbers = tl.sum(best << (4 * tl.arange(0, 4)[None, :]), 1)
    scales = (scale.to(tl.int32, bitcast=True) & -65536) | numbers
    return words, tl.where(largest < float("inf"), scales, -1)
