"""Plans for few nodes a token, and plans with slack, against plans that know of neither."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from ....moe.eplb.choice.water import WaterFill
from ....moe.eplb.locality.fan_out import FanOut, choose_even, fan_out
from ....moe.eplb.locality.near_plan import plan_near
from ....moe.eplb.locality.routing import Routing, make_router
from ....moe.eplb.locality.soft import plan_local
from ....moe.eplb.metrics import imbalance
from ....moe.eplb.plan import Floats, rank_loads
from ....moe.eplb.planner.slack import plan_slack
from ....moe.eplb.planner.static import plan_static
from ....moe.eplb.topology import Ints, Topology
from ..results import Row
from .cases import EXPERTS, LAYERS, skewed_load
from .measure import figure, require_valid, timed
from .peer import eplb

_GROUPS = 8
_TOPOLOGY = {"n_slots": 288, "n_ranks": 32, "n_nodes": 4}
_SKEW = (0.65, 1.45)  # of the made router's layers: gives expert and rank loads the published spread
_LEARNED, _JUDGES = 2048, 8192  # tokens that plans are made with, and others that judge them
_CORRECTIONS = 8  # of prices by the loads of further tokens


def locality_rows(*, tries: int, seed: int = 0) -> list[Row]:
    """Nodes and ranks a token, and balance, of plans on simulated node-limited routing: 4 nodes of 8 ranks, 288 slots."""
    topology = Topology.even(**_TOPOLOGY)
    router = make_router(n_layers=LAYERS, sigma=_SKEW, seed=seed)
    routing = router.sample(_LEARNED + _JUDGES, seed=seed + 1)
    load, sample, judges = routing.load, routing.tokens(0, _LEARNED), routing.tokens(_LEARNED)
    params: dict[str, object] = {"slots": 288, "ranks": 32, "nodes": 4, "layers": LAYERS, "seed": seed}
    peers = {
        "EPLB, whole groups": eplb(load, n_slots=288, n_groups=_GROUPS, n_nodes=4, n_ranks=32),
        "EPLB, global": eplb(load, n_slots=288, n_groups=1, n_nodes=1, n_ranks=32),
        "balance only": plan_static(load, topology).slot_to_expert,
    }
    out = {name: fan_out(choose_even(judges, slots), topology) for name, slots in peers.items()}
    balance = {name: float(_planned(slots, load, topology).mean()) for name, slots in peers.items()}
    rows = []
    for weight in (0.1, 0.3, 1.0):
        plan, seconds = timed(partial(plan_local, load, sample, topology, weight=weight, n_groups=_GROUPS), tries)
        slots = plan.slot_to_expert
        require_valid(slots, EXPERTS, topology)
        mine = fan_out(choose_even(judges, slots), topology)
        held = weight == 0.3  # the default has to reach the targets
        which = params | {"weight": weight, "choice": "even"}
        rows += [
            figure(
                "largest over mean rank load, few nodes a token",
                which,
                _planned(slots, load, topology).mean(),
                "",
                balance,
                1.02 if held else None,
            ),
            figure("nodes a token", which, mine.nodes.mean(), "nodes", _nodes(out), 3.25 if held else None),
            figure("ranks a token", which, mine.ranks.mean(), "ranks", _ranks(out), None),
            figure("a plan for few nodes, process time", which, 1e3 * seconds, "ms", {}, 1000.0),
        ]
    return rows + _near_rows(load, sample, judges, topology, params, out, tries)


def _near_rows(
    load: Floats, sample: Routing, judges: Routing, topology: Topology, params: dict[str, object], out: Mapping[str, FanOut], tries: int
) -> list[Row]:
    near, seconds = timed(lambda: plan_near(load, sample, topology, n_groups=_GROUPS), min(tries, 3))
    require_valid(near.plan.slot_to_expert, EXPERTS, topology)
    which = params | {"choice": "near, token by token"}
    choice, first = near.choice, fan_out(near.choice.choose(judges), topology)
    block = judges.n_tokens // _CORRECTIONS
    for turn in range(_CORRECTIONS):
        loads = fan_out(choice.choose(judges.tokens(turn * block, (turn + 1) * block)), topology).loads
        choice = choice.corrected(loads, step=0.5 / (1 + turn / 2))
    last = fan_out(choice.choose(judges), topology)
    chance = fan_out(choose_even(judges, plan_static(load, topology).slot_to_expert), topology).imbalance.mean()
    return [
        figure("nodes a token", which, last.nodes.mean(), "nodes", _nodes(out), None),
        figure("ranks a token", which, last.ranks.mean(), "ranks", _ranks(out), None),
        figure(
            "largest over mean load of ranks by 8192 tokens, chance included",
            which,
            last.imbalance.mean(),
            "",
            {"before corrections": float(first.imbalance.mean()), "balance only": float(chance)},
            None,
        ),
        figure("a plan for near choice, process time", which, 1e3 * seconds, "ms", {}, None),
    ]


def slack_rows(*, tries: int, seed: int = 0, draws: int = 4) -> list[Row]:
    """Balance of batches whose experts differ from the planned load, when tokens fill replicas by load."""
    topology = Topology.even(n_slots=288, n_ranks=32)
    load = skewed_load(seed=seed) * 65536
    slack, seconds = timed(lambda: plan_slack(load, topology), tries)
    require_valid(slack.slot_to_expert, EXPERTS, topology)
    plain = plan_static(load, topology).slot_to_expert
    rows = []
    for noise in (0.1, 0.2, 0.3):
        random = np.random.default_rng(seed + 1)
        batches = [np.round(load * np.exp(noise * random.standard_normal(load.shape))) for _ in range(draws)]
        even = np.mean([_planned(slack.slot_to_expert, batch, topology).mean() for batch in batches])
        peers = {"even split": float(even), "filled, plan without slack": _filled(plain, batches, topology)}
        which: dict[str, object] = {"slots": 288, "ranks": 32, "layers": len(load), "noise": noise, "batches": draws, "seed": seed}
        target = 1.07 if noise == 0.2 else None
        rows.append(
            figure("largest over mean rank load of batches", which, _filled(slack.slot_to_expert, batches, topology), "", peers, target)
        )
    params: dict[str, object] = {"slots": 288, "ranks": 32, "layers": len(load), "seed": seed}
    balance = {"balance only": float(_planned(plain, load, topology).mean())}
    return [
        *rows,
        figure("largest over mean rank load, plan with slack", params, slack.imbalance.mean(), "", balance, None),
        figure("a plan with slack, process time", params, 1e3 * seconds, "ms", {}, 1000.0),
    ]


def rows(*, tries: int, proven: Mapping[str, Floats]) -> list[Row]:
    """All rows of locality and slack; no bounds are needed."""
    few = min(tries, 5)
    return [*locality_rows(tries=few), *slack_rows(tries=few)]


def _planned(slots: Ints, load: Floats, topology: Topology) -> Floats:
    return imbalance(rank_loads(slots, load, topology), topology)


def _filled(slots: Ints, batches: list[Floats], topology: Topology) -> float:
    fill = WaterFill(slots, EXPERTS, topology)
    splits = [fill.fill(batch).split for batch in batches]
    return float(
        np.mean([imbalance(rank_loads(slots, batch, topology, split), topology) for batch, split in zip(batches, splits, strict=True)])
    )


def _nodes(out: Mapping[str, FanOut]) -> dict[str, float]:
    return {name: float(each.nodes.mean()) for name, each in out.items()}


def _ranks(out: Mapping[str, FanOut]) -> dict[str, float]:
    return {name: float(each.ranks.mean()) for name, each in out.items()}
