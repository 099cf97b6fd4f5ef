"""Replicas onto ranks: the heaviest first, each onto the lightest rank that has a seat and does not hold its expert."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..plan import Floats
from ..topology import Ints
from .seats import Seats


def pack(load: Floats, counts: Ints, seats: Seats) -> Ints:
    """Seats of all layers: longest processing time first, with as many replicas a rank as it has seats.

    Args:
        load: [layers, experts].
        counts: [layers, experts] replicas of each, 0 or more; every layer has as many as there are seats, or fewer.
        seats: of the usable ranks.

    Returns:
        [layers, rows, width] table of seats. No expert is twice on a rank: a replica for which there is no other place is left out.
    """
    layers, experts = load.shape
    each = load / np.maximum(counts, 1)
    order = _heaviest_first(each, counts, seats.total)
    carried = np.concatenate([each, np.zeros((layers, 1))], axis=1)[np.arange(layers)[:, None], order]
    table = np.full((layers, *seats.open.shape), experts, dtype=np.int64)
    start = 0
    if seats.same_speed:
        start = _first_round(table, order, seats.n_rows)
    left_out = _rest(table, order, carried, seats, start)
    for layer in np.flatnonzero(left_out):
        _mend(table[layer], load[layer], counts[layer], seats)
    return table


def deal(load: Floats, counts: Ints, seats: Seats) -> Ints:
    """As ``pack``, for ranks alike, and quicker: seat by seat. Good enough where seats are dealt anew afterwards.

    Replicas of an expert lie next to each other, and no more of them than ranks: none meet as long as all seats go the same way.
    """
    each = load / np.maximum(counts, 1)
    order = _heaviest_first(each, counts, seats.total).reshape(len(load), seats.open.shape[1], seats.n_rows)
    back = order.copy()
    back[:, 1:] = order[:, 1:, ::-1]
    kinds = np.sort(back, axis=1)
    twice = ((kinds[:, 1:] == kinds[:, :-1]) & (kinds[:, 1:] < seats.n_experts)).any((1, 2))
    back[twice] = order[twice]
    return np.ascontiguousarray(back.transpose(0, 2, 1))


def _heaviest_first(each: Floats, counts: Ints, total: int) -> Ints:
    """[layers, total] expert of every replica, the heaviest first and replicas of one expert together; filled up with "empty"."""
    layers, experts = each.shape
    order = np.argsort(-each, axis=1, kind="stable")
    places = np.take_along_axis(counts, order, axis=1).ravel()
    filled = np.repeat(order.ravel(), places)
    sums = counts.sum(1)
    if (sums == total).all():
        return filled.reshape(layers, total)
    result = np.full((layers, total), experts, dtype=np.int64)
    result[np.arange(total)[None] < sums[:, None]] = filled
    return result


def _first_round(table: Ints, order: Ints, rows: int) -> int:
    """Each rank's heaviest replica: while ranks are empty the lightest one is empty. Returns how many replicas have a seat."""
    table[:, :, 0] = order[:, :rows]
    return rows


def _rest(table: Ints, order: Ints, carried: Floats, seats: Seats, start: int) -> npt.NDArray[np.bool_]:
    """Seat the other replicas in order. Returns [layers] whether some were left out."""
    layers, total = order.shape
    empty = seats.n_experts
    at = np.arange(layers)
    taken = np.full((layers, seats.n_rows), 1 if start else 0, dtype=np.int64)
    held = np.concatenate([carried[:, :start], np.zeros((layers, seats.n_rows - start))], axis=1)
    key = np.where(taken < seats.capacity, held, np.inf)
    again: npt.NDArray[np.bool_] = np.zeros((layers, total), dtype=np.bool_)  # the replica before this one is of the same expert
    again[:, 1:] = (order[:, 1:] == order[:, :-1]) & (order[:, 1:] != empty)
    twins = np.logical_or.reduce(again, axis=0)
    twins[:-1] |= twins[1:]  # the first of a run is remembered too
    left_out = np.zeros(layers, dtype=bool)
    banned = np.zeros_like(key)
    if start and twins[:start].any():
        _ban_first(banned, order, start)
    for turn in range(start, total):
        weight = carried[:, turn]
        cost = key if seats.same_speed else (key + weight[:, None]) / seats.speed
        if twins[turn]:
            banned[~again[:, turn]] = 0.0
            cost = cost + banned
        row = cost.argmin(1)
        least: Floats = cost[at, row]
        where, expert = at, order[:, turn]
        if np.isinf(least).any():
            fits = np.isfinite(least)
            left_out |= ~fits & (expert != empty)
            where, row, expert, weight = at[fits], row[fits], expert[fits], weight[fits]
        filled = taken[where, row]
        table[where, row, filled] = expert
        taken[where, row] = filled + 1
        key[where, row] = np.where(filled + 1 < seats.capacity[row], key[where, row] + weight, np.inf)
        if twins[turn]:
            banned[where, row] = np.inf
    return left_out


def _ban_first(banned: Floats, order: Ints, start: int) -> None:
    """Rows that hold the expert of the last replica of the first round: its next replica may not go there."""
    banned[:, :start][order[:, :start] == order[:, start - 1 : start]] = np.inf


def _mend(table: Ints, load: Floats, counts: Ints, seats: Seats) -> None:
    """Seat replicas of one layer that no rank with a free seat could take: another replica makes room for each, if one can."""
    empty = seats.n_experts
    seated = np.bincount(table[table != empty], minlength=empty)
    each = load / np.maximum(counts, 1)
    for expert in np.repeat(np.arange(empty), np.maximum(counts - seated, 0)):
        free = np.argwhere((table == empty) & seats.open)
        for row, seat in free:
            others = np.flatnonzero(~(table == expert).any(1))
            choices = [
                (abs(each[table[other, place]] - each[expert]), other, place)
                for other in others
                for place in np.flatnonzero(seats.open[other])
                if table[other, place] != empty and table[other, place] not in table[row]
            ]
            if choices:
                _, other, place = min(choices)
                table[row, seat], table[other, place] = table[other, place], expert
                break
