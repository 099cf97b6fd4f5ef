"""What is lost when a rank or a node fails, and maps in which nothing is missing and as little as possible can be lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import Floats
from ..topology import Ints, Topology
from .state import holdings

COVERAGES = ("any", "ranks", "nodes")


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Experts that no other rank (node) holds: they are lost, until they are read from disk again, when that one fails."""

    by_rank: Ints  # [layers, ranks]
    by_node: Ints  # [layers, nodes] nodes as ``Topology.node_of_rank`` numbers them

    @property
    def worst_rank(self) -> int:
        """Experts of all layers that the worst single rank takes with it."""
        return int(self.by_rank.sum(0).max())

    @property
    def worst_node(self) -> int:
        """Experts of all layers that the worst single node takes with it."""
        return int(self.by_node.sum(0).max())

    def text(self) -> str:
        """Two lines for a log or a report."""
        lines = []
        for name, lost in (("rank", self.by_rank), ("node", self.by_node)):
            each = lost.sum(0)
            safe, worst = int((each == 0).sum()), int(each.argmax())
            lines.append(
                f"one {name} fails: {each.mean() / len(lost):.2f} experts a layer are lost on average, {lost.max()} at most; "
                f"worst is {name} {worst} ({each[worst]} experts of {len(lost)} layers); "
                f"{safe} of {len(each)} {name}s can fail without a loss"
            )
        return "\n".join(lines)


def losses(slot_to_expert: Ints, n_experts: int, topology: Topology) -> Losses:
    """Experts lost with each single rank and each single node of a map [layers, slots] (-1: empty)."""
    slots = np.where(topology.usable, slot_to_expert, -1)
    slots = np.where(slots < 0, n_experts, slots)

    def only(groups: Ints, n: int) -> Ints:
        held = holdings(slots, groups, n, n_experts + 1)[:, :, :n_experts] > 0
        alone: Ints = (held & (held.sum(1, keepdims=True) == 1)).sum(2)
        return alone

    return Losses(by_rank=only(topology.rank_of_slot, topology.n_ranks), by_node=only(topology.node_of_slot, topology.n_nodes))


def groups_of(coverage: str, topology: Topology) -> Ints:
    """[slots] the rank or node of each slot, whichever coverage is about. ValueError: unknown coverage."""
    if coverage not in COVERAGES:
        raise ValueError(f"coverage must be one of {', '.join(COVERAGES)}, found {coverage!r}")
    return topology.node_of_slot if coverage == "nodes" else topology.rank_of_slot


def can_cover(n_experts: int, coverage: str, topology: Topology) -> bool:
    """Whether every expert can be on two ranks (nodes): slots for two replicas of each, half of them outside any one rank (node)."""
    if coverage == "any":
        return False
    sizes = np.bincount(groups_of(coverage, topology)[topology.usable])
    return int(np.minimum(sizes, n_experts).sum()) >= 2 * n_experts


def mend(slot_to_expert: Ints, load: Floats, topology: Topology, coverage: str = "any") -> Ints:
    """A map without what is missing: every expert has a slot, and is on two ranks (nodes) if ``coverage`` asks for it and slots allow.

    Few slots change: empty ones are filled, replicas that can be spared give way (those whose expert stays lightest first). An expert
    that has several replicas is spread over two ranks (nodes) even where slots do not allow it for all.

    Args:
        slot_to_expert: [layers, slots], -1: empty. Slots of failed ranks are emptied.
        load: [layers, experts].
        topology: of the slots.
        coverage: one of COVERAGES.

    Raises:
        ValueError: fewer usable slots than experts.
    """
    n_experts = load.shape[1]
    usable = int(topology.usable.sum())
    if usable < n_experts:
        raise ValueError(f"{usable} slots of the ranks that have not failed cannot hold {n_experts} experts; add ranks or slots")
    groups, twice = groups_of(coverage, topology), can_cover(n_experts, coverage, topology)
    result = np.where(topology.usable, slot_to_expert, -1)
    counts = holdings(np.where(result < 0, n_experts, result), groups, int(groups.max()) + 1, n_experts + 1)[:, :, :n_experts]
    spread, total = (counts > 0).sum(1), counts.sum(1)
    poor = (total == 0) | ((coverage != "any") & (spread < 2) & ((total >= 2) | twice))
    for layer in np.flatnonzero(poor.any(1)):
        _Mender(result[layer], load[layer], topology, groups).mend(needed=2 if twice else 1, spread=coverage != "any")
    return result


class _Mender:
    """One layer's map, changed in place."""

    def __init__(self, slots: Ints, load: Floats, topology: Topology, groups: Ints) -> None:
        self.slots, self.load, self.groups, self.ranks = slots, load, groups, topology.rank_of_slot
        self.usable = topology.usable
        self.n_experts = len(load)
        self.held = holdings(np.where(slots < 0, self.n_experts, slots)[None], groups, int(groups.max()) + 1, self.n_experts + 1)[0]

    def mend(self, *, needed: int, spread: bool) -> None:
        """First a slot for everyone, then two ranks (nodes) for those with two replicas if ``spread``, then ``needed`` for everyone."""
        heaviest = np.argsort(-self.load, kind="stable").tolist()
        for expert in heaviest:
            if not self.held[:, expert].any():
                self._give(expert, 1)
        if spread:
            for expert in range(self.n_experts):  # looked at one by one: an exchange may spread the other expert as well
                if self.held[:, expert].sum() >= 2 and (self.held[:, expert] > 0).sum() < 2:
                    self._exchange(expert)
        if needed == 2:
            for expert in heaviest:
                if (self.held[:, expert] > 0).sum() < 2:
                    self._give(expert, 2)

    def _put(self, slot: int, expert: int) -> None:
        self.held[self.groups[slot], self.slots[slot]] -= self.slots[slot] >= 0
        self.slots[slot] = expert
        self.held[self.groups[slot], expert] += 1

    def _spared(self, level: int) -> Ints:
        """[slots] whether a slot's expert is on ``level`` ranks (nodes) without it; empty slots are."""
        counts, distinct = self.held.sum(0), (self.held > 0).sum(0)
        leaves = self.held[self.groups, self.slots] == 1
        spared: Ints = (counts[self.slots] >= 2) & ((distinct[self.slots] - leaves >= level) | ~leaves)
        return self.usable & (spared | (self.slots < 0))

    def _give(self, expert: int, level: int) -> None:
        """One slot more for an expert, on a rank (node) that does not hold it."""
        counts = np.maximum(self.held.sum(0), 1)
        each = np.append(self.load / counts[:-1], 0.0)
        totals = np.bincount(self.ranks, weights=each[self.slots], minlength=self.ranks[-1] + 1)
        free = (self.held[self.groups, expert] == 0) & self._spared(level)
        if not free.any():
            return self._make_room(expert)
        remaining = np.where(self.slots < 0, -1.0, self.load[self.slots] / np.maximum(counts[self.slots] - 1, 1))
        order = np.lexsort((totals[self.ranks] - each[self.slots], remaining, ~free))
        self._put(int(order[0]), expert)

    def _make_room(self, expert: int) -> None:
        """All spare slots are on the expert's own rank (node): one of them takes another expert, whose slot elsewhere becomes free."""
        spare = np.flatnonzero(self._spared(2))
        home = self.held[self.groups, expert] > 0
        for slot in spare:
            fits = self.usable & ~home & (self.held[self.groups[slot], self.slots] == 0)
            if fits.any():
                other = int(np.flatnonzero(fits)[0])
                self._put(int(slot), int(self.slots[other]))
                self._put(other, expert)
                return

    def _exchange(self, expert: int) -> None:
        """One of several replicas on one rank (node) changes places with the most similar one that is elsewhere."""
        distinct, each = (self.held > 0).sum(0), np.append(self.load / np.maximum(self.held.sum(0)[:-1], 1), 0.0)
        mine = np.flatnonzero(self.slots == expert)
        home = self.groups[mine[0]]
        comes = self.held[home, self.slots] == 0
        fits = self.usable & (self.slots >= 0) & (self.groups != home)
        fits &= (distinct[self.slots] == 1) | (distinct[self.slots] + comes - (self.held[self.groups, self.slots] == 1) >= 2)
        for slot in mine:
            on_rank = np.isin(self.slots, self.slots[self.ranks == self.ranks[slot]])
            ok = np.flatnonzero(fits & ~on_rank)
            if len(ok):
                other = int(ok[np.abs(each[self.slots[ok]] - each[expert]).argmin()])
                partner = int(self.slots[other])
                self._put(int(slot), partner)
                self._put(other, expert)
                return
