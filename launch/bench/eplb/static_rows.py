"""Plans from nothing, against EPLB and the bounds, in the same run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ....moe.eplb.metrics import imbalance
from ....moe.eplb.plan import Floats, Plan, rank_loads
from ....moe.eplb.planner.static import plan_static
from ....moe.eplb.topology import Ints, Topology
from ....moe.eplb.validate import count_duplicates
from ..results import Row
from .cases import FLASH, MACHINES, README, README_SHAPE, Machine, skewed_load
from .measure import figure, require_valid, timed
from .peer import eplb

_LONGER = 8  # times the usual search
_README_BEST = (136.0, 172.0)
_FLASH_BEST = 196.67


def small_rows() -> list[Row]:
    """The two published examples, in load of the slowest rank."""
    theirs = _largest(eplb(README, **README_SHAPE), README, _even(README_SHAPE["n_slots"], README_SHAPE["n_ranks"]))
    ours = _largest(None, README, _even(16, 8))
    rows = [
        figure(
            "largest rank load, EPLB's README example",
            {"layer": layer},
            ours[layer],
            "tokens",
            {"EPLB": theirs[layer]},
            _README_BEST[layer],
        )
        for layer in range(len(README))
    ]
    peer = _largest(eplb(FLASH, n_slots=16, n_groups=1, n_nodes=1, n_ranks=8), FLASH, _even(16, 8))
    ours = _largest(None, FLASH, _even(16, 8))
    return [*rows, figure("largest rank load, FlashLB's example", {}, ours[0], "tokens", {"EPLB": peer[0]}, _FLASH_BEST)]


def machine_rows(machine: Machine, *, tries: int, proven: Mapping[str, Floats], seed: int = 0) -> list[Row]:
    """Imbalance, gap, duplicates and time of the plan for one machine; ``proven``: bounds by linear programming, by ``key``."""
    load = skewed_load(seed=seed)
    topology = machine.topology
    plan, ours = timed(lambda: plan_static(load, topology), tries)
    peer, theirs = timed(lambda: eplb(load, n_slots=machine.n_slots, n_groups=1, n_nodes=1, n_ranks=machine.n_ranks), 1)
    require_valid(plan.slot_to_expert, load.shape[1], topology)
    params = {"slots": machine.n_slots, "ranks": machine.n_ranks, "layers": len(load), "experts": load.shape[1], "seed": seed}
    other = imbalance(rank_loads(peer, load, topology), topology)
    twice = count_duplicates(peer, load.shape[1], topology).sum()
    mine = count_duplicates(plan.slot_to_expert, load.shape[1], topology).sum()
    return [
        figure("largest over mean rank load, mean of layers", params, plan.imbalance.mean(), "", {"EPLB": other.mean()}, machine.target),
        figure("largest over mean rank load, worst layer", params, plan.imbalance.max(), "", {"EPLB": other.max()}, None),
        *_gap_rows(machine, load, plan, other, params, proven),
        figure("slots that repeat an expert of their rank", params, float(mine), "slots", {"EPLB": float(twice)}, 0.0),
        figure("a plan of all layers, process time", params, 1e3 * ours, "ms", {"EPLB, plain loops": 1e3 * theirs}, machine.milliseconds),
    ]


def _gap_rows(
    machine: Machine, load: Floats, plan: Plan, other: Floats, params: dict[str, object], proven: Mapping[str, Floats]
) -> list[Row]:
    """How far above the partner-aware bound the mean imbalance is; where ranks have few slots, with a longer search as well."""
    least, known = plan.bound, "quick"
    if key(machine) in proven:
        least, known = np.maximum(least, proven[key(machine)]), "quick and linear programming"
    params = params | {"bound": known, "bound_mean": round(float(least.mean()), 5)}
    name, target = "above the partner-aware bound, ratio of means", None if machine.gap is None else 100 * machine.gap
    peers = {"EPLB": 100 * (other.mean() / least.mean() - 1)}
    rows = [figure(name, params, 100 * (plan.imbalance.mean() / least.mean() - 1), "%", peers, target)]
    if machine.gap is not None:
        longer, seconds = timed(lambda: plan_static(load, machine.topology, effort=_LONGER), 1)
        searched = params | {"effort": _LONGER, "milliseconds": round(1e3 * seconds)}
        rows.append(figure(name, searched, 100 * (longer.imbalance.mean() / least.mean() - 1), "%", peers, target))
    return rows


def key(machine: Machine) -> str:
    """Name of a machine in a file of bounds."""
    return f"{machine.n_slots}-{machine.n_ranks}"


def rows(*, tries: int, proven: Mapping[str, Floats]) -> list[Row]:
    """All rows of plans from nothing."""
    return [*small_rows(), *(row for machine in MACHINES for row in machine_rows(machine, tries=tries, proven=proven))]


def _largest(slots: Ints | None, load: Floats, topology: Topology) -> Floats:
    slots = plan_static(load, topology).slot_to_expert if slots is None else slots
    largest: Floats = rank_loads(slots, load, topology).max(1)
    return largest


def _even(n_slots: int, n_ranks: int) -> Topology:
    return Topology.even(n_slots=n_slots, n_ranks=n_ranks)
