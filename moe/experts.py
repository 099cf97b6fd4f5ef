"""SwiGLU experts in physical slots, computed group by group."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def grouped_swiglu(x: torch.Tensor, counts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """``down(silu(gate(x)) * up(x))`` with one expert per group of rows.

    Args:
        x: [N, hidden] rows sorted by slot.
        counts: [S] int64 on the CPU, rows of each slot, summing to N.
        gate_up: [S, 2, I, hidden] gate then up projection of each slot.
        down: [S, hidden, I] down projection of each slot.

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
        both = F.linear(x[start:stop], gate_up[slot].view(2 * inner, hidden))
        torch.mm(F.silu(both[:, :inner]) * both[:, inner:], down[slot].t(), out=y[start:stop])
        start = stop
    assert start == len(x), f"counts sum to {start}, rows are {len(x)}"
    return y


class Experts(nn.Module):
    """The experts that one rank hosts: ``n_slots`` physical slots of ``inner`` width."""

    def __init__(self, n_slots: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(n_slots, 2, inner, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(n_slots, hidden, inner), requires_grad=False)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x [N, hidden] sorted by local slot, counts [n_slots] on the CPU -> [N, hidden]."""
        return grouped_swiglu(x, counts, self.gate_up, self.down)
