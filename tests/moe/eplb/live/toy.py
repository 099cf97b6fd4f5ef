"""A rank's toy experts whose bytes say which expert they are, and tables that note what they are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rorqual.moe.eplb.live.state import ExpertState
from rorqual.moe.eplb.topology import Ints, Topology

HIDDEN, INNER = 6, 4


def expert_values(layer: int, expert: int) -> dict[str, torch.Tensor]:
    """Small whole numbers, so that sums of products are exact in float32 in any order."""
    generator = torch.Generator().manual_seed(1000 * layer + expert)
    up = torch.randint(-3, 4, (INNER, HIDDEN), generator=generator).float()
    down = torch.randint(-3, 4, (HIDDEN, INNER), generator=generator).float()
    scale = torch.randint(1, 4, (), generator=generator).float()
    return {"down": down, "scale": scale, "up": up.to(torch.float8_e4m3fn)}


class ToyExperts(nn.Module):
    """Weights of two dtypes, a scale that is one number a slot, and a tensor that is derived from them."""

    def __init__(self, layer: int, slots: Sequence[int]) -> None:
        super().__init__()
        n = len(slots)
        self.layer = layer
        self.up = nn.Parameter(torch.zeros(n, INNER, HIDDEN).to(torch.float8_e4m3fn), requires_grad=False)
        self.down = nn.Parameter(torch.zeros(n, HIDDEN, INNER), requires_grad=False)
        self.register_buffer("scale", torch.zeros(n))
        self.wide = torch.zeros(INNER, n * HIDDEN)  # up * scale of all slots side by side: no slot dimension in front
        self.remade: list[int] = []
        for slot, expert in enumerate(slots):
            if expert >= 0:
                for name, value in expert_values(layer, expert).items():
                    getattr(self, name).data[slot] = value
        self.derive(range(n))

    def derive(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.wide[:, slot * HIDDEN : (slot + 1) * HIDDEN] = self.up[slot].float() * self.scale[slot]
        self.remade += slots

    def state(self) -> ExpertState:
        return ExpertState.of_module(self, n_slots=len(self.up), where=f"layer {self.layer}", derived={"wide": self.derive})

    def forward(self, x: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """x [N, hidden], slot [N] local -> [N, hidden], from the derived weights."""
        up = self.wide.view(INNER, -1, HIDDEN).transpose(0, 1)[slot]  # [N, inner, hidden]
        return torch.einsum("nhi,nix,nx->nh", self.down[slot], up, x)

    def holds(self, slots: Sequence[int]) -> bool:
        """Whether its bytes are those of these experts, in all tensors; what an empty slot holds does not matter."""
        for slot, expert in enumerate(slots):
            if expert < 0:
                continue
            for name, value in expert_values(self.layer, expert).items():
                if not torch.equal(getattr(self, name)[slot].float(), value.float()):
                    return False
            wide = expert_values(self.layer, expert)
            if not torch.equal(self.wide[:, slot * HIDDEN : (slot + 1) * HIDDEN], wide["up"].float() * wide["scale"]):
                return False
        return True

    def bytes(self) -> bytes:
        parts = [self.up.view(torch.uint8), self.down, self.scale, self.wide]
        return b"".join(part.numpy().tobytes() for part in parts)


class ToyTables:
    """``Tables`` that keep the slots of all layers."""

    def __init__(self, slots: Ints) -> None:
        self.slots = slots.copy()
        self.writes = 0

    def deal(self, layers: Sequence[int], rows: Ints) -> Any:
        return rows.copy()

    def write(self, layers: Sequence[int], dealt: Any) -> None:
        self.slots[list(layers)] = dealt
        self.writes += 1


def toy_layers(slots: Ints, topology: Topology, rank: int) -> list[ToyExperts]:
    first, stop = topology.first_slot[rank : rank + 2]
    return [ToyExperts(layer, row[first:stop].tolist()) for layer, row in enumerate(slots)]


def is_whole(layers: Sequence[ToyExperts], slots: Ints, topology: Topology, rank: int) -> bool:
    """Whether the rank's bytes are those of ``slots``."""
    first, stop = topology.first_slot[rank : rank + 2]
    return all(layer.holds(np.asarray(row)[first:stop].tolist()) for layer, row in zip(layers, slots, strict=True))
