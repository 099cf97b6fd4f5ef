"""The mixture-of-experts layer and the gated MLP it shares with dense layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..parallel.linear import Stacked, gated_product, stack
from .config import MoEConfig
from .exchange import ExpertExchange, Flight
from .experts import Experts
from .router import Router


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.gate_up: Stacked | None = None

    def fuse(self) -> None:
        """Compute gate and up as one product from now on, where their weights allow; called once they are in place."""
        self.gate_up = stack([self.gate_proj, self.up_proj])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        if self.gate_up is not None:
            both = self.gate_up(x)
            down = self.down_proj
            fused: torch.Tensor = gated_product(both, down.weight, None) if isinstance(down, nn.Linear) else down.gated(both)
            return fused
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer. ``attach`` gives it the exchange of its rank."""

    exchange: ExpertExchange

    def __init__(self, config: MoEConfig, layer: int, *, n_slots: int, inner: int) -> None:
        super().__init__()
        self.layer = layer
        self.gate = Router(config)
        self.experts = Experts(n_slots, config.hidden, inner)
        self.shared_experts = MLP(config.hidden, config.n_shared * config.intermediate) if config.n_shared else None

    def attach(self, exchange: ExpertExchange) -> None:
        """Connect the layer to the expert-parallel group of its rank."""
        self.exchange = exchange

    def forward(self, x: torch.Tensor, n_valid: torch.Tensor | None = None, most_tokens: int | None = None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]: routed experts, then the shared expert, summed in that order; see ``ExpertExchange.run``."""
        return self.exchange.run(self.layer, x, self.gate, self.experts, self.shared_experts, n_valid, most_tokens)

    def begin(self, x: torch.Tensor, n_valid: torch.Tensor | None = None, most_tokens: int | None = None) -> Flight:
        """First part of ``forward``: the tokens are on their way. ``compute`` and ``finish`` give what ``forward`` gives."""
        return self.exchange.begin(self.layer, x, self.gate, n_valid, most_tokens)

    def compute(self, x: torch.Tensor, flight: Flight) -> torch.Tensor | None:
        """Second part: the shared expert's output for ``x``, if there is one; routed experts compute, their results are on the way."""
        beside = None if self.shared_experts is None else self.shared_experts(x)
        self.exchange.compute(flight, self.experts)
        return beside

    def finish(self, flight: Flight, beside: torch.Tensor | None) -> torch.Tensor:
        """Third part, with what ``compute`` gave: [T, hidden]."""
        out = self.exchange.finish(flight)
        return out if beside is None else out + beside
