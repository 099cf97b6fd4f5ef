"""Device functions that the Hopper kernels of sparse decode share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = gl.constexpr(64)  # keys of a tile
NO_SCORE = gl.constexpr(-1e30)  # the running maximum starts here, not at -inf: tiles without a key must not give NaN
SHIFT = gl.constexpr(15.0)  # probabilities are held times 2^15: the largest still fits fp16, small ones keep their bits
LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def head_exponent(amax):
    """Power of two, as fp32, by which a head's queries are multiplied to lie within 2^15; its inverse. Both exact."""
    bits = gl.minimum(gl.maximum(amax, 1e-25), 1e25).to(gl.int32, bitcast=True) & 0x7F800000
    return (0x7F000000 - bits + (14 << 23)).to(gl.float32, bitcast=True), (bits - (14 << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def load_rows(rows, start, end, LAYOUT: gl.constexpr):
    """Row numbers of a tile, -1 from ``end`` on."""
    key = start + gl.arange(0, TILE, LAYOUT)
    return gl.load(rows + key, mask=key < end, other=-1)
