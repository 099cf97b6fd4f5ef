"""Where a planner may put experts: the seats of the ranks that have not failed, as one rectangle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..plan import Floats
from ..topology import Ints, Topology


@dataclass(frozen=True, kw_only=True)
class Seats:
    """Planners see usable ranks only, numbered 0.., each a row of as many seats as the largest has; some of a row may be closed.

    A table of seats is [layers, rows, width] int64: the logical expert of each seat, ``n_experts`` where it is empty or closed.
    """

    topology: Topology
    n_experts: int  # logical experts of a layer, which is also the number that says "empty"

    @cached_property
    def ranks(self) -> Ints:
        """[rows] rank of each row."""
        return np.flatnonzero(self.topology.alive).astype(np.int64)

    @cached_property
    def capacity(self) -> Ints:
        """[rows] open seats: a rank that has more slots than there are experts would only hold duplicates in the rest."""
        return np.minimum(np.array(self.topology.slots, dtype=np.int64)[self.ranks], self.n_experts)

    @cached_property
    def open(self) -> npt.NDArray[np.bool_]:
        """[rows, width] whether a seat is one: the open seats of a row come first."""
        return np.arange(self.capacity.max())[None] < self.capacity[:, None]

    @cached_property
    def speed(self) -> Floats:
        """[rows] relative speed, 1 on average."""
        return self.topology.speed[self.ranks]

    @cached_property
    def same_speed(self) -> bool:
        """Whether all rows have one speed."""
        return bool(np.ptp(self.speed) < 1e-12)

    @property
    def n_rows(self) -> int:
        """Usable ranks."""
        return len(self.ranks)

    @property
    def total(self) -> int:
        """Seats that may be filled without an expert twice on a rank."""
        return int(self.capacity.sum())

    def to_slots(self, seats: Ints) -> Ints:
        """Table of seats -> [layers, slots] expert of each slot, -1 where there is none."""
        slots = np.full((len(seats), self.topology.n_slots), -1, dtype=np.int64)
        slots[:, self._slots] = np.where(seats == self.n_experts, -1, seats)[:, self.open]
        return slots

    def from_slots(self, slot_to_expert: Ints) -> Ints:
        """[layers, slots] expert of each slot -> table of seats."""
        seats = np.full((len(slot_to_expert), *self.open.shape), self.n_experts, dtype=np.int64)
        chosen = slot_to_expert[:, self._slots]
        seats[:, self.open] = np.where(chosen < 0, self.n_experts, chosen)
        return seats

    @cached_property
    def _slots(self) -> Ints:
        """[open seats] slot of each, row by row."""
        first = self.topology.first_slot[self.ranks]
        return (first[:, None] + np.arange(self.open.shape[1]))[self.open]
