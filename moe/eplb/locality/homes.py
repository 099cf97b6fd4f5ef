"""Experts to nodes: a search that weighs nodes touched by tokens against the balance of the nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..topology import Ints

Floats = npt.NDArray[np.float64]

DOUBT = 1.0  # standard errors by which a move must look better than it does: the best of thousands of noisy gains is mostly luck


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Tokens of all layers, with the tokens of every expert at hand."""

    ids: Ints  # [layers, tokens, top_k] experts; n_experts: none
    n_experts: int
    order: Ints  # [layers, tokens * top_k] token of every choice, the choices sorted by expert
    start: Ints  # [layers, n_experts + 2] where an expert's choices begin in ``order``

    @classmethod
    def of(cls, ids: Ints, n_experts: int) -> Choices:
        """ids [layers, tokens, top_k], -1: none."""
        layers, _, k = ids.shape
        ids = np.where(ids < 0, n_experts, ids)
        flat = ids.reshape(layers, -1)
        order = np.argsort(flat.astype(np.int16), axis=1, kind="stable") // k
        counts = np.stack([np.bincount(row, minlength=n_experts + 1) for row in flat])
        start = np.concatenate([np.zeros((layers, 1), dtype=np.int64), counts.cumsum(1)], axis=1)
        return cls(ids=ids, n_experts=n_experts, order=order, start=start)

    def tokens_of(self, layers: Ints, experts: Ints) -> tuple[Ints, Ints]:
        """One expert each of some layers [n] -> layer and number of every token that chose it [m]."""
        first, last = self.start[layers, experts], self.start[layers, experts + 1]
        n = last - first
        places = np.arange(n.sum()) - np.repeat(n.cumsum() - n, n) + np.repeat(first, n)
        layer = np.repeat(layers, n)
        return layer, self.order[layer, places]


class Homes:
    """Homes of experts, and what every move of one of them to another node would change. One expert of each layer moves at a time."""

    def __init__(self, choices: Choices, home: Ints, n_nodes: int) -> None:
        layers, tokens, _ = choices.ids.shape
        self.choices, self.n_nodes, self.n_tokens = choices, n_nodes, tokens
        none = np.full((layers, 1), n_nodes, dtype=np.int64)  # "no expert" lives on a node of its own
        self.home = np.concatenate([home, none], axis=1)  # [layers, experts + 1]
        at = np.take_along_axis(self.home, choices.ids.reshape(layers, -1), axis=1).reshape(choices.ids.shape)
        rows = np.arange(layers * tokens).reshape(layers, tokens, 1) * (n_nodes + 1)
        self.count = np.bincount((rows + at).ravel(), minlength=layers * tokens * (n_nodes + 1)).reshape(layers, tokens, n_nodes + 1)
        width = choices.n_experts + 1
        single = np.take_along_axis(self.count, at, axis=2) == 1
        key = (np.arange(layers)[:, None, None] * width + choices.ids).ravel()
        self.alone = np.bincount(key, single.ravel(), layers * width).reshape(
            layers, width
        )  # tokens that only this expert brings to its node
        absent = [
            np.bincount(key, np.broadcast_to(self.count[:, :, n, None] == 0, at.shape).ravel(), layers * width) for n in range(n_nodes)
        ]
        self.absent = np.stack(absent, axis=-1).reshape(layers, width, n_nodes)  # tokens of the expert that are not on that node yet

    def added(self, layers: Ints) -> Floats:
        """[n, experts, nodes] nodes that a token gains by a move of each expert to each node, with doubt; its own node: not defined."""
        absent, alone = self.absent[layers, :-1], self.alone[layers, :-1, None]
        change: Floats = (absent - alone + DOUBT * np.sqrt(absent + alone)) / self.n_tokens
        return change

    @property
    def nodes_per_token(self) -> Floats:
        """[layers] nodes touched by a token."""
        nodes: Floats = (self.count[:, :, : self.n_nodes] > 0).sum((1, 2)) / self.n_tokens
        return nodes

    def move(self, layers: Ints, experts: Ints, to: Ints) -> Floats:
        """One expert of each of some layers [n] to a node [n] other than its own. Returns the change of nodes a token [n]."""
        layer, token = self.choices.tokens_of(layers, experts)
        m = np.arange(len(layer))
        ids = self.choices.ids[layer, token]
        lines = np.broadcast_to(layer[:, None], ids.shape)
        chosen = self.choices.start[layers, experts + 1] - self.choices.start[layers, experts]
        source, target = np.repeat(self.home[layers, experts], chosen), np.repeat(to, chosen)
        count = self.count[layer, token]
        before = np.take_along_axis(count, self.home[lines, ids], axis=1) == 1
        fresh = count[m, target] == 0
        count[m, source] -= 1
        count[m, target] += 1
        left = count[m, source] == 0
        self.count[layer, token] = count
        self.home[layers, experts] = to
        after = np.take_along_axis(count, self.home[lines, ids], axis=1) == 1
        changed = before != after
        np.add.at(self.alone, (lines[changed], ids[changed]), np.where(after[changed], 1.0, -1.0))
        np.add.at(self.absent, (lines[left], ids[left], source[left, None]), 1.0)
        np.add.at(self.absent, (lines[fresh], ids[fresh], target[fresh, None]), -1.0)
        change: Floats = np.bincount(layer, fresh.astype(np.float64) - left, minlength=len(self.home))[layers] / self.n_tokens
        return change
