"""Layers in the middle of a search: who holds what, and what each rank's score is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..plan import Floats, replica_counts
from ..planner.objective import Objective
from ..topology import Ints, Topology

_EVEN = 3e-4  # weight of evenness below the limit

Bools = npt.NDArray[np.bool_]
AnyFloats = npt.NDArray[np.floating]


class SearchState:
    """Some layers, searched together. Inside, an empty slot holds expert number ``n_experts``, whose load is 0.

    Attributes:
        layers: [B] which layers of the plan these are.
        slots: [B, S] expert of each slot.
        counts: [B, E + 1] slots of each expert.
        holds: [B, R, E + 1] slots of a rank that hold an expert.
        values, more, fewer: [C, B, E + 1] score (at speed 1) of one of an expert's replicas: now, if there were one more, and if there were
            one fewer (of an only replica: as now).
        parts: [C, B, R] components of the ranks' scores.
        scale: [B] scores are in units of the limit that ranks shall not exceed, so that the limit is 1.
        had: [B, R, E + 1] whether a rank held an expert before the search: then it arrives there without being moved.
    """

    def __init__(
        self,
        slots: Ints,
        load: Floats,
        topology: Topology,
        *,
        objective: Objective,
        limit: Floats,
        groups: Ints,
        had: Bools,
        spread: bool,
        everyone: bool,
    ) -> None:
        """Slots and load of B layers.

        Args:
            slots: [B, S], -1: empty.
            load: [B, E] routed choices of one step.
            topology: of the slots.
            objective: what scores are.
            limit: [B] score that no rank shall exceed.
            groups: [S] rank or node of each slot.
            had: as the attribute.
            spread: replicas of an expert shall not all be in one of the groups.
            everyone: and every expert that has two replicas keeps two.
        """
        self.n_experts = load.shape[1]
        self.topology, self.objective, self.had = topology, objective, had
        self.scale = 1.0 / np.where(limit > 0, limit, 1.0)
        self.layers = np.arange(len(slots))
        self.slots = np.where(slots < 0, self.n_experts, slots)
        self.load = np.concatenate([load, np.zeros((len(load), 1))], axis=1)
        self.alive = topology.alive
        self.pace = 1.0 / topology.speed  # [R]
        self.groups, self.spread, self.everyone = groups, spread, everyone
        self.counts = replica_counts(self.slots, self.n_experts + 1)
        self.holds = self._held(self.slots, topology.rank_of_slot)
        self.grouped = self.holds if groups is topology.rank_of_slot else self._held(self.slots, groups)
        self.refresh()

    def refresh(self) -> None:
        """Values and scores anew, after slots and counts have changed."""
        counts = np.maximum(self.counts, 1)
        self.values = self._value(counts)
        self.more = self._value(counts + 1)
        self.fewer = self._value(np.maximum(counts - 1, 1))
        each = self.values[:, np.arange(len(self.slots))[:, None], self.slots]
        self.parts = np.add.reduceat(each, self.topology.first_slot[:-1], axis=-1) * self.pace

    def _value(self, counts: Ints) -> Floats:
        return self.objective.values(self.load, counts) * self.scale[:, None]

    @property
    def ranking(self) -> Floats:
        """[B, R] score of each rank, infinite for failed ones."""
        return np.where(self.alive, self.scores, np.inf)

    @property
    def scores(self) -> Floats:
        """[B, R] score of each rank."""
        best: Floats = self.parts.max(0)
        return best

    def put(self, rows: Ints, slots: Ints, experts: Ints) -> Ints:
        """Slots (one of each named row) get experts; returns what they held. ``refresh`` is to be called when all is put."""
        old: Ints = self.slots[rows, slots]
        self.slots[rows, slots] = experts
        ranks, groups = self.topology.rank_of_slot[slots], self.groups[slots]
        for held, step in ((old, -1), (experts, 1)):
            self.counts[rows, held] += step
            self.holds[rows, ranks, held] += step
            if self.grouped is not self.holds:
                self.grouped[rows, groups, held] += step
        return old

    def replace(self, rows: Bools | Ints, slots: Ints) -> None:
        """Other placements [n, S] for some layers; ``refresh`` is to be called when all are replaced."""
        self.slots[rows] = slots
        self.counts[rows] = replica_counts(slots, self.n_experts + 1)
        self.holds[rows] = self._held(slots, self.topology.rank_of_slot)
        if self.grouped is not self.holds:
            self.grouped[rows] = self._held(slots, self.groups)

    def _held(self, slots: Ints, groups: Ints) -> npt.NDArray[np.int16]:
        return holdings(slots, groups, int(groups.max()) + 1, self.n_experts + 1)

    def keep(self, rows: Bools) -> None:
        """Go on with some of the layers."""
        same = self.grouped is self.holds
        for name in ("layers", "slots", "load", "counts", "holds", "had", "scale"):
            setattr(self, name, getattr(self, name)[rows])
        self.grouped = self.holds if same else self.grouped[rows]
        for name in ("values", "more", "fewer", "parts"):
            setattr(self, name, getattr(self, name)[:, rows])


def holdings(slots: Ints, group_of_slot: Ints, n_groups: int, n_experts: int) -> npt.NDArray[np.int16]:
    """[L, groups, n_experts] slots of a group (a rank or a node) that hold each expert, of slots [L, S] without empty ones."""
    n_layers = len(slots)
    keys = (np.arange(n_layers)[:, None] * n_groups + group_of_slot) * n_experts + slots
    found = np.bincount(keys.ravel(), minlength=n_layers * n_groups * n_experts)
    return found.reshape(n_layers, n_groups, n_experts).astype(np.int16)


def excess(parts: AnyFloats) -> AnyFloats:
    """[...] what a search makes small, of ranks with components [C, ...]: the square of what their score exceeds the limit, 1, by.

    A little of the square of the score itself decides between changes that are as good: it leaves the others more room.
    """
    score = parts[0] if len(parts) == 1 else parts.max(0)
    over: AnyFloats = np.maximum(score, 1.0)
    over -= 1.0
    over *= over
    over += score * score * parts.dtype.type(_EVEN)
    return over
