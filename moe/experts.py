"""SwiGLU experts in physical slots, computed group by group."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..parallel.linear import narrow_like, product, scales_like
from .kernels.fused_experts_torch import ExpertWeights


def grouped_swiglu(
    x: torch.Tensor,
    counts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))`` with one expert per group of rows.

    Args:
        x: [N, hidden] rows sorted by slot.
        counts: [S] int64 on the CPU, rows of each slot, summing to N.
        gate_up: [S, 2, I, hidden] gate then up projection of each slot.
        down: [S, hidden, I] down projection of each slot.
        gate_up_scale: [S, 2, ceil(I/128), ceil(hidden/128)] fp32 block scales when the weights are e4m3, else None.
        down_scale: [S, ceil(hidden/128), ceil(I/128)] fp32, likewise.

    Returns:
        [N, hidden] in x's dtype.
    """
    slots, _, inner, hidden = gate_up.shape
    y = torch.empty_like(x)
    start = 0
    for slot, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        stop = start + count
        part = x[start:stop]
        if gate_up_scale is None or down_scale is None:
            both = F.linear(part, gate_up[slot].view(2 * inner, hidden))
            torch.mm(F.silu(both[:, :inner]) * both[:, inner:], down[slot].t(), out=y[start:stop])
        else:
            gate = product(part, gate_up[slot, 0], gate_up_scale[slot, 0])
            up = product(part, gate_up[slot, 1], gate_up_scale[slot, 1])
            y[start:stop] = product(F.silu(gate) * up, down[slot], down_scale[slot])
        start = stop
    assert start == len(x), f"counts sum to {start}, rows are {len(x)}"
    return y


def _flat(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.flatten(1, 2)


class Experts(nn.Module):
    """The experts that one rank hosts: ``n_slots`` physical slots of ``inner`` width."""

    gate_up_scale_inv: nn.Parameter | None  # [S, 2, ceil(I/128), ceil(hidden/128)] fp32 when the weights are FP8
    down_scale_inv: nn.Parameter | None  # [S, ceil(hidden/128), ceil(I/128)] fp32

    def __init__(self, n_slots: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(n_slots, 2, inner, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(n_slots, hidden, inner), requires_grad=False)
        self.register_parameter("gate_up_scale_inv", None)
        self.register_parameter("down_scale_inv", None)

    @property
    def fp8(self) -> bool:
        """Whether the weights are block FP8."""
        return self.gate_up_scale_inv is not None

    @property
    def weights(self) -> ExpertWeights:
        """The tensors as kernels take them."""
        return ExpertWeights(
            gate_up=self.gate_up.flatten(1, 2),
            down=self.down,
            gate_up_scales=_flat(self.gate_up_scale_inv),
            down_scales=self.down_scale_inv,
        )

    def narrow(self) -> None:
        """Make the weights block FP8, without values."""
        self.gate_up_scale_inv, self.down_scale_inv = scales_like(self.gate_up), scales_like(self.down)
        self.gate_up, self.down = narrow_like(self.gate_up), narrow_like(self.down)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] sorted by local slot, counts [n_slots] on the CPU -> [N, hidden]."""
        return grouped_swiglu(x, counts, self.gate_up, self.down, self.gate_up_scale_inv, self.down_scale_inv)
