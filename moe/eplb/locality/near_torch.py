"""The choice of ``near`` for one layer on the device: fixed shapes and no host reads, so that a CUDA graph can hold it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .fan_out import replica_table
from .near import CHANCE, NearChoice


@dataclass(frozen=True, kw_only=True)
class NearTables:
    """A layer's replicas and prices. Row or entry -1 (the last) stands for no expert, no slot, no rank and no node."""

    slots: torch.Tensor  # [experts + 1, most replicas] int64, -1: no more
    width: torch.Tensor  # [experts + 1] int64 replicas
    home: torch.Tensor  # [experts + 1] int64 node of all replicas; the number of nodes if they are on several, or none
    price: torch.Tensor  # [slots + 1] float32, infinite for the last: rewritten in place when prices are corrected
    node: torch.Tensor  # [slots + 1] int64
    rank: torch.Tensor  # [slots + 1] int64
    n_nodes: int
    n_ranks: int
    rank_weight: float  # nodes that one more rank is worth

    @classmethod
    def of(cls, choice: NearChoice, layer: int, device: torch.device | str = "cpu") -> NearTables:
        """The tables of one layer of a choice."""
        table, width = replica_table(choice.slot_to_expert[layer : layer + 1], choice.n_experts)
        topology = choice.topology
        slots = torch.from_numpy(table[0])
        node = torch.tensor([*topology.node_of_slot.tolist(), topology.n_nodes])
        nodes = node[slots]
        same = ((nodes == nodes[:, :1]) | (slots < 0)).all(1)
        return cls(
            slots=slots.to(device),
            width=torch.from_numpy(width[0]).to(device),
            home=torch.where(same, nodes[:, 0], topology.n_nodes).to(device),
            price=torch.tensor([*choice.price[layer].tolist(), float("inf")], dtype=torch.float32, device=device),
            node=node.to(device),
            rank=torch.tensor([*topology.rank_of_slot.tolist(), topology.n_ranks], device=device),
            n_nodes=topology.n_nodes,
            n_ranks=topology.n_ranks,
            rank_weight=choice.rank_weight,
        )

    def choose(self, ids: torch.Tensor, own_node: torch.Tensor | None = None, first: int = 0) -> torch.Tensor:
        """Slots of choices.

        Args:
            ids: [tokens, top_k] int64 experts, -1: none.
            own_node: [tokens] int64 node that each starts on, which then costs nothing; None: no node is free.
            first: place of the first token in its batch: chance goes by place.

        Returns:
            [tokens, top_k] int64 slots, -1: none.
        """
        tokens, k = ids.shape
        place = torch.arange(first, first + tokens, device=ids.device)[:, None]
        far = ids.new_ones(tokens, self.n_nodes + 1, dtype=torch.float32).scatter_(1, self.home[ids], 0.0)
        away = ids.new_full((tokens, self.n_ranks + 1), self.rank_weight, dtype=torch.float32)
        alone = torch.where(self.width[ids] == 1, self.slots[ids][..., 0], -1)
        away.scatter_(1, self.rank[alone], 0.0)
        far[:, -1], away[:, -1] = 0.0, 0.0
        if own_node is not None:
            far.scatter_(1, own_node[:, None], 0.0)
        order = self.width[ids].argsort(dim=1, stable=True)  # who can choose most, chooses last
        chosen = torch.full_like(ids, -1)
        for turn in range(k):
            column = order[:, turn : turn + 1]
            slots = self.slots[ids.gather(1, column)[:, 0]]  # [tokens, most replicas]
            cost = self.price[slots] + _chance(place, slots)
            cost += far.gather(1, self.node[slots])
            cost += away.gather(1, self.rank[slots])
            slot = slots.gather(1, cost.argmin(1, keepdim=True))
            chosen.scatter_(1, column, slot)
            far.scatter_(1, self.node[slot], 0.0)
            away.scatter_(1, self.rank[slot], 0.0)
        return chosen


def _chance(place: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """[tokens, n] float32 that differs by token and slot, as in ``near``."""
    mixed = (place * 2654435761 + slot * 2246822519) & 0xFFFFFFFF
    for _ in range(2):
        mixed = ((mixed ^ (mixed >> 16)) * 73244475) & 0xFFFFFFFF
    return (CHANCE * ((mixed ^ (mixed >> 16)).double() / 2.0**32)).float()
