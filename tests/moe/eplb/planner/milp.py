"""The best placement of a small case by mixed-integer programming (HiGHS): what the planner and its bounds are held against.

``python -m tests.moe.eplb.planner.milp --seeds 20`` solves more cases, and EPLB's README example.
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from rorqual.moe.eplb.planner.bounds import bound
from rorqual.moe.eplb.planner.static import plan_static
from rorqual.moe.eplb.topology import Topology
from tests.moe.eplb.reference_eplb import README


def optimum(load: np.ndarray, slots: tuple[int, ...], time_limit: float = 60.0) -> float:
    """Least possible load of the fullest rank: load [experts] split evenly over an expert's replicas, each on a rank of its own."""
    n_experts, n_ranks = len(load), len(slots)
    choices = [(e, c) for e in range(n_experts) for c in range(1, n_ranks + 1)]
    on = len(choices)  # first variable of "a replica of this choice is on this rank"
    n = on + len(choices) * n_ranks + 1
    rows = lil_matrix((n_experts + len(choices) + 2 * n_ranks, n))
    low, high = np.zeros(rows.shape[0]), np.zeros(rows.shape[0])
    for k, (e, c) in enumerate(choices):
        rows[e, k] = 1.0
        rows[n_experts + k, k] = -float(c)
        for r in range(n_ranks):
            at = on + k * n_ranks + r
            rows[n_experts + k, at] = 1.0
            rows[n_experts + len(choices) + r, at] = 1.0
            rows[n_experts + len(choices) + n_ranks + r, at] = load[e] / c
    low[:n_experts] = high[:n_experts] = 1.0
    for r in range(n_ranks):
        high[n_experts + len(choices) + r] = slots[r]
        low[n_experts + len(choices) + n_ranks + r] = -np.inf
        rows[n_experts + len(choices) + n_ranks + r, n - 1] = -1.0
    cost = np.zeros(n)
    cost[-1] = 1.0
    whole = np.ones(n)
    whole[-1] = 0
    found = milp(
        cost,
        constraints=LinearConstraint(rows.tocsr(), low, high),
        integrality=whole,
        bounds=Bounds(0, np.append(np.ones(n - 1), np.inf)),
        options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
    )
    assert found.status == 0, found.message
    return float(found.fun)


def case(seed: int) -> tuple[np.ndarray, Topology]:
    """A small random load and machine."""
    random = np.random.default_rng(seed)
    n_ranks = int(random.integers(2, 5))
    n_experts = int(random.integers(3, 8))
    least = -(-n_experts // n_ranks)
    slots = tuple(int(s) for s in random.integers(least, least + 2, n_ranks))
    load = random.lognormal(0.0, random.uniform(0.3, 1.5), (1, n_experts))
    return load, Topology(slots=slots, nodes=(0,) * n_ranks)


def compare(load: np.ndarray, topology: Topology, time_limit: float = 60.0) -> tuple[float, float, float]:
    """Bound, optimum and plan of one layer, as loads of the fullest rank."""
    mean = load[0].sum() / topology.n_ranks
    return bound(load, topology)[0] * mean, optimum(load[0], topology.slots, time_limit), plan_static(load, topology).imbalance[0] * mean


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--readme", action="store_true", help="minutes for the second layer")
    parser.add_argument("--time-limit", type=float, default=1200.0, help="seconds for each layer of the example")
    args = parser.parse_args()
    for seed in range(args.seeds):
        load, topology = case(seed)
        low, best, ours = compare(load, topology)
        print(
            f"seed {seed}: {load.shape[1]} experts, slots {topology.slots}: bound {low:.4f}, optimum {best:.4f}, plan {ours:.4f}",
            flush=True,
        )
        assert low <= best * (1 + 1e-6) and best <= ours * (1 + 1e-6)
    for layer in range(2 if args.readme else 0):
        load = README[layer : layer + 1]
        print("README layer", layer, compare(load, Topology.even(n_slots=16, n_ranks=8), args.time_limit), flush=True)


if __name__ == "__main__":
    main()
