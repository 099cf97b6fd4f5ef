"""Experts of a rank that change places with each other: in place, with room for one expert at most beside the slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.move_slots_torch import move_slots as _twin
from ..kernels.move_slots_torch import plan_moves, spare_of

__all__ = ["SlotMover", "local_sources", "plan_moves"]


def local_sources(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """From which of its own slots a rank can take what each slot shall hold.

    Args:
        before: expert of each of the rank's slots, -1 for none.
        after: the same as wanted.

    Returns:
        A slot for each, as ``SlotMover.move`` takes them; -1 where nothing moves: the slot holds the expert already, shall be
        empty, or the rank does not have the expert.

    Raises:
        ValueError: another number of slots.
    """
    if len(before) != len(after):
        raise ValueError(f"a rank's slots stay as many as they were: {len(before)} before, {len(after)} after")
    holder = {expert: slot for slot, expert in reversed(list(enumerate(before))) if expert >= 0}
    return [-1 if new < 0 or new == old else holder.get(new, -1) for old, new in zip(before, after, strict=True)]


class SlotMover:
    """Moves everything that belongs to an expert between the slots of this rank. Allocates nothing after it was made."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, backend: str = "auto") -> None:
        """tensors: each [slots, ...], contiguous: weights, scales and what is derived from them.

        Args:
            tensors: the declared state of the experts of one layer (or of layers of the same shape, one call each).
            backend: "torch" (a spare place of one expert), "triton" (in registers), or "auto": triton on CUDA.

        Raises:
            ValueError: another backend.
        """
        if backend not in ("auto", "torch", "triton"):
            raise ValueError(f"backend of slot moves must be auto, torch or triton, found {backend!r}")
        self._tensors = list(tensors)
        self.triton = backend == "triton" or (backend == "auto" and bool(tensors) and tensors[0].is_cuda)
        self._spare = None if self.triton else spare_of(self._tensors)

    @property
    def bytes_of_expert(self) -> int:
        """Bytes of a slot over all tensors."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self._tensors)

    def move(self, source: Sequence[int]) -> int:
        """Slot s takes over what slot ``source[s]`` holds (-1: nothing). Returns slots written.

        Raises:
            ValueError: a tensor has gaps, or a source is no slot; nothing was written.
        """
        if self.triton:
            from ..kernels.move_slots import move_slots

            return move_slots(self._tensors, source)
        return _twin(self._tensors, source, self._spare)
