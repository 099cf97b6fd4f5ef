"""The partner-aware bound by linear programming, layer by layer: slow, and tighter than the planner's own. Needs scipy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....moe.eplb.plan import Floats
from ....moe.eplb.topology import Ints

_MORE_REPLICAS = 5  # than the fewest, of a light expert: more are counted as if those had no load, which only lowers the bound


def partner_bound(load: Floats, *, n_ranks: int, width: int, low: float, high: float, precision: float = 2e-4) -> float:
    """Imbalance of one layer that no placement betters: ``n_ranks`` equal ranks of ``width`` slots, loads split evenly over replicas.

    A limit T of rank loads is possible only if, for every light load y, ranks have room for what is beside y: a replica above T - k y
    (and above T / 2) shares its rank with at most k - 1 replicas of y or more, so it takes the room of ``width - k + 1`` of them, any
    other of y or more takes one, and a lighter one none. Which number of replicas each expert has is a choice, relaxed to fractions.

    Args:
        load: [experts].
        n_ranks: ranks.
        width: slots of each rank, two or more.
        low: an imbalance known to be a bound; 1 is one.
        high: an imbalance that some placement has.
        precision: of the search, as a fraction.
    """
    mean = load.sum() / n_ranks
    low, high = low * mean, high * mean
    while high - low > precision * mean:
        middle = (low + high) / 2
        if _possible(load, middle, n_ranks, width):
            high = middle
        else:
            low = middle
    return float(low / mean)


def _possible(load: Floats, limit: float, n_ranks: int, width: int) -> bool:
    """Whether the relaxed choice of replicas has a solution under this limit of rank loads."""
    optimize, sparse = _scipy()
    fewest = np.maximum(np.ceil(load / limit - 1e-12), 1).astype(np.int64)
    if fewest.sum() > n_ranks * width:
        return False
    expert, counts, each = _options(load, fewest, limit, spare=n_ranks * width - int(fewest.sum()))
    n = len(counts)
    rooms = _rooms(each, counts, limit, width)
    choose_one = sparse.csr_matrix((np.ones(n), (expert, np.arange(n))), shape=(len(load), n + 1))
    fill = sparse.csr_matrix(np.append(counts, 1.0)[None])  # the last variable is slots that stay empty
    result = optimize.linprog(
        np.zeros(n + 1),
        A_ub=sparse.csr_matrix(rooms) if len(rooms) else None,
        b_ub=np.zeros(len(rooms)) if len(rooms) else None,
        A_eq=sparse.vstack([choose_one, fill]),
        b_eq=np.append(np.ones(len(load)), n_ranks * width),
        bounds=[(0, None)] * (n + 1),
        method="highs",
    )
    return bool(result.status != 2)  # anything but "infeasible" proves nothing


def _options(load: Floats, fewest: Ints, limit: float, spare: int) -> tuple[Ints, Ints, Floats]:
    """Expert, replicas and load of a replica of every choice: no expert has more than the spare slots on top of its fewest."""
    experts, counts, each = [], [], []
    for expert, least in enumerate(fewest):
        light = load[expert] < 0.3 * limit and spare > _MORE_REPLICAS
        choices = least + np.arange(1 + (_MORE_REPLICAS if light else spare))
        shares = load[expert] / choices
        if light:
            shares[-1] = 0.0
        experts.append(np.full(len(choices), expert))
        counts.append(choices)
        each.append(shares)
    return np.concatenate(experts), np.concatenate(counts), np.concatenate(each)


def _rooms(each: Floats, counts: Ints, limit: float, width: int) -> Floats:
    """Rows of "room taken minus room given" [thresholds, options + 1], which may not be positive in total."""
    values = np.unique(each)
    heavy = values[values > limit / 2]
    light = np.concatenate([(limit - heavy) / k for k in range(1, width)])
    light = np.unique(light[light < limit / 2])
    if len(light) > 160:
        light = light[np.linspace(0, len(light) - 1, 160).astype(np.int64)]
    threshold = light[:, None] * (1 + 1e-12) + 1e-15
    taken = np.where(each[None] < threshold, 0.0, 1.0)
    for k in range(width - 1, 0, -1):
        taken = np.where((each[None] > limit - k * threshold) & (each[None] > limit / 2), width - k + 1.0, taken)
    rows = counts[None] * (taken - 1.0)
    return np.concatenate([rows, -np.ones((len(light), 1))], axis=1)


def _scipy() -> Any:
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise ValueError("the bound by linear programming needs scipy: pip install scipy") from error
    return optimize, sparse
