"""What moves between nodes: experts, and parts of those that are too hot for one node; and where they start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import Floats
from ..planner.replicate import share_out
from ..topology import Ints
from .nodes import Nodes

PIECE = 0.5  # of the smallest node's fair share is what one part may bring
FILL = 0.9  # of a rank's fair share is what one replica should carry at most, so that a node can be balanced within


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Part p < n_experts is expert p or its first part; further parts of hot experts come behind, padded to one number a layer."""

    owner: Ints  # [layers, parts] expert; n_experts: padding
    load: Floats  # [layers, parts] share of the layer's load
    size: Ints  # [layers, parts] slots that it needs at least, 0 for padding
    further: Ints  # [layers, experts] where an expert's second part stands, if it has one
    pieces: Ints  # [layers, experts] parts of each

    @classmethod
    def of(cls, share: Floats, nodes: Nodes, *, whole: bool = False) -> Parts:
        """Parts of experts.

        Args:
            share: [layers, experts] of a layer's load: layers sum to 1.
            nodes: that they go to.
            whole: no expert is parted; one slot for each that has load, and none for others.
        """
        layers, experts = share.shape
        if whole:
            owner, one = np.broadcast_to(np.arange(experts), share.shape), np.ones(share.shape, dtype=np.int64)
            return cls(owner=owner, load=share, size=(share > 0).astype(np.int64), further=one * experts, pieces=one)
        pieces = np.clip(np.ceil(share / (PIECE * nodes.share.min())), 1, nodes.n).astype(np.int64)
        while (over := pieces.sum(1) > nodes.slots.sum()).any():  # no slots for so many parts
            pieces[over] = np.maximum(pieces[over] - 1, 1)
        more = pieces - 1
        further = experts + more.cumsum(1) - more
        owner = np.full((layers, experts + int(more.sum(1).max())), experts, dtype=np.int64)
        owner[:, :experts] = np.arange(experts)
        for layer in np.flatnonzero(more.any(1)):
            owner[layer, experts : experts + more[layer].sum()] = np.repeat(np.arange(experts), more[layer])
        padded = np.concatenate([share / pieces, np.zeros((layers, 1))], axis=1)
        load = np.take_along_axis(padded, owner, axis=1)
        return cls(owner=owner, load=load, size=_sizes(load, owner < experts, nodes), further=further, pieces=pieces)

    def ids(self, ids: Ints) -> Ints:
        """[layers, tokens, top_k] experts of tokens -> parts: those of an expert take its tokens in turn."""
        if int(self.pieces.max()) == 1:
            return ids
        layers, tokens, _ = ids.shape
        at = np.arange(layers)[:, None, None]
        turn = np.arange(tokens)[None, :, None] % self.pieces[at, ids]
        return np.where((ids < 0) | (turn == 0), ids, self.further[at, ids] + turn - 1)


def _sizes(load: Floats, real: np.ndarray, nodes: Nodes) -> Ints:
    """[layers, parts] slots: what keeps replicas small, as far as there are slots; a slot a node stays free, so that parts can move."""
    seats = max(int(nodes.slots.sum()) - nodes.n, load.shape[1])
    _, peaks = share_out(load, seats, most=nodes.n_ranks)
    fill = np.maximum(FILL / nodes.n_ranks, peaks[:, -1:] * 1.001)
    return np.where(real, np.maximum(np.ceil(load / fill), 1), 0).astype(np.int64)


def start_homes(parts: Parts, nodes: Nodes, block: Ints) -> Ints:
    """Nodes of parts, block by block: the heaviest block to the node that is least full of load and has room for it.

    Args:
        parts: of all layers.
        nodes: with their room.
        block: [layers, experts] number of the block that each expert belongs to.

    Returns:
        [layers, parts] nodes. Parts of a block that fits nowhere whole, and further parts of hot experts, go one by one.
    """
    layers, n_parts = parts.owner.shape
    experts = block.shape[1]
    n = int(block.max()) + 1
    at = np.arange(layers)[:, None]
    load, size = np.zeros((layers, n)), np.zeros((layers, n), dtype=np.int64)
    np.add.at(load, (at, block), parts.load[:, :experts])
    np.add.at(size, (at, block), parts.size[:, :experts])
    room = _Room(busy=np.zeros((layers, nodes.n)), free=np.repeat(nodes.slots[None], layers, axis=0), nodes=nodes)
    later = parts.size[:, experts:].sum(1)
    free = nodes.slots.sum() - parts.size.sum(1)
    where = room.fill(load, size, spare=np.minimum(-(-later // nodes.n) + 1, free // nodes.n))
    _even_out(where, load, size, room)
    home = np.full((layers, n_parts), -1, dtype=np.int64)
    home[:, :experts] = np.take_along_axis(where, block, axis=1)
    left = (home < 0) & (parts.size > 0)
    alone = room.fill(np.where(left, parts.load, -1.0), np.where(left, parts.size, 0), spare=np.zeros(layers, dtype=np.int64))
    return np.where(home < 0, np.maximum(alone, 0), home)


@dataclass(kw_only=True)
class _Room:
    busy: Floats  # [layers, nodes] load over the node's share
    free: Ints  # [layers, nodes] slots
    nodes: Nodes

    def fill(self, load: Floats, size: Ints, spare: Ints) -> Ints:
        """Place things [layers, n] of a load, -1: nothing, and a size; the heaviest first. -> node of each, -1: there was no room."""
        layers = np.arange(len(load))
        where = np.full(load.shape, -1, dtype=np.int64)
        order = np.argsort(-load, axis=1, kind="stable")
        for thing in order[:, : int((load >= 0).sum(1).max(initial=0))].T:
            weight, need = load[layers, thing], size[layers, thing]
            key = np.where(self.free - spare[:, None] >= need[:, None], self.busy, np.inf)
            node = key.argmin(1)
            fits = np.isfinite(key[layers, node]) & (weight >= 0) & (need > 0)
            row, node, thing = layers[fits], node[fits], thing[fits]
            where[row, thing] = node
            self.busy[row, node] += weight[fits] / self.nodes.share[node]
            self.free[row, node] -= need[fits]
        return where


def _even_out(where: Ints, load: Floats, size: Ints, room: _Room, rounds: int = 16) -> None:
    """Swap blocks between the busiest node and others while it gets less busy."""
    share = room.nodes.share
    live = np.arange(len(where))
    for _ in range(rounds):
        busy, node = room.busy[live], where[live]
        top = busy.argmax(1)
        i = np.arange(len(live))
        shift = load[live][:, :, None] - load[live][:, None, :]
        grow = size[live][:, :, None] - size[live][:, None, :]
        other = np.maximum(node, 0)
        worst = np.maximum(
            busy[i, top][:, None, None] - shift / share[top][:, None, None],
            np.take_along_axis(busy, other, 1)[:, None, :] + shift / share[other][:, None, :],
        )
        barred = (node != top[:, None])[:, :, None] | ((node == top[:, None]) | (node < 0))[:, None, :]
        barred |= grow > np.take_along_axis(room.free[live], other, 1)[:, None, :]
        barred |= -grow > room.free[live, top][:, None, None]
        worst[barred] = np.inf
        flat = worst.reshape(len(live), -1)
        best = flat.argmin(1)
        better = flat[i, best] < busy[i, top] - 1e-9
        one, two = np.divmod(best[better], load.shape[1])
        live, i = live[better], i[better]
        if not len(live):
            return
        source, target = where[live, one], where[live, two]
        where[live, one], where[live, two] = target, source
        for node_, sign in ((source, -1.0), (target, 1.0)):
            room.busy[live, node_] += sign * shift[i, one, two] / share[node_]
            room.free[live, node_] -= (sign * grow[i, one, two]).astype(np.int64)
