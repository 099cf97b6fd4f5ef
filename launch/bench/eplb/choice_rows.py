"""Replica choice by load: water filling against its bound, and how long it takes a layer."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....moe.eplb.choice.deal import deal_ways
from ....moe.eplb.choice.water import WaterFill
from ....moe.eplb.plan import Floats, rank_loads
from ....moe.eplb.planner.slack import plan_slack
from ....moe.eplb.planner.static import plan_static
from ....moe.eplb.topology import Ints, Topology
from ..results import Row
from .cases import EXPERTS, LAYERS, skewed_load
from .measure import figure, timed

#: slots, ranks, nodes, noise of a step; the first two are what the target of time is about
_CASES = ((288, 32, 4, 0.2), (288, 32, 4, 0.5), (288, 72, 9, 0.2), (320, 64, 8, 0.2), (512, 64, 8, 0.2))
_WAYS = 64


def rows(*, tries: int = 20, proven: Any = None) -> list[Row]:
    """Rows of every case: distance to the best split, microseconds a layer, and balance after the split is rounded to tables."""
    load, found = skewed_load(), []
    for n_slots, n_ranks, n_nodes, noise in _CASES:
        topology = Topology.even(n_slots=n_slots, n_ranks=n_ranks, n_nodes=n_nodes)
        counts = 1e5 * load * np.exp(noise * np.random.default_rng(n_slots + n_ranks).standard_normal(load.shape))
        planner = plan_slack if n_slots == 288 and n_ranks == 32 else plan_static
        found += _case(
            planner(load, topology).slot_to_expert, counts, topology, {"slots": n_slots, "ranks": n_ranks, "noise": noise}, tries
        )
    return found


def _case(slots: Ints, counts: Floats, topology: Topology, params: dict[str, Any], tries: int) -> list[Row]:
    filler = WaterFill(slots, EXPERTS, topology)
    filled, best = timed(lambda: filler.fill(counts), tries)
    mean = counts.sum(1) / topology.n_ranks
    even = rank_loads(slots, counts, topology).max(1) / mean
    settled = _of_tables(slots, filled.split, counts, topology) / mean
    target = 100.0 if params["slots"] == 288 and params["ranks"] == 32 else None
    return [
        figure("water filling, above the best split", params, filled.gap.max(), "of it", {}, 0.01),
        figure("water filling, a layer", params, 1e6 * best / LAYERS, "us", {}, target),
        figure("largest over mean rank load, tables filled by load", params, settled.mean(), "", {"even": even.mean()}, None),
    ]


def _of_tables(slots: Ints, split: Floats, counts: Floats, topology: Topology) -> Floats:
    """[layers] load of the busiest rank if every rank's tokens go by its table; of later layers by the split, as tables are many."""
    some = slice(0, 6)
    loads = np.zeros((len(counts[some]), topology.n_ranks))
    share = counts[some] / (topology.n_ranks * _WAYS)
    layer = np.arange(len(loads))[:, None, None]
    for source in range(topology.n_ranks):
        table = deal_ways(slots[some], EXPERTS, topology, source=source, n_ways=_WAYS, shares=split[some])
        np.add.at(loads, (layer, topology.rank_of_slot[table]), share[:, :, None])
    return np.concatenate([loads.max(1), rank_loads(slots, counts, topology, split).max(1)[some.stop :]])
