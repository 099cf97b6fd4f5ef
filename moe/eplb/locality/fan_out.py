"""How far tokens travel under a placement and a choice of replicas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..metrics import imbalance
from ..plan import Floats, replica_counts
from ..topology import Ints, Topology
from .routing import Routing, count


@dataclass(frozen=True, kw_only=True)
class FanOut:
    """Of every layer: what its tokens touch, and how evenly they load the ranks."""

    nodes: Floats  # [layers] different nodes with an expert of a token, mean over tokens
    remote_nodes: Floats  # [layers] of them other than the token's own, where tokens start on all ranks alike
    ranks: Floats  # [layers] different ranks with an expert of a token
    loads: Floats  # [layers, ranks] choices that came to each rank
    imbalance: Floats  # [layers] slowest rank over the mean of ranks, of the tokens as they were chosen

    @property
    def text(self) -> str:
        """One line: means over layers."""
        return (
            f"{self.nodes.mean():.3f} nodes a token ({self.remote_nodes.mean():.3f} not its own), {self.ranks.mean():.3f} ranks a token,"
            f" max/mean {self.imbalance.mean():.4f} (worst layer {self.imbalance.max():.4f})"
        )


def sources(n_tokens: int, topology: Topology) -> Ints:
    """[tokens] rank that each token starts on: dealt in turn over the ranks that have not failed."""
    usable = np.setdiff1d(np.arange(topology.n_ranks), sorted(topology.failed))
    return usable[np.arange(n_tokens) % len(usable)]


def replica_table(slot_to_expert: Ints, n_experts: int) -> tuple[Ints, Ints]:
    """Slots of each expert.

    Returns:
        [layers, experts + 1, most replicas] slots of an expert in rising order, -1 where there are no more; the last expert, "none",
        has none. And [layers, experts + 1] how many.
    """
    layers, slots = slot_to_expert.shape
    counts = replica_counts(slot_to_expert, n_experts)
    order = np.argsort(np.where(slot_to_expert < 0, n_experts, slot_to_expert), axis=1, kind="stable")
    width = max(1, int(counts.max()))
    table = np.full((layers, n_experts + 1, width), -1, dtype=np.int64)
    expert = np.take_along_axis(slot_to_expert, order, axis=1)
    first = np.concatenate([np.zeros((layers, 1), dtype=np.int64), counts.cumsum(1)], axis=1)
    place = np.arange(slots) - np.take_along_axis(first, np.where(expert < 0, 0, expert), axis=1)
    layer, at = np.nonzero(expert >= 0)
    table[layer, expert[layer, at], place[layer, at]] = order[layer, at]
    return table, np.concatenate([counts, np.zeros((layers, 1), dtype=np.int64)], axis=1)


def choose_even(routing: Routing, slot_to_expert: Ints) -> Ints:
    """[layers, tokens, top_k] slot of each choice (-1: none): replicas of an expert in turn, by a hash of the token's place."""
    table, counts = replica_table(slot_to_expert, routing.n_experts)
    layers = np.arange(routing.n_layers)[:, None, None]
    ids = np.where(routing.ids < 0, routing.n_experts, routing.ids)
    # the token's place times an odd constant, mixed, so that neighbours and experts do not march in step
    mixed = (np.arange(routing.n_tokens)[:, None] * 2654435761 + ids * 40503) & 0xFFFFFFFF
    way = (mixed ^ (mixed >> 15)) * 2246822519 % (1 << 32) >> 8
    slots: Ints = table[layers, ids, way % np.maximum(counts[layers, ids], 1)]
    return slots


def fan_out(chosen: Ints, topology: Topology, source: Ints | None = None) -> FanOut:
    """What tokens touch.

    Args:
        chosen: [layers, tokens, top_k] slot of each choice, -1: none.
        topology: of the slots.
        source: [tokens] rank that each starts on; None: ``sources``.
    """
    layers, tokens, _ = chosen.shape
    source = sources(tokens, topology) if source is None else source
    rank = np.where(chosen < 0, topology.n_ranks, topology.rank_of_slot[chosen])
    node = np.where(chosen < 0, topology.n_nodes, topology.node_of_slot[chosen])
    touched_nodes = touched(node, topology.n_nodes)
    own = touched_nodes[:, np.arange(tokens), topology.node_of_rank[source]]
    nodes = touched_nodes.sum(2)
    loads = count(np.where(chosen < 0, -1, topology.rank_of_slot[chosen]), topology.n_ranks)
    return FanOut(
        nodes=nodes.mean(1),
        remote_nodes=(nodes - own).mean(1),
        ranks=touched(rank, topology.n_ranks).sum(2).mean(1),
        loads=loads,
        imbalance=imbalance(loads, topology),
    )


def touched(places: Ints, n: int) -> np.ndarray:
    """[.., top_k] places 0 to n - 1, or n for none -> bool [.., n] which are there."""
    flags = np.zeros((*places.shape[:-1], n + 1), dtype=bool)
    np.put_along_axis(flags, places, True, axis=-1)
    return flags[..., :n]
