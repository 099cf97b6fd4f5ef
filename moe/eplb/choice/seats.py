"""Where the experts of a placement sit: one seat for every rank that holds an expert, in groups that can be filled at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ..plan import Floats
from ..topology import Ints, Topology

_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Experts with up to w seats, n of them over all layers; in a layer, no two have a rank in common.

    Arrays have experts last: numpy adds long rows much faster than it sums short ones.
    """

    colour: int  # experts of one colour have no rank in common
    expert: Ints  # [n] layer * experts + expert
    cell: Ints  # [w, n] layer * ranks + rank; the number of cells where there is no seat
    speed: Floats  # [w, n] of the ranks, 1 where there is no seat
    start: Floats  # [w, n] even parts; 0 where there is no seat
    seat: Ints  # [w, n] number of the seat; the number of seats where there is none


@dataclass(frozen=True, kw_only=True)
class Seats:
    """Seats of a placement, sorted by (layer, expert, rank). Several slots of one expert on a rank are one seat."""

    n_layers: int
    n_experts: int
    slot_seat: Ints  # [layers, slots] seat of each slot; the number of seats for an empty one
    slot_share: Floats  # [layers, slots] a slot's part of its seat
    cell: Ints  # [seats] layer * ranks + rank
    present: Ints  # [experts that have a seat] layer * experts + expert, ascending
    absent: Ints  # those without
    first: Ints  # [present] first seat of each
    alone: Ints  # [..] of present: experts with one seat
    n_cells: int  # layers * ranks
    n_seats: int  # numbers of seats end there
    groups: tuple[Group, ...]  # experts with several seats

    @classmethod
    def find(cls, slot_to_expert: Ints, n_experts: int, topology: Topology) -> Seats:
        """Of [layers, slots], -1 for empty. ValueError: another number of slots than the topology's."""
        layers, slots = slot_to_expert.shape
        if slots != topology.n_slots:
            raise ValueError(f"water filling: {slots} slots, but the topology has {topology.n_slots}")
        ranks, held = topology.n_ranks, slot_to_expert >= 0
        expert = np.arange(layers)[:, None] * n_experts + slot_to_expert
        keys, seat = np.unique((expert * ranks + topology.rank_of_slot)[held], return_inverse=True)
        slot_seat = np.full(slot_to_expert.shape, len(keys))
        slot_seat[held] = seat
        share = 1.0 / np.append(np.bincount(seat, minlength=len(keys)), 1)
        present, first, width = np.unique(keys // ranks, return_index=True, return_counts=True)
        cell = keys // ranks // n_experts * ranks + keys % ranks
        speeds = np.ones(ranks) if topology.speeds is None else np.array(topology.speeds)
        return cls(
            n_layers=layers, n_experts=n_experts, slot_seat=slot_seat, slot_share=share[slot_seat], cell=cell, present=present,
            absent=np.setdiff1d(np.arange(layers * n_experts), present), first=first, alone=np.flatnonzero(width == 1),
            n_cells=layers * ranks, n_seats=len(keys), groups=_groups(present, first, width, cell, speeds, n_experts, layers),
        )  # fmt: skip

    def of_layers(self, kept: Ints, tokens: list[Floats], parts: list[Floats]) -> tuple[Seats, list[Floats], list[Floats]]:
        """Groups of some layers, ascending, which are counted from 0 then, with ``tokens`` [n] and ``parts`` [w, n] of each group.

        They are few: a colour is one group then. Groups keep the numbers of their seats. What is about all layers' seats and slots is
        left as it was.
        """
        ranks = self.n_cells // self.n_layers
        number = np.full(self.n_layers + 1, -1)
        number[kept] = np.arange(len(kept))

        def moved(cells: Ints) -> Ints:
            return np.where(cells < self.n_cells, number[cells // ranks] * ranks + cells % ranks, len(kept) * ranks)

        groups: list[Group] = []
        counts: list[Floats] = []
        held: list[Floats] = []
        for colour in dict.fromkeys(group.colour for group in self.groups):
            at = [i for i, group in enumerate(self.groups) if group.colour == colour]
            same = [self.groups[i] for i in at]
            rows = [number[group.expert // self.n_experts] >= 0 for group in same]
            expert = np.concatenate([group.expert[some] for group, some in zip(same, rows, strict=True)])
            if not len(expert):
                continue
            counts.append(np.concatenate([tokens[i][some] for i, some in zip(at, rows, strict=True)]))
            held.append(_joined([parts[i] for i in at], rows, 0.0))
            groups.append(
                Group(
                    colour=colour,
                    expert=number[expert // self.n_experts] * self.n_experts + expert % self.n_experts,
                    cell=moved(_joined([group.cell for group in same], rows, self.n_cells)),
                    speed=_joined([group.speed for group in same], rows, 1.0),
                    start=_joined([group.start for group in same], rows, 0.0),
                    seat=_joined([group.seat for group in same], rows, self.n_seats),
                )
            )
        return replace(self, n_layers=len(kept), n_cells=len(kept) * ranks, groups=tuple(groups)), counts, held

    def rank_sums(self, flat: Floats) -> Floats:
        """[layers * ranks] tokens that have no choice: of experts with one seat. ``flat`` [layers * experts]."""
        cells, tokens = self.cell[self.first[self.alone]], flat[self.present[self.alone]]
        return np.bincount(cells, weights=tokens, minlength=self.n_cells).astype(np.float64)

    def seated(self, flat: Floats) -> Floats:
        """[seats + 1] tokens of experts that have one seat; the last entry is that of no seat."""
        of_seat = np.zeros(len(self.cell) + 1)
        of_seat[self.first[self.alone]] = flat[self.present[self.alone]]
        return of_seat

    def slots(self, of_seat: Floats) -> Floats:
        """[layers, slots] tokens of each slot, from those of each seat [seats + 1]."""
        of_seat[-1] = 0.0
        return of_seat[self.slot_seat] * self.slot_share


def _joined(arrays: list[npt.NDArray[_Number]], rows: list[npt.NDArray[np.bool_]], none: float) -> npt.NDArray[_Number]:
    """Some columns of arrays [w, n] side by side, filled up with ``none`` to the width of the widest that has any."""
    some = [array[:, kept] for array, kept in zip(arrays, rows, strict=True) if kept.any()]
    out = np.full((max(map(len, some)), sum(array.shape[1] for array in some)), none, dtype=arrays[0].dtype)
    begin = 0
    for array in some:
        out[: len(array), begin : begin + array.shape[1]] = array
        begin += array.shape[1]
    return out


def _groups(present: Ints, first: Ints, width: Ints, cell: Ints, speeds: Floats, n_experts: int, layers: int) -> tuple[Group, ...]:
    """Experts with several seats by colour, those with most seats first; a colour's experts share no rank."""
    several = np.flatnonzero(width > 1)
    if not len(several):
        return ()
    several = several[np.lexsort((-width[several], present[several] // n_experts))]  # by layer, most seats first
    layer = present[several] // n_experts
    turn = np.arange(len(several)) - np.searchsorted(layer, layer)  # place of an expert among those of its layer
    widest, n_seats, ranks = int(width.max()), len(cell), len(speeds)
    at = np.arange(widest)
    seat = np.where(at < width[several, None], first[several, None] + at, n_seats)
    where = np.append(cell, layers * ranks)[seat]
    colour = _coloured(where, turn, layers * ranks)
    found = []
    size = np.ceil(np.log2(width[several])).astype(np.int64)  # much wider experts apart, so that little is filled up
    for number, exponent in sorted(set(zip(colour.tolist(), size.tolist(), strict=True)), key=lambda pair: (pair[0], -pair[1])):
        rows = np.flatnonzero((colour == number) & (size == exponent))
        wide = slice(0, int(width[several[rows]].max()))
        there = seat[rows, wide] < n_seats
        found.append(
            Group(
                colour=number,
                expert=present[several[rows]],
                cell=np.ascontiguousarray(where[rows, wide].T),
                speed=np.ascontiguousarray(np.append(speeds, 1.0)[np.where(there, where[rows, wide] % ranks, ranks)].T),
                start=np.ascontiguousarray((there / there.sum(1, keepdims=True)).T),
                seat=np.ascontiguousarray(seat[rows, wide].T),
            )
        )
    return tuple(found)


def _coloured(where: Ints, turn: Ints, n_cells: int) -> Ints:
    """[n] the first colour that nobody with a cell in common has, in the order of ``turn`` [n]; ``where`` [n, w] are their cells."""
    colour = np.zeros(len(turn), dtype=np.int64)
    taken: npt.NDArray[np.bool_] = np.zeros((n_cells + 1, 1), dtype=np.bool_)  # of each cell by each colour
    for now in range(int(turn.max()) + 1):
        rows = np.flatnonzero(turn == now)
        free = np.asarray(~taken[where[rows]].any(1))
        if not np.all(free.any(1)):
            taken = np.concatenate([taken, np.zeros((len(taken), 8), dtype=bool)], 1)
            free = np.asarray(~taken[where[rows]].any(1))
        colour[rows] = free.argmax(1)
        taken[where[rows], colour[rows, None]] = True
        taken[-1] = False
    return colour
