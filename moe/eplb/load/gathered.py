"""Sums what the ranks of an EP group have recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....parallel.group import Group
from ..topology import Ints
from ..trace import PHASES

if TYPE_CHECKING:
    from .recorder import StepNote

#: bytes of one rank's counts that are summed at a time; every rank holds those of all ranks meanwhile
_AT_ONCE = 4 << 20


def gather_steps(group: Group, counts: Ints, notes: Sequence[StepNote]) -> tuple[Ints, Ints, Ints]:
    """Counts [steps, layers, experts] of all ranks together, and [steps] their tokens and phases. Collective.

    A step's phase is what all ranks with tokens agree on, otherwise "mixed".

    Raises:
        ValueError: the ranks recorded different steps.
    """
    shape = (len(notes), notes[0].step if notes else -1, *counts.shape)
    shapes = group.gather_ints(shape)
    if (shapes != shapes[0]).any():
        found = {rank: f"{row[0]} steps from step {row[1]}" for rank, row in zip(group.ranks, shapes.tolist(), strict=True)}
        raise ValueError(f"expert distribution recorder: the ranks of group {group.name} recorded different steps or layers: {found}")
    whole = np.empty_like(counts)
    rows = max(1, _AT_ONCE // max(1, counts[:1].nbytes))
    for start in range(0, len(counts), rows):
        part = torch.from_numpy(np.ascontiguousarray(counts[start : start + rows]))
        whole[start : start + rows] = group.all_reduce(part.clone()).numpy()
    said = group.gather_ints([value for note in notes for value in (note.tokens, note.phase)]).reshape(group.size, -1, 2)
    return whole, said[:, :, 0].sum(0), common_phase(said[:, :, 1], said[:, :, 0])


def common_phase(phases: Ints, tokens: Ints) -> Ints:
    """[ranks, steps] indices into PHASES and tokens -> [steps]: what the ranks with tokens agree on, otherwise "mixed"."""
    mixed = PHASES.index("mixed")
    high = np.where(tokens > 0, phases, -1).max(0)
    low = np.where(tokens > 0, phases, len(PHASES)).min(0)
    return np.where((high == low) & (high >= 0), high, mixed).astype(np.int64)
