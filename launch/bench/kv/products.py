"""The products around attention in a layer: queries from their latent, queries into the latent space, values, and the output."""

from __future__ import annotations

import torch

from .shape import RigShape

MOST_REQUESTS = 256
_E4M3 = torch.float8_e4m3fn


class Products:
    """Random weights of every layer; FP8 ones for the linear layers on CUDA, as the model stores them."""

    def __init__(self, shape: RigShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        heads, layers = shape.heads, range(shape.layers)
        self.query_latent = self._normal(MOST_REQUESTS, shape.query_latent)
        self.fixed = [self._normal(MOST_REQUESTS, heads, shape.latent), self._normal(MOST_REQUESTS, heads, shape.rope)]
        if not shape.with_products:
            return
        width = heads * (shape.nope + shape.rope)
        self.by_latent = [_Linear(self._normal(width, shape.query_latent)) for _ in layers]
        self.into_latent = [self._normal(heads, shape.nope, shape.latent) for _ in layers]
        self.out_of_latent = [self._normal(heads, shape.latent, shape.value) for _ in layers]
        self.output = [_Linear(self._normal(shape.hidden, heads * shape.value)) for _ in layers]

    def queries(self, layer: int, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent queries [R, heads, C] and rotary ones [R, heads, rope]; what may run while rows are fetched."""
        shape = self.shape
        if not shape.with_products:
            return self.fixed[0][:requests], self.fixed[1][:requests]
        queries = self.by_latent[layer](self.query_latent[:requests]).view(requests, shape.heads, -1)
        nope, rope = torch.split(queries, [shape.nope, shape.rope], -1)
        return torch.bmm(nope.transpose(0, 1), self.into_latent[layer]).transpose(0, 1), rope

    def finish(self, layer: int, attended: torch.Tensor) -> torch.Tensor:
        """[R, hidden] of attended latents [R, heads, C]."""
        if not self.shape.with_products:
            return attended
        values = torch.bmm(attended.transpose(0, 1), self.out_of_latent[layer])
        return self.output[layer](values.transpose(0, 1).flatten(1))

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype).mul_(size[-1] ** -0.5)


class _Linear:
    """``x @ weight.T``, the weight in FP8 on CUDA."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.fp8 = weight.is_cuda
        self.weight = weight.to(_E4M3) if self.fp8 else weight
        self.one = torch.ones((), device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fp8:
            return x @ self.weight.T
        out: torch.Tensor = torch._scaled_mm(x.to(_E4M3), self.weight.T, self.one, self.one, out_dtype=x.dtype)
        return out
