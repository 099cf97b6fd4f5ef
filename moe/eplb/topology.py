"""The machine that experts are placed on: ranks, their slots and their nodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Slots are numbered rank by rank. A rank that has failed keeps its numbers, and may hold nothing."""

    slots: tuple[int, ...]  # physical slots of each rank, one or more
    nodes: tuple[int, ...]  # node of each rank
    failed: frozenset[int] = frozenset()  # ranks that may hold nothing
    speeds: tuple[float, ...] | None = None  # tokens per second of each rank relative to the others; None: all the same

    def __post_init__(self) -> None:
        """ValueError: the parts do not fit each other."""
        n = len(self.slots)
        if n == 0 or min(self.slots) < 1:
            raise ValueError(f"topology: every rank needs a slot, found slots={self.slots}; name a failed rank in `failed` instead")
        if len(self.nodes) != n:
            raise ValueError(f"topology: {n} ranks have slots and {len(self.nodes)} have a node; give one node for each rank")
        if self.speeds is not None and (len(self.speeds) != n or not all(0 < speed < float("inf") for speed in self.speeds)):
            raise ValueError(f"topology: speeds must be {n} finite numbers above 0, one for each rank, found {self.speeds}")
        if not all(0 <= rank < n for rank in self.failed) or len(self.failed) == n:
            raise ValueError(f"topology: failed ranks {sorted(self.failed)} must be some of the ranks 0 to {n - 1}, and not all")

    @classmethod
    def even(cls, *, n_slots: int, n_ranks: int, n_nodes: int = 1) -> Topology:
        """Ranks of the same size if they divide the slots; otherwise the first ranks have one slot more. Nodes likewise.

        Raises:
            ValueError: fewer slots than ranks, or fewer ranks than nodes.
        """
        if not 1 <= n_nodes <= n_ranks <= n_slots:
            raise ValueError(f"{n_slots} slots, {n_ranks} ranks, {n_nodes} nodes: needs 1 <= nodes <= ranks <= slots")
        return cls(slots=_split(n_slots, n_ranks), nodes=tuple(np.repeat(np.arange(n_nodes), _split(n_ranks, n_nodes)).tolist()))

    @property
    def n_ranks(self) -> int:
        """Ranks, failed ones included."""
        return len(self.slots)

    @property
    def n_slots(self) -> int:
        """Slots of all ranks, failed ones included."""
        return sum(self.slots)

    @cached_property
    def rank_of_slot(self) -> Ints:
        """[slots] rank of each slot."""
        return np.repeat(np.arange(self.n_ranks), self.slots)

    @cached_property
    def node_of_rank(self) -> Ints:
        """[ranks] node of each rank, numbered from 0 in the order of their first rank."""
        names = list(dict.fromkeys(self.nodes))
        return np.array([names.index(node) for node in self.nodes], dtype=np.int64)

    @cached_property
    def node_of_slot(self) -> Ints:
        """[slots] node of each slot."""
        return self.node_of_rank[self.rank_of_slot]

    @property
    def n_nodes(self) -> int:
        """Different nodes."""
        return len(set(self.nodes))

    @cached_property
    def alive(self) -> npt.NDArray[np.bool_]:
        """[ranks] whether a rank has not failed."""
        return ~np.isin(np.arange(self.n_ranks), sorted(self.failed))

    @cached_property
    def usable(self) -> npt.NDArray[np.bool_]:
        """[slots] whether a slot may hold an expert: its rank has not failed."""
        return self.alive[self.rank_of_slot]

    @cached_property
    def speed(self) -> npt.NDArray[np.float64]:
        """[ranks] speed of each rank, 1 on average over the ranks that have not failed."""
        speeds = np.ones(self.n_ranks) if self.speeds is None else np.array(self.speeds, dtype=np.float64)
        relative: npt.NDArray[np.float64] = speeds / speeds[self.alive].mean()
        return relative

    @cached_property
    def first_slot(self) -> Ints:
        """[ranks + 1] first slot of each rank; the last entry is the number of slots."""
        return np.concatenate([[0], np.cumsum(self.slots)]).astype(np.int64)

    def without(self, ranks: Iterable[int]) -> Topology:
        """The same machine after these ranks have failed as well."""
        return replace(self, failed=self.failed | frozenset(ranks))


def _split(total: int, parts: int) -> tuple[int, ...]:
    few, more = divmod(total, parts)
    return tuple(few + (part < more) for part in range(parts))
