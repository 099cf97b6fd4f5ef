"""One batch as it is put together: which changes fit, and where their experts come from."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ..topology import Topology
from .changes import NOBODY, Batch, Change, Transfer
from .rounds import in_rounds


@dataclass(kw_only=True)
class LayerSlots:
    """A layer on its way from one placement to another."""

    index: int  # MoE layer
    now: list[int]  # expert of each slot
    new: list[int]  # that it is to hold
    holders: dict[int, set[int]]  # expert -> slots that hold it now
    places: dict[int, list[int]]  # expert -> slots that are to hold it
    pending: dict[int, None]  # slots that are to change, in order

    @classmethod
    def of(cls, index: int, old: list[int], new: list[int]) -> LayerSlots:
        """At the start."""
        holders: dict[int, set[int]] = defaultdict(set)
        places: dict[int, list[int]] = defaultdict(list)
        for slot, (before, after) in enumerate(zip(old, new, strict=True)):
            holders[before].add(slot)
            places[after].append(slot)
        pending = {slot: None for slot, (before, after) in enumerate(zip(old, new, strict=True)) if before != after}
        return cls(index=index, now=old, new=new, holders=dict(holders), places=dict(places), pending=pending)

    def put(self, slot: int, expert: int) -> None:
        """The slot holds ``expert`` from now on."""
        self.holders[self.now[slot]].discard(slot)
        self.holders.setdefault(expert, set()).add(slot)
        self.now[slot] = expert
        if expert == self.new[slot]:
            self.pending.pop(slot, None)
        else:
            self.pending[slot] = None


class BatchBuilder:
    """Takes changes while there is room. What experts are where is that of the batch's beginning throughout."""

    def __init__(self, topology: Topology, *, staging: int, max_sends: int) -> None:
        self.changes: dict[tuple[int, int], int] = {}  # (layer, slot) -> expert
        self._rank = topology.rank_of_slot.tolist()
        self._node = topology.node_of_rank.tolist()
        self._staging, self._max_sends = staging, max_sends
        self._arrivals: dict[int, int] = defaultdict(int)  # by rank
        self._sends: dict[int, int] = defaultdict(int)  # by rank
        self._coming: dict[tuple[int, int, int], tuple[int, int]] = {}  # (layer, expert, target) -> (source, source slot)
        self._loading: set[tuple[int, int]] = set()  # (layer, expert) that some rank loads
        self._delta: dict[tuple[int, int], int] = defaultdict(int)  # (layer, expert) -> copies more after the batch

    def add_chain(self, layer: LayerSlots, slot: int) -> bool:
        """Take the change of ``slot``, and those that must come with it; False, with nothing taken, if there is no room."""
        taken: list[tuple[int, bool]] = []  # slot, whether a transfer was begun for it
        need: int | None = slot
        while need is not None:
            begun = self._take(layer, need, layer.new[need])
            if begun is None:
                break
            taken.append((need, begun))
            lost = layer.now[need]
            if lost < 0 or len(layer.holders[lost]) + self._delta[layer.index, lost] > 0:
                return True
            need = self._next_link(layer, lost)
        for done, begun in reversed(taken):
            self._undo(layer, done, begun)
        return False

    def add_exchange(self, layer: LayerSlots, slot: int) -> None:
        """Exchange the experts of ``slot`` and of the slot that has what it is to hold, if both are single copies and there is room."""
        expert, other_expert = layer.new[slot], layer.now[slot]
        other = next(iter(layer.holders[expert]))
        if (layer.index, slot) in self.changes or (layer.index, other) in self.changes:
            return
        begun = self._take(layer, slot, expert)
        if begun is not None and self._take(layer, other, other_expert) is None:
            self._undo(layer, slot, begun)

    def _next_link(self, layer: LayerSlots, expert: int) -> int | None:
        """A slot that is to get ``expert``, which would be lost without; the one on the rank with most room."""
        slots = [slot for slot in layer.places[expert] if slot in layer.pending and (layer.index, slot) not in self.changes]
        return min(slots, key=lambda slot: (self._arrivals[self._rank[slot]], slot), default=None)

    def _take(self, layer: LayerSlots, slot: int, expert: int) -> bool | None:
        """Take one change: whether a transfer was begun for it; None if there is no room for one."""
        rank, begun = self._rank[slot], False
        key = (layer.index, expert, rank)
        if expert >= 0 and key not in self._coming:
            holders = layer.holders.get(expert, set())
            if not any(self._rank[holder] == rank for holder in holders):
                source = self._source(layer.index, expert, holders, rank)
                if source is None or self._arrivals[rank] >= self._staging:
                    return None
                self._begin(key, source)
                begun = True
        self.changes[layer.index, slot] = expert
        self._delta[layer.index, expert] += 1
        self._delta[layer.index, layer.now[slot]] -= 1
        return begun

    def _source(self, layer: int, expert: int, holders: set[int], rank: int) -> tuple[int, int] | None:
        """(rank, slot) to send: the same node first, then who sends least so far. None if all are busy, or another rank loads it."""
        if not holders:
            return None if (layer, expert) in self._loading else (NOBODY, -1)
        slot_of: dict[int, int] = {}
        for slot in sorted(holders, reverse=True):
            slot_of[self._rank[slot]] = slot
        ready = [source for source in slot_of if self._sends[source] < self._max_sends]
        if not ready:
            return None
        best = min(ready, key=lambda source: (self._node[source] != self._node[rank], self._sends[source], source))
        return best, slot_of[best]

    def _begin(self, key: tuple[int, int, int], source: tuple[int, int]) -> None:
        self._coming[key] = source
        self._arrivals[key[2]] += 1
        if source[0] == NOBODY:
            self._loading.add(key[:2])
        else:
            self._sends[source[0]] += 1

    def _undo(self, layer: LayerSlots, slot: int, begun: bool) -> None:
        expert = self.changes.pop((layer.index, slot))
        self._delta[layer.index, expert] -= 1
        self._delta[layer.index, layer.now[slot]] += 1
        if begun:
            key = (layer.index, expert, self._rank[slot])
            source, _ = self._coming.pop(key)
            self._arrivals[key[2]] -= 1
            if source == NOBODY:
                self._loading.discard(key[:2])
            else:
                self._sends[source] -= 1

    def batch(self) -> Batch:
        """What was taken."""
        buffers: dict[int, int] = defaultdict(int)
        transfers = []
        for (layer, expert, target), (source, source_slot) in self._coming.items():
            move = Transfer(layer=layer, expert=expert, source=source, source_slot=source_slot, target=target, buffer=buffers[target])
            buffers[target] += 1
            transfers.append(move)
        sent = [move for move in transfers if move.source != NOBODY]
        places = in_rounds([(move.source, move.target) for move in sent])
        rounds: list[list[Transfer]] = [[] for _ in range(max(places, default=-1) + 1)]
        for move, place in zip(sent, places, strict=True):
            rounds[place].append(move)
        changes = tuple(Change(layer=layer, slot=slot, expert=expert) for (layer, slot), expert in sorted(self.changes.items()))
        return Batch(
            changes=changes, rounds=tuple(tuple(group) for group in rounds), loads=tuple(m for m in transfers if m.source == NOBODY)
        )


def counts_of(batch: Batch, n_ranks: int) -> np.ndarray:
    """[3, ranks] experts that each rank receives, sends and loads in ``batch``."""
    table = np.zeros((3, n_ranks), dtype=np.int64)
    for group in batch.rounds:
        for move in group:
            table[0, move.target] += 1
            table[1, move.source] += 1
    for move in batch.loads:
        table[2, move.target] += 1
    return table
