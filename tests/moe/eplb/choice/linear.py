"""The linear program of water filling, solved by HiGHS, and placements to solve it for."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from rorqual.moe.eplb.topology import Topology


def random_slots(rng: np.random.Generator, layers: int, experts: int, topology: Topology) -> np.ndarray:
    """[layers, slots] with every expert, any replicas (on one rank too), and empty slots."""
    usable = np.flatnonzero(topology.usable)
    out = np.full((layers, topology.n_slots), -1)
    for row in out:
        more = rng.integers(-1, experts, len(usable) - experts)
        row[usable] = rng.permutation(np.concatenate([np.arange(experts), more]))
    return out


def least_level(counts: np.ndarray, slots: np.ndarray, topology: Topology) -> float:
    """Least possible tokens over speed of the busiest rank, for one layer's counts [experts] and slots [slots]."""
    filled = np.flatnonzero(slots >= 0)
    columns = np.arange(len(filled))
    speeds = np.ones(topology.n_ranks) if topology.speeds is None else np.array(topology.speeds)
    upper = np.zeros((topology.n_ranks, len(filled) + 1))
    upper[topology.rank_of_slot[filled], columns] = 1.0
    upper[:, -1] = -speeds
    equal = np.zeros((len(counts), len(filled) + 1))
    equal[slots[filled], columns] = 1.0
    cost = np.zeros(len(filled) + 1)
    cost[-1] = 1.0
    some = equal.any(1)
    assert not counts[~some].any()
    return float(linprog(cost, A_ub=upper, b_ub=np.zeros(topology.n_ranks), A_eq=equal[some], b_eq=counts[some], method="highs").fun)
