"""Locality-aware choice of replicas, token by token: a replica on a node that the token goes to anyway, at prices that balance ranks.

Experts of a token that live on one node say where the token must go. Each other expert takes the replica that costs least: one for a
node that the token does not touch yet, plus the price of the rank, plus a little chance, which lets prices shift load smoothly.
Prices are learned beforehand from a sample of tokens: a rank with too much to do gets dearer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..metrics import imbalance
from ..plan import Floats, rank_loads
from ..topology import Ints, Topology
from .fan_out import replica_table, touched
from .routing import Routing, Scores, count

CHANCE = 0.6  # of a node: spread of the chance in a replica's cost
_BLOCK = 1 << 17  # tokens of layers looked at together


@dataclass(frozen=True, kw_only=True)
class NearChoice:
    """A placement and the prices of its slots. A choice depends on the token's experts and place only."""

    slot_to_expert: Ints  # [layers, slots]
    n_experts: int  # logical experts of a layer
    topology: Topology  # of the slots
    price: Floats  # [layers, slots] in nodes: how many nodes more a token had rather go to, than to this slot
    rank_weight: float = 0.3  # nodes that one more rank is worth: a token's row travels once for each rank

    def choose(self, routing: Routing, source: Ints | None = None) -> Ints:
        """Slots of choices.

        Args:
            routing: of these layers.
            source: [tokens] rank that each starts on, whose node then costs nothing; None: no node is free.

        Returns:
            [layers, tokens, top_k] slot of each choice, -1: none.
        """
        parts = [asked.answer(self.price) for asked in self.ask(routing, source)]
        return np.concatenate(parts, axis=1)

    def corrected(self, loads: Floats, *, step: float = 0.3) -> NearChoice:
        """The choice with prices that learn from what ranks had to do.

        Args:
            loads: [layers, ranks] tokens that came to each rank under these prices: of steps together that are many against chance.
            step: by which a rank gets dearer that had twice its share; smaller with every correction, prices settle.
        """
        usable, speed = self.topology.alive, self.topology.speed
        fair = loads.sum(1, keepdims=True) * speed / usable.sum()
        dearer = np.where(usable & (fair > 0), step * (loads / np.maximum(fair, 1e-300) - 1), 0.0)
        return replace(self, price=self.price + dearer[:, self.topology.rank_of_slot])

    def ask(self, routing: Routing, source: Ints | None = None) -> Iterator[Asked]:
        """Tokens in blocks, made ready for any prices."""
        block = max(1, _BLOCK // routing.n_layers)
        for first in range(0, routing.n_tokens, block):
            ids = routing.ids[:, first : first + block]
            yield Asked(self, ids, np.arange(first, first + ids.shape[1]), None if source is None else source[first : first + block])


class Asked:
    """Tokens with all that does not depend on prices: where they must go, and who of their experts can choose among which slots."""

    def __init__(self, choice: NearChoice, ids: Ints, place: Ints, source: Ints | None) -> None:
        layers, tokens, k = ids.shape
        topology, n_nodes = choice.topology, choice.topology.n_nodes
        table, widths = replica_table(choice.slot_to_expert, choice.n_experts)
        self.choice, self.shape, self.layer = choice, ids.shape, np.repeat(np.arange(layers), tokens)
        self.node = np.append(topology.node_of_slot, n_nodes)  # slot -1, "none", is on a node and a rank of its own
        self.rank = np.append(topology.rank_of_slot, topology.n_ranks)
        ids = np.where(ids < 0, choice.n_experts, ids).reshape(-1, k)
        rows = self.layer[:, None]
        nodes = np.where(table < 0, n_nodes, self.node[table])
        home = np.where(
            ((nodes == nodes[..., :1]) | (table < 0)).all(-1), nodes[..., 0], n_nodes
        )  # [layers, experts + 1] only node, if one
        width = widths[rows, ids]
        self.chosen = np.where(width == 1, table[rows, ids, 0], -1)
        self.far = _unless(touched(home[rows, ids], n_nodes), 1.0)  # [rows, nodes + 1] what it costs to go to a node
        self.away = _unless(touched(self.rank[self.chosen], topology.n_ranks), choice.rank_weight)  # [rows, ranks + 1] and to a rank
        if source is not None:
            self.far[np.arange(len(ids)), np.tile(topology.node_of_rank[source], layers)] = 0.0
        order = np.argsort(np.where(width > 1, width, 1 << 20), axis=1, kind="stable")  # who can choose most, chooses last
        self.turns = []
        for turn in range(int((width > 1).sum(1).max(initial=0))):
            row = np.flatnonzero(width[np.arange(len(ids)), order[:, turn]] > 1)
            column = order[row, turn]
            slots = table[self.layer[row], ids[row, column]]
            chance = CHANCE * _hash(place[row % tokens, None], slots)
            self.turns.append(Turn(row=row, column=column, slots=slots, chance=chance.astype(np.float32)))

    def answer(self, price: Floats) -> Ints:
        """[layers, slots] prices -> [layers, tokens, top_k] slots, -1: none."""
        chosen, far, away = self.chosen.copy(), self.far.copy(), self.away.copy()
        dear = _dear(price)
        for turn in self.turns:
            row, node, rank = turn.row[:, None], self.node[turn.slots], self.rank[turn.slots]
            cost = dear[self.layer[row], turn.slots] + turn.chance
            cost += far[row, node]
            cost += away[row, rank]
            slot = turn.slots[np.arange(len(row)), cost.argmin(1)]
            chosen[turn.row, turn.column] = slot
            far[turn.row, self.node[slot]] = 0.0
            away[turn.row, self.rank[slot]] = 0.0
        return chosen.reshape(self.shape)

    def frozen(self, chosen: Ints) -> Frozen:
        """All that choose among slots, each as if the others of its token stayed with ``chosen``."""
        chosen = chosen.reshape(-1, self.shape[2])
        n_nodes, n_ranks, n_slots = self.far.shape[1], self.away.shape[1], len(self.node)
        rows = np.arange(len(chosen))[:, None]
        on_node = np.bincount((rows * n_nodes + self.node[chosen]).ravel(), minlength=self.far.size).reshape(self.far.shape)
        on_rank = np.bincount((rows * n_ranks + self.rank[chosen]).ravel(), minlength=self.away.size).reshape(self.away.shape)
        parts = []
        for turn in self.turns:
            row, node, rank = turn.row[:, None], self.node[turn.slots], self.rank[turn.slots]
            own = chosen[turn.row, turn.column][:, None]
            alone = (on_node[row, node] == (node == self.node[own])) & (self.far[row, node] > 0)
            first = on_rank[row, rank] == (rank == self.rank[own])
            cost = turn.chance + alone + self.choice.rank_weight * first
            parts.append(
                (
                    cost.astype(np.float32),
                    (self.layer[row] * n_slots + np.where(turn.slots < 0, n_slots - 1, turn.slots)).astype(np.int32),
                    turn.slots,
                    self.layer[turn.row],
                )
            )
        cost, where, slots, layer = (np.concatenate(part) for part in zip(*parts, strict=True))
        return Frozen(cost=cost, where=where, slots=slots, layer=layer)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One choice each of some tokens."""

    row: Ints  # [n] token of layer
    column: Ints  # [n] which of its choices
    slots: Ints  # [n, most replicas] slots of its expert, -1: no more
    chance: Scores  # [n, most replicas]


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """Choices that do not wait for each other: all of them at once."""

    cost: Scores  # [n, most replicas] without price
    where: npt.NDArray[np.int32]  # [n, most replicas] place of the price in [layers, slots + 1]
    slots: Ints  # [n, most replicas]
    layer: Ints  # [n]

    def chosen(self, price: Floats) -> Ints:
        """[layers, slots] prices -> [n] slots."""
        cost = self.cost + _dear(price).ravel()[self.where]
        slots: Ints = self.slots[np.arange(len(cost)), cost.argmin(1)]
        return slots


def _unless(there: npt.NDArray[np.bool_], cost: float) -> Scores:
    """[rows, n] -> [rows, n + 1] the cost where not there; nothing for the last, which is none."""
    costs = np.where(there, np.float32(0), np.float32(cost))
    return np.concatenate([costs, np.zeros((len(there), 1), dtype=np.float32)], axis=1)


def _dear(price: Floats) -> Scores:
    """Prices with one more slot, where nobody goes."""
    return np.concatenate([price, np.full((len(price), 1), np.inf)], axis=1).astype(np.float32)


def _hash(place: Ints, slot: Ints) -> Floats:
    """[..] in [0, 1): differs by token and slot."""
    mixed = (place * 2654435761 + slot * 2246822519) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 73244475) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 73244475) & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) / 2.0**32


def learn_prices(
    choice: NearChoice, load: Floats, routing: Routing, *, most: Floats | None = None, rounds: int = 16
) -> tuple[NearChoice, Floats]:
    """Prices under which the ranks are balanced.

    Args:
        choice: with the prices to start from.
        load: [layers, experts] tokens routed to each expert.
        routing: choices of some tokens, which say who can choose without a detour.
        most: [layers, slots] load that a slot should have at most; None: no matter.
        rounds: of choosing and correcting.

    Returns:
        The choice with the prices that did best, and [layers, slots] the load of slots under them.
    """
    asked = list(choice.ask(routing))
    chosen = [part.answer(choice.price) for part in asked]
    frozen = [part.frozen(slots) for part, slots in zip(asked, chosen, strict=True) if part.turns]
    if not frozen:
        return choice, slot_loads(_counted(chosen, choice), choice.slot_to_expert, load)
    fixed = _counted([part.chosen.reshape(part.shape) for part in asked], choice)
    most = np.full(fixed.shape, np.inf) if most is None else most
    now = best = choice
    over, least = np.zeros(fixed.shape), np.full(len(load), np.inf)
    for turn in range(rounds):
        seen = fixed + sum(_seen(part.layer, part.chosen(now.price + over), fixed.shape) for part in frozen)
        slots = slot_loads(seen, choice.slot_to_expert, load)
        loads = rank_loads(choice.slot_to_expert, load, choice.topology, slots)
        worst = np.maximum(imbalance(loads, choice.topology), (slots / most).max(1))
        better = worst < least
        least = np.minimum(worst, least)
        best = replace(best, price=np.where(better[:, None], now.price + over, best.price))
        step = 1 / (1 + turn / 4)
        now = now.corrected(loads, step=step)
        over = np.maximum(over + step * (slots / most - 1), 0.0)
    return best, slot_loads(_counted([part.answer(best.price) for part in asked], choice), choice.slot_to_expert, load)


def _counted(chosen: list[Ints], choice: NearChoice) -> Floats:
    """[layers, slots] choices of each slot."""
    return count(np.concatenate(chosen, axis=1), choice.topology.n_slots)


def _seen(layer: Ints, slot: Ints, shape: tuple[int, ...]) -> Floats:
    return np.bincount(layer * shape[1] + slot, minlength=shape[0] * shape[1]).reshape(shape).astype(np.float64)


def slot_loads(seen: Floats, slot_to_expert: Ints, load: Floats) -> Floats:
    """[layers, slots] load of slots: an expert's load [layers, experts], split as ``seen`` [layers, slots]; evenly if nothing was seen."""
    seen = seen + 1e-6
    at = np.arange(len(slot_to_expert))[:, None]
    total = np.zeros((len(slot_to_expert), load.shape[1] + 1))
    np.add.at(total, (at, slot_to_expert), seen)
    split: npt.NDArray[np.float64] = np.where(slot_to_expert < 0, 0.0, seen / total[at, slot_to_expert] * load[at, slot_to_expert])
    return split
