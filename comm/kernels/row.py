"""A piece of one row, for kernels that work row by row; ``tiles`` is for those that take several rows at once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_piece(x, x_stride, token, piece, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Piece ``piece`` of row ``token`` of ``x`` [T, WIDTH], [BLOCK]; zeros unless ``inside``."""
    column = piece * BLOCK + tl.arange(0, BLOCK)
    return tl.load(x + token.to(tl.int64) * x_stride + column, mask=(column < WIDTH) & inside, other=0)
