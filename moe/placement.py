"""Where logical experts live: the map from (layer, logical expert) to physical slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Physical slots of every layer. Slot s lives on EP rank ``s // slots_per_rank``: all ranks have the same number.

    Logical expert ids name what a checkpoint calls ``experts.E``; physical slot ids name places in memory. An expert may be in
    several slots (replicas), and slots may be empty. Changing the placement changes this table and moves bytes, and nothing else.
    """

    slot_to_expert: torch.Tensor  # [layers, slots] int64 on the CPU: the logical expert each slot holds, -1 for none
    n_experts: int  # logical experts per layer
    n_ranks: int  # EP ranks the slots are spread over

    def __post_init__(self) -> None:
        """ValueError: slots do not divide over the ranks, or hold what is no expert."""
        slots = self.n_slots
        if slots % self.n_ranks:
            valid = [slots + more for more in range(1, self.n_ranks) if (slots + more) % self.n_ranks == 0]
            raise ValueError(f"{slots} expert slots do not divide over {self.n_ranks} expert-parallel ranks; the next number is {valid[0]}")
        low, high = (int(v) for v in self.slot_to_expert.aminmax()) if self.slot_to_expert.numel() else (-1, -1)
        if low < -1 or high >= self.n_experts:
            raise ValueError(f"placement: slots must hold experts 0 to {self.n_experts - 1}, or -1 for none; found {low} to {high}")

    @classmethod
    def identity(cls, *, n_layers: int, n_experts: int, n_ranks: int, n_redundant: int = 0) -> Placement:
        """Slot s holds logical expert s; of ``n_redundant`` slots more, each holds another replica of experts 0, 1, 2 ..

        Raises:
            ValueError: the slots do not divide over the ranks.
        """
        slots = n_experts + n_redundant
        if n_redundant < 0:
            raise ValueError(f"redundant expert slots must be 0 or more, found {n_redundant}")
        if slots % n_ranks and not n_redundant:
            valid = [d for d in range(1, n_experts + 1) if n_experts % d == 0]
            more = -n_experts % n_ranks
            raise ValueError(
                f"{n_experts} routed experts do not divide over {n_ranks} expert-parallel ranks; valid sizes: {valid}"
                f", or use {more} redundant slots"
            )
        if slots % n_ranks:
            valid = [more for more in range(n_redundant + n_ranks + 1) if (n_experts + more) % n_ranks == 0][-2:]
            raise ValueError(
                f"{n_experts} routed experts and {n_redundant} redundant slots do not divide over {n_ranks} expert-parallel ranks; "
                f"nearest valid numbers of redundant slots: {valid}"
            )
        table = (torch.arange(slots) % n_experts).expand(n_layers, slots).contiguous()
        return cls(slot_to_expert=table, n_experts=n_experts, n_ranks=n_ranks)

    @classmethod
    def of(cls, slot_to_expert: npt.NDArray[np.int64] | torch.Tensor, *, n_experts: int, n_ranks: int) -> Placement:
        """A copy of a planner's or a user's [layers, slots], on the CPU.

        Raises:
            ValueError: slots do not divide over the ranks, hold what is no expert, or an expert has no slot.
        """
        table = torch.as_tensor(slot_to_expert).to(device="cpu", dtype=torch.int64, copy=True)
        placement = cls(slot_to_expert=table, n_experts=n_experts, n_ranks=n_ranks)
        placement.check()
        return placement

    def replaced(self, layers: Sequence[int], slot_to_expert: npt.NDArray[np.int64] | torch.Tensor) -> Placement:
        """A new placement in which the rows of some layers are those of ``slot_to_expert`` [len(layers), slots].

        Raises:
            ValueError: another number of layers or slots, or what is no expert.
        """
        rows = torch.as_tensor(slot_to_expert).to(torch.int64)
        if tuple(rows.shape) != (len(layers), self.n_slots):
            raise ValueError(f"placement: rows must be [{len(layers)}, {self.n_slots}] for the layers named, found {list(rows.shape)}")
        table = self.slot_to_expert.clone()
        table[list(layers)] = rows
        return Placement(slot_to_expert=table, n_experts=self.n_experts, n_ranks=self.n_ranks)

    @property
    def n_layers(self) -> int:
        """Layers of the table."""
        return self.slot_to_expert.shape[0]

    @property
    def n_slots(self) -> int:
        """Physical slots over all ranks."""
        return self.slot_to_expert.shape[1]

    @property
    def slots_per_rank(self) -> int:
        """Physical slots of one rank."""
        return self.n_slots // self.n_ranks

    def local_experts(self, layer: int, rank: int) -> list[int]:
        """Logical experts in the slots of EP rank ``rank``, in slot order, -1 for an empty slot."""
        lo = rank * self.slots_per_rank
        experts: list[int] = self.slot_to_expert[layer, lo : lo + self.slots_per_rank].tolist()
        return experts

    def counts(self) -> torch.Tensor:
        """[layers, experts] int64: slots that hold each logical expert."""
        held = torch.where(self.slot_to_expert < 0, self.n_experts, self.slot_to_expert)
        found = torch.zeros((self.n_layers, self.n_experts + 1), dtype=torch.int64)
        return found.scatter_add_(1, held, torch.ones_like(held))[:, : self.n_experts]

    def check(self) -> None:
        """ValueError: a layer has an expert without a slot."""
        missing = (self.counts() == 0).nonzero()
        if len(missing):
            layer, expert = missing[0].tolist()
            raise ValueError(f"placement: layer {layer} has no slot for expert {expert}")

    def first_slots(self) -> torch.Tensor:
        """[layers, experts] int64: the lowest slot that holds each logical expert.

        Raises:
            ValueError: an expert has no slot.
        """
        self.check()
        layers, slots = self.slot_to_expert.shape
        table = torch.full((layers, self.n_experts + 1), slots, dtype=torch.int64)
        held = torch.where(self.slot_to_expert < 0, self.n_experts, self.slot_to_expert)
        table.scatter_reduce_(1, held, torch.arange(slots).expand(layers, slots), reduce="amin")
        return table[:, : self.n_experts]
