"""A plan with slack for what the load will be: replicas join ranks into one well-connected graph, so that a fill of each batch's own
counts (water filling, or a linear program) can carry load from any rank to any other.

An expert's replicas are an edge between their ranks, along which load can be shifted. A batch departs from the load that was planned
for by chance; the largest rank load after the best shift is set by the worst set of ranks whose experts have no replica outside.
Greedy packing makes many such sets: it seats hot experts of like load two by two on the same two ranks, or in rings of four.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..assess import assess
from ..cost import CostModel
from ..metrics import imbalance
from ..plan import Floats, Plan, rank_loads, replica_counts
from ..topology import Ints, Topology
from .replicate import share_out
from .seats import Seats
from .static import check_room, checked_load, keep_slots, plan_static

NEAR = 0.8  # penalty of a rank falls by this factor with each step of distance from the ranks that the expert has
CROWDED = 0.1  # of a rank's fair share: what each replica that a rank has already counts against one more
WORSE = 1.03  # times the imbalance of a plan for balance alone: a layer that slack would cost more goes without
ROUNDS = 200  # of swaps, at most


def plan_slack(
    load: Floats,
    topology: Topology,
    *,
    cost: CostModel | None = None,
    steps: float = 1.0,
    previous: Ints | None = None,
    least_replicas: int = 1,
) -> Plan:
    """Place experts such that load which differs from the planned one by chance can still be balanced by choice of replicas.

    For the load itself, split evenly, it is about as good as ``plan_static``: where a layer would be worse by more than ``WORSE``, on odd
    machines, it gets that plan.

    Args:
        load: [layers, experts] tokens routed to each expert, of all ranks.
        topology: ranks with any numbers of slots and speeds; failed ranks get nothing.
        cost: for the predicted seconds and bytes.
        steps: steps that the load sums over, for the predicted seconds of one.
        previous: [layers, slots] map that the ranks hold now, for ``moved``.
        least_replicas: of each expert, for coverage when ranks fail.

    Raises:
        ValueError: load of the wrong shape or with impossible values; fewer slots than experts.
    """
    load = checked_load(load)
    seats = Seats(topology=topology, n_experts=load.shape[1])
    check_room(seats, least_replicas)
    counts, _ = share_out(load, seats.total, most=seats.n_rows, least=least_replicas)
    table = _seat(load, counts, seats)
    placed = replica_counts(table.reshape(len(table), -1), seats.n_experts + 1)[:, :-1]
    _swap_single(table, load / np.maximum(placed, 1), placed == 1, seats)
    slots = seats.to_slots(table)
    balanced = plan_static(load, topology, least_replicas=least_replicas)
    lost = imbalance(rank_loads(slots, load, topology), topology) > WORSE * balanced.imbalance
    slots = np.where(lost[:, None], balanced.slot_to_expert, slots)
    if previous is not None:
        slots = keep_slots(previous, slots, topology)
    return assess(slots, load, topology, cost=cost, steps=steps, previous=previous, reason="planned with slack for batches that differ")


def _seat(load: Floats, counts: Ints, seats: Seats) -> Ints:
    """[layers, rows, width] table of seats: experts with replicas first, each to light ranks that are far from each other."""
    layers, experts = load.shape
    fair = np.maximum(load.sum(1, keepdims=True) / seats.n_rows, 1e-300)
    each = load / counts / fair
    graph = Graph(layers, seats.n_rows)
    table = np.full((layers, *seats.open.shape), experts, dtype=np.int64)
    taken = np.zeros((layers, seats.n_rows), dtype=np.int64)
    held = np.zeros((layers, seats.n_rows))
    mine = np.zeros((layers, seats.n_rows), dtype=bool)
    last = np.full(layers, -1)
    at = np.arange(layers)
    for turn in _order(each, counts, seats.total).T:
        real, expert = turn < experts, np.minimum(turn, experts - 1)
        mine[turn != last] = False
        weight = np.where(real, each[at, expert], 0.0)
        shared = counts[at, expert] > 1
        key = (held + weight[:, None]) / seats.speed
        if shared.any():
            key = key + np.where(shared[:, None], graph.nearness(mine) + CROWDED * taken, 0.0)
        key[mine | (taken >= seats.capacity)] = np.inf
        row = key.argmin(1)
        fits = real & np.isfinite(key[at, row])
        where, row = at[fits], row[fits]
        table[where, row, taken[where, row]] = expert[fits]
        taken[where, row] += 1
        held[where, row] += weight[fits]
        graph.join(where, row, mine[where] & shared[where, None])
        mine[where, row] = True
        last = turn
    return table


def _order(each: Floats, counts: Ints, total: int) -> Ints:
    """[layers, total] expert of every replica: those of experts with several first, then the heaviest; filled up with "none"."""
    layers, experts = each.shape
    order = np.lexsort((-each, counts == 1), axis=1)
    result = np.full((layers, total), experts, dtype=np.int64)
    places = np.take_along_axis(counts, order, axis=1)
    result[np.arange(total)[None] < counts.sum(1)[:, None]] = np.repeat(order.ravel(), places.ravel())
    return result


class Graph:
    """Ranks of all layers, joined where they hold replicas of one expert, and the number of steps between any two."""

    def __init__(self, layers: int, rows: int) -> None:
        self.steps = np.full((layers, rows, rows), np.inf, dtype=np.float32)
        self.steps[:, np.arange(rows), np.arange(rows)] = 0.0

    def nearness(self, mine: npt.NDArray[np.bool_]) -> npt.NDArray[np.float32]:
        """[layers, rows] ranks that an expert has -> [layers, rows] 1 beside one of them, falling with distance; 0: no way there."""
        near = np.where(mine[:, :, None], self.steps, np.inf).min(1)
        result: npt.NDArray[np.float32] = np.float32(NEAR) ** np.maximum(near - 1, 0)
        return result

    def join(self, layers: Ints, row: Ints, others: npt.NDArray[np.bool_]) -> None:
        """A rank [n] of each of some layers [n] with other ranks [n, rows] of it."""
        chosen = others.any(1)
        layers, row, others = layers[chosen], row[chosen], others[chosen]
        if not len(layers):
            return
        steps = self.steps[layers]
        i = np.arange(len(layers))
        # all ways that use one of the new edges go through the rank: to it from anywhere, by an old way or by way of one of the others
        to = np.minimum(steps[i, row], np.where(others[:, :, None], steps, np.inf).min(1) + 1)
        self.steps[layers] = np.minimum(steps, to[:, :, None] + to[:, None, :])


def _swap_single(table: Ints, each: Floats, single: npt.NDArray[np.bool_], seats: Seats) -> None:
    """Swap experts that have one replica between the slowest rank and others while it gets faster: the graph stays as it is."""
    layers = len(table)
    loads = np.concatenate([each, np.zeros((layers, 1))], axis=1)
    free = np.concatenate([single, np.ones((layers, 1), dtype=bool)], axis=1)
    held = np.take_along_axis(loads, table.reshape(layers, -1), axis=1).reshape(table.shape).sum(2)
    goal = held.sum(1) / seats.n_rows * (1 + 1e-4)
    live = np.arange(layers)
    for _ in range(ROUNDS):
        times = held[live] / seats.speed
        i, top = np.arange(len(live)), times.argmax(1)
        mine, theirs = table[live, top], table[live]
        one, two = loads[live[:, None], mine], loads[live[:, None, None], theirs]
        shift = one[:, :, None, None] - two[:, None]  # [n, width, rows, width]
        after = np.maximum(
            (held[live, top][:, None, None, None] - shift) / seats.speed[top][:, None, None, None],
            (held[live][:, None, :, None] + shift) / seats.speed[:, None],
        )
        barred = (
            ~(free[live[:, None, None], theirs] & seats.open)[:, None] | ~(free[live[:, None], mine] & seats.open[top])[:, :, None, None]
        )
        after[np.broadcast_to(barred, after.shape)] = np.inf
        flat = after.reshape(len(live), -1)
        best = flat.argmin(1)
        better = (flat[i, best] < times[i, top] * (1 - 1e-9)) & (times[i, top] > goal[live])
        live, i = live[better], i[better]
        if not len(live):
            return
        seat, row, other = np.unravel_index(best[better], shift.shape[1:])
        top = top[better]
        table[live, top, seat], table[live, row, other] = table[live, row, other], table[live, top, seat]
        held[live, top] -= shift[i, seat, row, other]
        held[live, row] += shift[i, seat, row, other]
