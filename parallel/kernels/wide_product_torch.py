"""Twin of ``wide_product`` in plain PyTorch."""

from __future__ import annotations

import torch

#: nothing is too small for a matrix product here
MOST_OUTPUTS = 0


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] by ``weight`` [N, K] -> fp32 [T, N], terms and sums in fp32: see ``wide_product.wide_product``."""
    return x.float() @ weight.float().t()


def check_operands(x: torch.Tensor, weight: torch.Tensor) -> None:
    """ValueError: no matrices of one width, or values of a row that are apart."""
    shapes = f"{tuple(x.shape)} and {tuple(weight.shape)}"
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"a wide product takes [T, K] and [N, K], got {shapes}")
    if x.shape[1] > 1 and (x.stride(1) != 1 or weight.stride(1) != 1):
        raise ValueError(f"a wide product takes rows of adjacent values, got strides {x.stride()} and {weight.stride()}; copy them first")
