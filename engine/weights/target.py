"""Where a checkpoint tensor, or a part of it, goes on this rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Target:
    """One place on this rank that part of a checkpoint tensor fills."""

    tensor: torch.Tensor  # destination view, any float dtype and device; written in place
    index: tuple[slice, ...]  # the part of the full tensor that fills it: one slice a dimension, step 1
    full_shape: tuple[int, ...]  # shape the checkpoint must have

    def __post_init__(self) -> None:
        assert len(self.index) == len(self.full_shape), f"index {self.index} has not the rank of shape {self.full_shape}"
        part = self.part_shape
        assert tuple(self.tensor.shape) == part, f"destination {tuple(self.tensor.shape)} differs from the part {part} it is for"

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every dimension."""
        return tuple(s.indices(n)[:2] for s, n in zip(self.index, self.full_shape, strict=True))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(stop - start for start, stop in self.bounds)
