"""Re-plans after the load has drifted, beside EPLB, which plans from nothing each time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ....moe.eplb.api import make_plan
from ....moe.eplb.assess import arrivals
from ....moe.eplb.metrics import imbalance
from ....moe.eplb.plan import Floats, rank_loads
from ....moe.eplb.planner.static import plan_static
from ....moe.eplb.replan.coverage import losses
from ....moe.eplb.replan.recovery import recover
from ....moe.eplb.topology import Ints, Topology
from ..results import Row
from .cases import skewed_load
from .measure import figure, require_valid, timed
from .peer import eplb

_DRIFTS = (0.02, 0.05, 0.10, 0.30)
_TARGETS = {(32, 0.05): (5.0, 1.02, 100.0)}  # ranks and drift: % of slots moved, imbalance, milliseconds


def rows(*, tries: int, proven: Mapping[str, Floats]) -> list[Row]:
    """All rows of re-plans; ``proven`` is not needed."""
    del proven
    found = [row for ranks, nodes in ((32, 4), (72, 9)) for drift in _DRIFTS for row in drift_rows(ranks, nodes, drift, tries=tries)]
    return [*found, *long_rows(), *failure_rows()]


def drifted(load: Floats, drift: float, seed: int = 1) -> Floats:
    """Each expert's load times a lognormal factor of its own, whose logarithm has this deviation."""
    return load * np.exp(drift * np.random.default_rng(seed).standard_normal(load.shape))


def drift_rows(n_ranks: int, n_nodes: int, drift: float, *, tries: int, n_slots: int = 288) -> list[Row]:
    """Slots moved, imbalance and time of one re-plan; both planners begin with their own plan for the load before."""
    load, topology = skewed_load(), Topology.even(n_slots=n_slots, n_ranks=n_ranks, n_nodes=n_nodes)
    later = drifted(load, drift)
    before = plan_static(load, topology)
    plan, seconds = timed(lambda: make_plan(later, topology, previous=before), tries)
    require_valid(plan.slot_to_expert, load.shape[1], topology)
    shape = {"n_slots": n_slots, "n_groups": 1, "n_nodes": 1, "n_ranks": n_ranks}
    theirs, again = eplb(load, **shape), eplb(later, **shape)
    params: dict[str, object] = {"slots": n_slots, "ranks": n_ranks, "layers": len(load), "experts": load.shape[1], "drift": drift}
    share, balance, milliseconds = _TARGETS.get((n_ranks, drift), (None, None, None))
    peer_moved = arrivals(theirs, again, load.shape[1], topology).sum()
    scratch = plan_static(later, topology, previous=before.slot_to_expert)
    other, stay = _imbalance(again, later, topology), _imbalance(before.slot_to_expert, later, topology)
    moved = {"EPLB": 100 * peer_moved / again.size, "ours from nothing": 100 * scratch.moved.sum() / again.size}
    size = {"EPLB": peer_moved * plan.expert_bytes / 1e9}
    return [
        figure("re-plan: slots that get another rank's expert", params, 100 * plan.moved.sum() / again.size, "%", moved, share),
        figure("re-plan: bytes to move", params, plan.bytes_to_move / 1e9, "GB", size, None),
        figure(
            "re-plan: largest over mean rank load, mean of layers",
            params,
            plan.imbalance.mean(),
            "",
            {"EPLB": other.mean(), "staying put": stay.mean()},
            balance,
        ),
        figure(
            "re-plan: the same, worst layer", params, plan.imbalance.max(), "", {"EPLB": other.max(), "staying put": stay.max()}, balance
        ),
        figure("re-plan of all layers, process time", params, 1e3 * seconds, "ms", {}, milliseconds),
    ]


def long_rows(windows: int = 30, n_layers: int = 12) -> list[Row]:
    """Many re-plans one after another, each after a drift of 5%: the last ones must not be worse than the first."""
    found = []
    for n_ranks in (32, 72):
        load, topology = skewed_load(n_layers), Topology.even(n_slots=288, n_ranks=n_ranks)
        plan, balance, moved = make_plan(load, topology), [], []
        for window in range(windows):
            load = drifted(load, 0.05, seed=100 + window)
            plan = make_plan(load, topology, previous=plan)
            balance.append(plan.imbalance.mean())
            moved.append(100 * plan.moved.sum() / plan.slot_to_expert.size)
        params: dict[str, object] = {"slots": 288, "ranks": n_ranks, "layers": n_layers, "drift": 0.05, "windows": windows}
        scratch = {"planned from nothing": plan_static(load, topology).imbalance.mean()}
        found.append(figure("imbalance of the last five of many re-plans", params, float(np.mean(balance[-5:])), "", scratch, None))
        found.append(figure("slots moved by each of many re-plans, mean", params, float(np.mean(moved)), "%", {}, None))
    return found


def failure_rows() -> list[Row]:
    """Experts that one rank's failure takes with it, and what recovery from one reads from disk."""
    found, load = [], skewed_load()
    for n_slots, n_ranks in ((288, 32), (512, 64)):
        topology = Topology.even(n_slots=n_slots, n_ranks=n_ranks, n_nodes=n_ranks // 8)
        plan = make_plan(load, topology, coverage="ranks")
        theirs = eplb(load, n_slots=n_slots, n_groups=1, n_nodes=1, n_ranks=n_ranks)
        mine, peer = (losses(slots, load.shape[1], topology).by_rank.mean() for slots in (plan.slot_to_expert, theirs))
        params: dict[str, object] = {"slots": n_slots, "ranks": n_ranks, "layers": len(load)}
        target = 0.0 if n_slots >= 2 * load.shape[1] else None
        found.append(figure("experts of a layer lost with one rank, mean", params, mine, "experts", {"EPLB": peer}, target))
        after, recovery = recover(load, topology, previous=plan, failed=[0], coverage="ranks")
        require_valid(after.slot_to_expert, load.shape[1], after.topology)
        read = {"copied between ranks": recovery.copied_bytes.sum() / 1e9}
        found.append(figure("read from disk after rank 0 has failed", params, recovery.disk_bytes.sum() / 1e9, "GB", read, target))
    return found


def _imbalance(slots: Ints, load: Floats, topology: Topology) -> Floats:
    return imbalance(rank_loads(slots, load, topology), topology)
