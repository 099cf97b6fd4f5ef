"""Ways of every expert, dealt to source ranks: near replicas first, as far as all source ranks together keep to the shares.

A source rank has ``n_ways`` entries for an expert, and each names a slot; tokens take the entries in turn (``moe/ways.py``). An
entry is one unit: an expert's R sources hold R * n_ways of them, and each of its slots gets the units that its share is worth.
Who gives which units to whom is settled in three rounds, each within what is left: on a rank, on a node, anywhere. In a round,
givers and takers lie in one row of units each, the takers' mixed evenly, and the giver of a unit meets the taker at the same place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..plan import Floats, replica_counts
from ..topology import Ints, Topology

Table = npt.NDArray[np.int32]


def even_shares(slot_to_expert: Ints, n_experts: int) -> Floats:
    """[layers, slots] share of its expert's tokens that each slot gets if all replicas get the same; 0 for empty slots."""
    counts = np.maximum(replica_counts(slot_to_expert, n_experts), 1)
    return np.where(slot_to_expert < 0, 0.0, 1.0 / counts[np.arange(len(counts))[:, None], slot_to_expert])


def deal_ways(
    slot_to_expert: Ints, n_experts: int, topology: Topology, *, source: int, n_ways: int, shares: Floats | None = None, near: bool = True
) -> Table:
    """The table of one source rank.

    Args:
        slot_to_expert: [layers, slots], -1 for empty.
        n_experts: logical experts of a layer; each must have a slot.
        topology: of the slots. All ranks that have not failed send the same number of tokens.
        source: the rank whose table it is.
        n_ways: entries of an expert, 1 to 32768. Shares are kept to one part in R * n_ways over all R sources together, but to one
            in n_ways by each source.
        shares: [layers, slots] as ``even_shares``, the default; a slot's part of its expert's tokens. They are scaled to sum to one;
            where they sum to nothing they are even.
        near: replicas of the same rank first, then those of the same node; False: every source deals alike.

    Returns:
        int32 [layers, experts, n_ways] slots. Entries of one slot are neighbours; each row begins at a place of its own.

    Raises:
        ValueError: an expert has no slot, or numbers do not fit.
    """
    layers = len(slot_to_expert)
    if not 1 <= n_ways <= 1 << 15 or not 0 <= source < topology.n_ranks or source in topology.failed:
        raise ValueError(f"ways: {n_ways} ways (1 to 32768) of source rank {source}, which must be one of the ranks that have not failed")
    if slot_to_expert.shape[1] != topology.n_slots:
        raise ValueError(f"ways: {slot_to_expert.shape[1]} slots, but the topology has {topology.n_slots}")
    row, slot, width = _by_expert(slot_to_expert, n_experts)
    if (width == 0).any():
        layer, expert = divmod(int(np.flatnonzero(width == 0)[0]), n_experts)
        raise ValueError(f"ways: layer {layer} has no slot for expert {expert}")
    table = np.empty((layers * n_experts, n_ways), dtype=np.int32)
    first = np.concatenate([[0], np.cumsum(width)])
    table[:] = slot[first[:-1], None]
    given = None if shares is None else shares[row // n_experts, slot]
    for count in np.unique(width[width > 1]):  # rows of the same number of replicas together: [rows, replicas]
        rows = np.flatnonzero(width == count)
        at = first[rows, None] + np.arange(count)
        part = np.full(at.shape, 1.0 / count) if given is None else _scaled(given[at])
        table[rows] = _deal(slot[at], part, topology, source, n_ways, near, rows)
    return table.reshape(layers, n_experts, n_ways)


def _by_expert(slot_to_expert: Ints, n_experts: int) -> tuple[Ints, Ints, Ints]:
    """Filled slots in the order of (layer, expert, slot): their row layer * experts + expert, their slot, and the slots of each row."""
    layers, slots = slot_to_expert.shape
    flat = (np.arange(layers)[:, None] * n_experts + slot_to_expert)[slot_to_expert >= 0]
    order = np.argsort(flat, kind="stable")
    slot = np.broadcast_to(np.arange(slots), slot_to_expert.shape)[slot_to_expert >= 0][order]
    return flat[order], slot, np.bincount(flat, minlength=layers * n_experts)


def _scaled(part: Floats) -> Floats:
    """Rows that sum to one; even where there is nothing to scale."""
    total = part.sum(1, keepdims=True)
    return np.where(total > 0, part / np.where(total > 0, total, 1.0), 1.0 / part.shape[1])


def _units(part: Floats, total: int, rows: Ints) -> Ints:
    """Rows of parts -> whole numbers that sum to ``total``; what is left over by rounding down goes to the largest remainders."""
    exact = part * total
    units = np.floor(exact + 1e-9).astype(np.int64)
    left = total - units.sum(1)
    turn = (np.arange(part.shape[1]) + rows[:, None]) % part.shape[1]  # equal remainders: rows take turns
    rank = np.argsort(np.argsort(np.round(units - exact, 9) + 1e-12 * turn, axis=1, kind="stable"), axis=1, kind="stable")
    rounded: Ints = units + (rank < left[:, None])
    return rounded


def _deal(slots: Ints, part: Floats, topology: Topology, source: int, n_ways: int, near: bool, rows: Ints) -> Ints:
    """Experts of the same number of replicas: slots [X, r] and parts [X, r] -> ways [X, n_ways] of the source rank."""
    sources = np.setdiff1d(np.arange(topology.n_ranks), sorted(topology.failed))
    me = int(np.searchsorted(sources, source))
    begin = (rows * 7919 + 40503 * me) * 31 % n_ways  # a place of its own
    wanted = _units(part, len(sources) * n_ways, rows)  # [X, r] units that each slot still takes
    supply = np.full((len(rows), len(sources)), n_ways)  # units that each source still gives
    flow = np.zeros_like(wanted)  # of this source
    if near:
        rank_of, node_of = topology.rank_of_slot[slots], topology.node_of_slot[slots]
        took = _same_rank(wanted, rank_of, n_ways)
        flow += np.where(rank_of == source, took, 0)
        wanted = wanted - took
        for rank, given in zip(rank_of.T, took.T, strict=True):
            supply[np.arange(len(rows)), np.searchsorted(sources, rank)] -= given
        giver = topology.node_of_rank[sources]
        for node in np.unique(giver):
            gives, takes = np.where(giver == node, supply, 0), np.where(node_of == node, wanted, 0)
            most = np.minimum(gives.sum(1), takes.sum(1))
            gives, takes = _thinned(gives, most), _thinned(takes, most)
            supply, wanted = supply - gives, wanted - takes
            if giver[me] == node:
                flow += _met(gives, takes, me)
    flow += _met(supply, wanted, me)
    order = np.repeat(np.tile(np.arange(slots.shape[1]), len(rows)), flow.reshape(-1)).reshape(len(rows), n_ways)
    shifted = (np.arange(n_ways) + begin[:, None]) % n_ways
    dealt: Ints = np.take_along_axis(slots, np.take_along_axis(order, shifted, 1), 1)
    return dealt


def _same_rank(wanted: Ints, rank_of: Ints, n_ways: int) -> Ints:
    """[X, r] units that each slot takes from the source on its own rank; of several slots on a rank the first take first."""
    took = np.empty_like(wanted)
    for column in range(wanted.shape[1]):
        before = sum(np.where(rank_of[:, other] == rank_of[:, column], took[:, other], 0) for other in range(column))
        took[:, column] = np.minimum(wanted[:, column], n_ways - before)
    return took


def _thinned(units: Ints, most: Ints) -> Ints:
    """Each row taken down to the sum ``most`` [X], evenly: what has fewer gives up less."""
    total = units.sum(1)
    edge = np.concatenate([np.zeros((len(units), 1), np.int64), np.cumsum(units, 1)], 1)
    kept = edge * most[:, None] // np.maximum(total, 1)[:, None]
    thinner: Ints = np.diff(kept, axis=1)
    return thinner


def _met(gives: Ints, takes: Ints, me: int) -> Ints:
    """[X, r] units that source ``me`` gives to each taker, one unit at most from its proportional part; the rows' sums are equal."""
    low = gives[:, :me].sum(1)
    return _first_units(takes, low + gives[:, me]) - _first_units(takes, low)


def _first_units(takes: Ints, n: Ints) -> Ints:
    """[X, r] how many of the first ``n`` [X] units are each taker's, where the takers' units lie mixed evenly.

    Unit k of a taker of w lies at (k + 1/2) / w, as in Webster's apportionment; the first taker comes first at the same place.
    """
    total, width = np.maximum(takes.sum(1), 1), takes.shape[1]
    near = np.maximum(n - width, 0)[:, None] / total[:, None]  # a place that at most n - r / 2 units lie before
    count = np.where(near > 0, np.floor(takes * near + 0.5).astype(np.int64), 0)
    rows = np.arange(len(takes))
    while (behind := count.sum(1) < n).any():
        with np.errstate(divide="ignore"):
            place = np.where(takes > count, (count + 0.5) / takes, np.inf)
        count[rows[behind], place.argmin(1)[behind]] += 1
    return count
