"""The loads and machines that planners are held against."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ....moe.eplb.plan import Floats
from ....moe.eplb.topology import Topology

LAYERS, EXPERTS = 58, 256

#: EPLB's README: 2 layers, 16 slots, 4 groups, 2 nodes, 8 ranks; the largest rank loads that can be had are 136 and 172
README = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]], dtype=np.float64
)
README_SHAPE = {"n_slots": 16, "n_groups": 4, "n_nodes": 2, "n_ranks": 8}
#: the counter-example to greedy replicas that FlashLB's authors give: 8 ranks of 2 slots
FLASH = np.array([[600, 560, 120, 120, 20, 10, 10, 10]], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine of the target table."""

    n_slots: int
    n_ranks: int
    n_nodes: int
    target: float | None  # mean over layers of largest over mean rank load
    gap: float | None = None  # target of the gap to the partner-aware bound, as a fraction
    milliseconds: float = 50.0  # target of a plan of all layers

    @property
    def topology(self) -> Topology:
        """Equal ranks."""
        return Topology.even(n_slots=self.n_slots, n_ranks=self.n_ranks, n_nodes=self.n_nodes)


MACHINES = (
    Machine(n_slots=288, n_ranks=32, n_nodes=4, target=1.0005),
    Machine(n_slots=288, n_ranks=48, n_nodes=6, target=1.001),
    Machine(n_slots=288, n_ranks=72, n_nodes=9, target=1.004),
    Machine(n_slots=288, n_ranks=96, n_nodes=12, target=None, gap=0.005),
    Machine(n_slots=288, n_ranks=144, n_nodes=18, target=None, gap=0.005, milliseconds=60.0),
    Machine(n_slots=320, n_ranks=160, n_nodes=20, target=None, gap=0.005, milliseconds=60.0),
)


def skewed_load(layers: int = LAYERS, experts: int = EXPERTS, seed: int = 0) -> Floats:
    """[layers, experts] lognormal loads; each layer has its own sigma between 0.6 and 1.35, which reproduces published skew."""
    random = np.random.default_rng(seed)
    sigma = random.uniform(0.6, 1.35, layers)
    load: Floats = np.exp(sigma[:, None] * random.standard_normal((layers, experts)))
    return load
