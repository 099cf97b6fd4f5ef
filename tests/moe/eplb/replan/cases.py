"""Loads and facts about plans that are worked out the long way."""

from __future__ import annotations

import itertools

import numpy as np

from rorqual.moe.eplb.cost import CostModel
from rorqual.moe.eplb.topology import Topology

UNIT = CostModel(expert_bytes=1)


def skewed(layers: int = 8, experts: int = 256, seed: int = 0, tokens: float = 65536.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    load = np.exp(random.uniform(0.6, 1.35, (layers, 1)) * random.standard_normal((layers, experts)))
    return load / load.sum(1, keepdims=True) * tokens


def drift(load: np.ndarray, amount: float, seed: int = 1) -> np.ndarray:
    moved = load * np.exp(amount * np.random.default_rng(seed).standard_normal(load.shape))
    return moved / moved.sum(1, keepdims=True) * load.sum(1, keepdims=True)


def held(slots: np.ndarray, topology: Topology) -> list[list[set[int]]]:
    """Experts of each layer's ranks."""
    bounds = topology.first_slot
    return [[{int(e) for e in row[bounds[r] : bounds[r + 1]] if e >= 0} for r in range(topology.n_ranks)] for row in slots]


def arrivals(before: np.ndarray, after: np.ndarray, topology: Topology) -> np.ndarray:
    """[layers, ranks] experts that are new on a rank, one by one."""
    return np.array(
        [[len(b - a) for a, b in zip(x, y, strict=True)] for x, y in zip(held(before, topology), held(after, topology), strict=True)]
    )


def largest(slots: np.ndarray, load: np.ndarray, topology: Topology) -> np.ndarray:
    """[layers] largest over mean load of the usable ranks, one by one."""
    found = []
    for row, tokens in zip(slots.tolist(), load, strict=True):
        ranks = np.zeros(topology.n_ranks)
        for slot, expert in enumerate(row):
            if expert >= 0:
                ranks[topology.rank_of_slot[slot]] += tokens[expert] / row.count(expert)
        found.append(ranks.max() / (tokens.sum() / (topology.n_ranks - len(topology.failed))))
    return np.array(found)


def every_placement(experts: int, topology: Topology) -> np.ndarray:
    """All placements of a tiny machine, with empty slots, without one that lacks an expert or has it twice on a rank."""
    maps = itertools.product(range(-1, experts), repeat=topology.n_slots)
    return np.array([m for m in maps if set(range(experts)) <= set(m) and _no_twins(m, topology)])


def _no_twins(slots: tuple[int, ...], topology: Topology) -> bool:
    pairs = [(rank, expert) for rank, expert in zip(topology.rank_of_slot.tolist(), slots, strict=True) if expert >= 0]
    return len(pairs) == len(set(pairs))


def assert_in_place(before: np.ndarray, after: np.ndarray, topology: Topology) -> None:
    """Experts that stay on a rank are in the slots that they had there."""
    for row in range(len(before)):
        for rank in range(topology.n_ranks):
            part = slice(topology.first_slot[rank], topology.first_slot[rank + 1])
            old, new = before[row, part].tolist(), after[row, part].tolist()
            for expert in set(old) & set(new) - {-1}:
                assert any(a == b == expert for a, b in zip(old, new, strict=True)), (row, rank, expert, old, new)
