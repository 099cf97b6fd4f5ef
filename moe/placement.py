"""Where logical experts live: the map from (layer, logical expert) to physical slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Physical slots of every layer. Slot s lives on EP rank ``s // slots_per_rank``.

    Logical expert ids name what a checkpoint calls ``experts.E``; physical slot ids name places in memory. Changing the
    placement changes this table and moves bytes, and nothing else.
    """

    slot_to_expert: torch.Tensor  # [layers, slots] int64: the logical expert each slot holds
    n_experts: int  # logical experts per layer
    n_ranks: int  # EP ranks the slots are spread over

    @classmethod
    def identity(cls, *, n_layers: int, n_experts: int, n_ranks: int) -> Placement:
        """Slot s holds logical expert s.

        Raises:
            ValueError: the experts do not divide over the ranks.
        """
        if n_experts % n_ranks:
            valid = [d for d in range(1, n_experts + 1) if n_experts % d == 0]
            raise ValueError(f"{n_experts} routed experts do not divide over {n_ranks} expert-parallel ranks; valid sizes: {valid}")
        table = torch.arange(n_experts).expand(n_layers, n_experts).contiguous()
        return cls(slot_to_expert=table, n_experts=n_experts, n_ranks=n_ranks)

    @property
    def n_slots(self) -> int:
        """Physical slots over all ranks."""
        return self.slot_to_expert.shape[1]

    @property
    def slots_per_rank(self) -> int:
        """Physical slots of one rank."""
        return self.n_slots // self.n_ranks

    def local_experts(self, layer: int, rank: int) -> list[int]:
        """Logical experts in the slots of EP rank ``rank``, in slot order."""
        lo = rank * self.slots_per_rank
        experts: list[int] = self.slot_to_expert[layer, lo : lo + self.slots_per_rank].tolist()
        return experts

    def first_slots(self) -> torch.Tensor:
        """[layers, experts] int64: the lowest slot that holds each logical expert.

        Raises:
            ValueError: an expert has no slot.
        """
        layers, slots = self.slot_to_expert.shape
        table = torch.full((layers, self.n_experts), slots, dtype=torch.int64)
        table.scatter_reduce_(1, self.slot_to_expert, torch.arange(slots).expand(layers, slots), reduce="amin")
        if bool((table == slots).any()):
            layer, expert = (table == slots).nonzero()[0].tolist()
            raise ValueError(f"placement: layer {layer} has no slot for expert {expert}")
        return table
