"""Device functions that several kernels share: RoPE partners, division by a shared scale, Hadamard's transform."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swap_neighbours(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] with values 0 and 1, 2 and 3 .. exchanged."""
    even, odd = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
    return tl.reshape(tl.join(odd, even), [ROWS, WIDTH])


@triton.jit
def rope_partner(column, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Column that is rotated together with ``column`` [N] (anything for columns that are not rotated)."""
    if INTERLEAVED:
        return column ^ 1
    other = tl.where(column < R // 2, column + R // 2, column - R // 2)
    return tl.max_contiguous(tl.multiple_of(other, R // 2 & -(R // 2)), R // 2 & -(R // 2))


@triton.jit
def rope_factors(turn, column, rotated, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Factors of a value and of its partner: cos and -sin for the first of a pair, cos and sin for the second, else 1 and 0.

    ``turn`` points to the [R / 2, 2] fp32 of a token (or of several); ``column`` and the mask ``rotated`` broadcast to the result.
    """
    if INTERLEAVED:
        pair = column // 2
        first = column % 2 == 0
    else:
        pair = column % (R // 2)
        first = column < R // 2
    cos = tl.load(turn + 2 * pair, mask=rotated, other=1.0)
    sin = tl.load(turn + 2 * pair + 1, mask=rotated, other=0.0)
    return cos, tl.where(first, -sin, sin)


@triton.jit
def quotient(x, divisor):
    """``x / divisor`` as IEEE division rounds it, for ``abs(x) <= 448 * divisor``; ``divisor`` broadcasts to ``x``.

    One true division an element of ``divisor``, then a product and a correction by its exact remainder for each of ``x``
    (P. Markstein, IBM Journal of Research and Development 34(1), 1990). Tiny divisors are scaled up, or their reciprocal
    would overflow.
    """
    up = tl.where(divisor < 1e-20, 1.2089258196146292e24, 1.0)  # 2**80
    divisor = divisor * up
    inverse = tl.broadcast_to(tl.div_rn(1.0, divisor), x.shape)
    divisor = tl.broadcast_to(divisor, x.shape)
    x = x * up
    near = x * inverse
    return tl.fma(tl.fma(-near, divisor, x), inverse, near)


@triton.jit
def butterfly(x, STAGES: tl.constexpr):
    """Walsh-Hadamard transform over the last STAGES dimensions of ``x`` (2 wide each), the last one first; not normalised."""
    if STAGES > 0:
        left, right = tl.split(x)
        x = tl.join(butterfly(left + right, STAGES - 1), butterfly(left - right, STAGES - 1))
    return x


@triton.jit
def butterfly_largest(x, STAGES: tl.constexpr):
    """Largest magnitude over the last STAGES dimensions of ``butterfly(x)``."""
    if STAGES > 0:
        left, right = tl.split(x)
        largest = tl.maximum(butterfly_largest(left + right, STAGES - 1), butterfly_largest(left - right, STAGES - 1))
    else:
        largest = tl.abs(x)
    return largest


@triton.jit
def butterfly_scaled(x, factor, STAGES: tl.constexpr, DTYPE: tl.constexpr):
    """``butterfly(x) * factor`` rounded to DTYPE. ``factor`` broadcasts to ``x`` without its last STAGES dimensions.

    Rounding before joining leaves a quarter of the bytes to exchange; the arithmetic shared with ``butterfly_largest`` is
    done once (the compiler merges equal expressions).
    """
    if STAGES > 0:
        left, right = tl.split(x)
        x = tl.join(butterfly_scaled(left + right, factor, STAGES - 1, DTYPE), butterfly_scaled(left - right, factor, STAGES - 1, DTYPE))
    else:
        x = (x * factor).to(DTYPE)
    return x


@triton.jit
def low_half(x, ROWS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """First half of a Walsh-Hadamard transform in Sylvester order: ``x`` [ROWS, 2**(LOW + HIGH)] -> [ROWS, 2**LOW, 2, 2 ..].

    The low bits of a value's number are transformed within a thread; the result has the low bits in its second dimension and
    the high ones, each on its own, in HIGH more, for ``butterfly`` and its kin to transform: threads exchange values once.
    """
    low: tl.constexpr = [2] * LOW
    high: tl.constexpr = [2] * HIGH
    x = butterfly(tl.reshape(x, [ROWS, 2**HIGH] + low), LOW)
    x = tl.permute(tl.reshape(x, [ROWS, 2**HIGH, 2**LOW]), [0, 2, 1])
    return tl.reshape(x, [ROWS, 2**LOW] + high)


@triton.jit
def in_order(x, ROWS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Result of the second half, [ROWS, 2**LOW, 2, 2 ..] -> [ROWS, 2**(LOW + HIGH)]."""
    x = tl.permute(tl.reshape(x, [ROWS, 2**LOW, 2**HIGH]), [0, 2, 1])
    return tl.reshape(x, [ROWS, 2 ** (LOW + HIGH)])


def halves(width: int) -> tuple[int, int]:
    """LOW and HIGH for rows of ``width``, a power of two."""
    bits = width.bit_length() - 1
    return min(bits, 4), max(bits - 4, 0)
