"""Products of a few rows with a small weight, summed and returned in fp32: the router's scores, the indexer's head weights.

Bound by latency, not by bytes: every output is a program of its own, which has all of its operands under way at once. A matrix
product of such a shape takes two launches, one that cuts K and one that adds the parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .overlap import early_start, enter
from .wide_product_torch import check_operands

#: outputs up to which this is faster than a matrix product: every row reads the weight anew, from the L2
MOST_OUTPUTS = 1024
_CHUNK = 1024


@triton.jit(do_not_specialize=["n_columns"])
def wide_product_kernel(
    x, weight, out, n_columns, x_stride, weight_stride, WIDTH: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Program (n, t): one sum of WIDTH products."""
    enter(EARLY)
    column, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float32)
    for start in tl.static_range(0, WIDTH, CHUNK):
        inside = start + lanes < WIDTH
        left = tl.load(x + row * x_stride + start + lanes, mask=inside, other=0.0)
        right = tl.load(weight + column * weight_stride + start + lanes, mask=inside, other=0.0)
        total += left.to(tl.float32) * right.to(tl.float32)
    tl.store(out + row * n_columns + column, tl.sum(total, 0))


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` of a few rows; terms and sums in fp32, in an order that depends on K alone.

    Args:
        x: [T, K] of any float dtype; rows may be further apart than they are wide.
        weight: [N, K], likewise.

    Returns:
        float32 [T, N].

    Raises:
        ValueError: operands that do not fit together.
    """
    check_operands(x, weight)
    n_rows, width = x.shape
    out = torch.empty((n_rows, len(weight)), dtype=torch.float32, device=x.device)
    if out.numel():
        wide_product_kernel[(len(weight), n_rows)](
            x, weight, out, len(weight), x.stride(0), weight.stride(0), WIDTH=width, CHUNK=min(_CHUNK, triton.next_power_of_2(width)),
            num_warps=4, **early_start(x.device),
        )  # fmt: skip
    return out
