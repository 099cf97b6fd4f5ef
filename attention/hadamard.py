"""Fast Walsh-Hadamard transform, which spreads outliers before FP8 rounding and keeps dot products."""

from __future__ import annotations

import torch


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform of the last dimension (Sylvester order): fp32, same shape out.

    The transform is its own inverse. Raises ValueError when the width is no power of two.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(f"the Hadamard transform needs a width that is a power of two, got {width}")
    shape, x, half = x.shape, x.float(), 1
    while half < width:
        left, right = x.reshape(*shape[:-1], width // (2 * half), 2, half).unbind(-2)
        x = torch.stack((left + right, left - right), -2)
        half *= 2
    return x.reshape(shape) * float(width**-0.5)
