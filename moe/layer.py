"""The mixture-of-experts layer and the gated MLP it shares with dense layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .config import MoEConfig
from .exchange import ExpertExchange
from .experts import Experts
from .router import Router


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]: routed experts, then the shared expert, summed in that order."""
        return self.exchange.run(self.layer, x, self.gate, self.experts, self.shared_experts)
