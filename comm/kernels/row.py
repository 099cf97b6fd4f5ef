"""A piece of one row, for kernels that work row by row; ``tiles`` is for those that take several rows at once."""

from __future__ import annotations

import triton
import triton.language as tl

_GROUP = tl.constexpr(128)  # values that share a scale


@triton.jit
def load_piece(x, x_stride, token, piece, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr, QUANTISE: tl.constexpr):
    """Piece ``piece`` of row ``token`` of ``x`` [T, WIDTH]: [BLOCK / 128, 128] with QUANTISE, else [BLOCK]; zeros unless ``inside``."""
    row = x + token.to(tl.int64) * x_stride
    if QUANTISE:
        column = piece * BLOCK + tl.arange(0, BLOCK // _GROUP)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    else:
        column = piece * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row + column, mask=(column < WIDTH) & inside, other=0)
