"""The search: experts move to other nodes, or swap nodes, while nodes touched by tokens and balance of the nodes get better together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..plan import Floats
from ..topology import Ints
from .homes import Homes

POWER = 16  # of the norm that stands for the largest node load: smooth, so that a move pays before it has cured every heavy node
NEAR = 16  # candidates of each pair of nodes that a swap looks at
LEAST = 1e-6  # gain that a move must have


@dataclass(frozen=True, kw_only=True)
class Rooms:
    """What nodes can take."""

    load: Floats  # [layers, experts] share of an expert in the layer's load: they sum to 1
    size: Ints  # [layers, experts] slots that an expert needs at least
    share: Floats  # [nodes] of the load that a node should take
    slots: Ints  # [nodes]


class Settling:
    """Homes of experts on their way to better ones."""

    def __init__(self, homes: Homes, rooms: Rooms, weight: float) -> None:
        self.homes, self.rooms, self.weight, self.n = homes, rooms, weight, homes.n_nodes
        there = homes.home[:, :-1, None] == np.arange(self.n)
        self.busy = np.where(there, rooms.load[:, :, None], 0.0).sum(1) / rooms.share  # [layers, nodes] load over the node's share
        self.used = np.where(there, rooms.size[:, :, None], 0).sum(1)  # [layers, nodes] slots
        self.near = min(NEAR, rooms.load.shape[1])
        self.vain = np.zeros(rooms.load.shape, dtype=bool)  # experts that looked good to swap and were not

    def norm(self, layers: Ints) -> Floats:
        """[n] stands for the largest load of a node over its share."""
        total: Floats = (self.busy[layers] ** POWER).mean(1) ** (1 / POWER)
        return total

    def move_one(self, live: Ints) -> Ints:
        """The best move of one expert in each of these layers, if it pays. Returns the layers that had one."""
        gain = self._gains(live).reshape(len(live), -1)
        best = gain.argmin(1)
        pays = gain[np.arange(len(live)), best] < -LEAST
        expert, to = np.divmod(best[pays], self.n)
        live = live[pays]
        self._move(live, expert, to)
        return live

    def _move(self, layers: Ints, expert: Ints, to: Ints) -> Floats:
        load, size, share = self.rooms.load[layers, expert], self.rooms.size[layers, expert], self.rooms.share
        source = self.homes.home[layers, expert]
        self.busy[layers, source] -= load / share[source]
        self.busy[layers, to] += load / share[to]
        self.used[layers, source] -= size
        self.used[layers, to] += size
        return self.homes.move(layers, expert, to)

    def _gains(self, live: Ints) -> Floats:
        """[n, experts, nodes] change of the objective by each move; infinite where it is not allowed."""
        home = self.homes.home[live, :-1]
        load, size, share = self.rooms.load[live], self.rooms.size[live], self.rooms.share
        busy = self.busy[live]
        now = busy**POWER
        there = (busy[:, None, :] + load[:, :, None] / share) ** POWER - now[:, None, :]
        here = (np.take_along_axis(busy, home, 1) - load / share[home]) ** POWER - np.take_along_axis(now, home, 1)
        after = now.sum(1)[:, None, None] + there + here[:, :, None]
        change = (np.maximum(after, 0) / self.n) ** (1 / POWER) - self.norm(live)[:, None, None]
        change += self.weight * self.homes.added(live)
        full = self.used[live][:, None, :] + size[:, :, None] > self.rooms.slots
        own = home[:, :, None] == np.arange(self.n)
        return np.where(full | own | (size == 0)[:, :, None], np.inf, change)

    def swap_two(self, live: Ints) -> Ints:
        """The best swap of two experts between nodes in each of these layers, if it pays. Returns the layers that seemed to have one."""
        added = self.weight * self.homes.added(live)
        first, gain = self._candidates(live, added)
        i = np.arange(len(live))[:, None, None, None]
        a, b = np.triu_indices(self.n, 1)
        one, two = first[:, a, b][..., :, None], first[:, b, a][..., None, :]  # [n, pairs, near, 1] goes to b, [n, pairs, 1, near] to a
        load, size, share = self.rooms.load[live], self.rooms.size[live], self.rooms.share
        busy, used = self.busy[live], self.used[live]
        shift, grow = load[i, one] - load[i, two], size[i, one] - size[i, two]
        low, high = (busy[:, a, None, None] - shift / share[a][:, None, None]), (busy[:, b, None, None] + shift / share[b][:, None, None])
        now = busy**POWER
        after = (now.sum(1)[:, None] - now[:, a] - now[:, b])[:, :, None, None] + low**POWER + high**POWER
        change = (np.maximum(after, 0) / self.n) ** (1 / POWER) - self.norm(live)[:, None, None, None]
        change += gain[:, a, b][..., :, None] + gain[:, b, a][..., None, :]
        free = self.rooms.slots - used
        change[(grow > free[:, b, None, None]) | (-grow > free[:, a, None, None])] = np.inf
        flat = change.reshape(len(live), -1)
        best = flat.argmin(1)
        pays = np.flatnonzero(flat[np.arange(len(live)), best] < -LEAST)
        pair, place = np.divmod(best[pays], self.near**2)
        left, right = first[pays, a[pair], b[pair], place // self.near], first[pays, b[pair], a[pair], place % self.near]
        self._try_swap(live[pays], left, right, a[pair], b[pair])
        return live[pays]

    def _candidates(self, live: Ints, added: Floats) -> tuple[Ints, Floats]:
        """Experts [n, from, to, near] whose move is the most welcome, and what their moves add to the weighted nodes a token."""
        busy = self.busy[live]
        slope = (busy / self.norm(live)[:, None]) ** (POWER - 1) / self.n / self.rooms.share
        home = self.homes.home[live, :-1]
        welcome = added + self.rooms.load[live][:, :, None] * (slope[:, None, :] - np.take_along_axis(slope, home, 1)[:, :, None])
        welcome[(self.rooms.size[live] == 0) | self.vain[live]] = np.inf
        own = home[:, None, :, None] == np.arange(self.n)[:, None, None]  # [n, from, experts, 1]
        ranked = np.where(own, welcome[:, None], np.inf).transpose(0, 1, 3, 2)  # [n, from, to, experts]
        first = np.argpartition(ranked, self.near - 1, axis=-1)[..., : self.near]
        open_ = np.isfinite(np.take_along_axis(ranked, first, axis=-1))
        gain = np.where(
            open_,
            np.take_along_axis(np.broadcast_to(added[:, None], own.shape[:3] + added.shape[2:]).transpose(0, 1, 3, 2), first, -1),
            np.inf,
        )
        return first, gain

    def _try_swap(self, layers: Ints, one: Ints, two: Ints, a: Ints, b: Ints) -> None:
        """Swap, and swap back where tokens that chose both made it worse than it looked: then these experts wait for the next success."""
        before = self.norm(layers)
        change = self._move(layers, one, b) + self._move(layers, two, a)
        bad = self.norm(layers) - before + self.weight * change >= 0
        self._move(layers[bad], one[bad], a[bad])
        self._move(layers[bad], two[bad], b[bad])
        self.vain[layers[~bad]] = False
        self.vain[layers[bad], one[bad]] = self.vain[layers[bad], two[bad]] = True


def settle(homes: Homes, rooms: Rooms, weight: float, *, moves: int = 400, swaps: int = 40) -> None:
    """Move and swap experts while it lessens (norm of the node loads) + weight * (nodes touched by a token).

    Args:
        homes: where experts live; changed.
        rooms: loads and room of the nodes. A node that is over its room only loses experts.
        weight: imbalance that one node less a token is worth.
        moves: of single experts in a layer, at most.
        swaps: in a layer, at most: they matter where nodes have no room, and where single moves are stuck.
    """
    work = Settling(homes, rooms, weight)
    if homes.n_nodes < 2:
        return
    for step, most in ((work.move_one, moves), (work.swap_two, swaps)):
        live = np.arange(len(homes.home))
        for _ in range(most):
            live = step(live)
            if not len(live):
                break
