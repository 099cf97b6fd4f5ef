"""Root-mean-square norm with the rounding order of the Hugging Face DeepSeek modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class RMSNorm(nn.Module):
    """``weight * (x / sqrt(mean(x**2) + eps))``, the division in fp32, the product in the dtype of ``x``.

    Source: arXiv:1910.07467; the cast back before the weight is applied follows the DeepSeek modules of transformers.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.kernel: Callable[..., torch.Tensor] | None = None  # ``kernels.norm.rms_norm`` on the fused path

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of ``x`` [..., dim]; same shape and dtype out."""
        if self.kernel is not None:
            return self.kernel(x, self.weight, self.eps)
        wide = x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * (wide * inverse).to(x.dtype)).to(x.dtype)

    def after(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, the sum ``residual + x``) of two tensors [..., dim]."""
        if self.kernel is not None:
            normed, total = self.kernel(x, self.weight, self.eps, residual)
            return normed, total
        total = residual + x
        return self(total), total

    def extra_repr(self) -> str:
        """Width and eps, for ``print(model)``."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
