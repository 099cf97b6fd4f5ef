"""Straggler replay: the lists of all ranks run one after another on one device; the slowest is when the layer would end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....moe.eplb.api import make_plan
from ....moe.eplb.choice.water import water_fill
from ....moe.eplb.locality.routing import Routing
from ....moe.eplb.plan import Floats
from ....moe.eplb.planner.static import plan_static
from ....moe.eplb.simulation.published import published_plan
from ....moe.eplb.topology import Ints, Topology
from ..results import Row
from .rank_lists import RankList, choose_slots, rank_lists

Timer = Callable[[Callable[[], Any]], float]
#: placement -> what it is; those with "filled" split tokens by the load of the step itself
POLICIES = ("in order", "EPLB", "plan", "plan filled", "activated")


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """One layer under one policy."""

    policy: str
    layer: int
    tokens: Floats  # [ranks] choices
    activated: Floats  # [ranks] slots that got a token
    us: Floats  # [ranks] measured

    @property
    def imbalance(self) -> float:
        """Largest over mean of the ranks' choices."""
        return float(self.tokens.max() / max(self.tokens.mean(), 1e-9))


def place(policy: str, load: Floats, topology: Topology, *, steps: float = 1.0) -> tuple[Ints, Topology]:
    """Slots [layers, slots] and their topology: without replicas it has fewer slots.

    Args:
        policy: one of ``POLICIES``.
        load: [layers, experts] choices that the placement is planned for.
        topology: ranks and slots.
        steps: steps that the load is as much as; "activated" depends on how many choices one step has.

    Raises:
        ValueError: an unknown policy.
    """
    if policy == "in order":
        experts = load.shape[1]
        fewer = Topology.even(n_slots=experts, n_ranks=topology.n_ranks, n_nodes=topology.n_nodes)
        return np.tile(np.arange(experts), (len(load), 1)), fewer
    if policy == "EPLB":
        return published_plan(load, topology), topology
    if policy in ("plan", "plan filled"):
        return plan_static(load, topology).slot_to_expert, topology
    if policy == "activated":
        return make_plan(load, topology, objective="activated", steps=steps).slot_to_expert, topology
    raise ValueError(f"policy of the replay must be one of {', '.join(POLICIES)}, found {policy!r}")


def replay(
    policy: str,
    planned: Floats,
    routing: Routing,
    topology: Topology,
    run: Callable[[RankList], Callable[[], Any]],
    timer: Timer,
) -> list[Replayed]:
    """Every layer of ``routing`` under a placement that was planned for the load ``planned`` [layers, experts].

    Args:
        policy: one of ``POLICIES``.
        planned: the load as it was known before.
        routing: choices of the step.
        topology: ranks and slots.
        run: a rank's list -> a call that computes its experts.
        timer: microseconds of a call.
    """
    slots, machine = place(policy, planned, topology, steps=float(planned.sum() / routing.load.sum()))
    found = []
    for layer in range(routing.n_layers):
        shares = water_fill(routing.load[layer : layer + 1], slots[layer : layer + 1], machine)[0] if policy.endswith("filled") else None
        chosen = choose_slots(routing.ids[layer], slots[layer], routing.n_experts, machine, shares=shares)
        lists = rank_lists(chosen, machine)
        us = np.array([timer(run(part)) if len(part.slots) else 0.0 for part in lists])
        tokens, activated = (np.array([getattr(part, name) for part in lists], dtype=float) for name in ("n_tokens", "activated"))
        found.append(Replayed(policy=policy, layer=layer, tokens=tokens, activated=activated, us=us))
    return found


def rows_of(name: str, replayed: list[Replayed], params: dict[str, Any]) -> list[Row]:
    """A row for each policy: what the slowest rank of a layer takes, mean over layers; beside it the mean rank, which is even load."""
    rows = []
    for policy in dict.fromkeys(entry.policy for entry in replayed):
        mine = [entry for entry in replayed if entry.policy == policy]
        more = {
            "imbalance": round(float(np.mean([entry.imbalance for entry in mine])), 3),
            "activated": round(float(np.mean([entry.activated.max() for entry in mine])), 1),
        }
        rows.append(
            Row(
                name=f"experts of the slowest rank, {name}, {policy}", params={**params, **more},
                value=float(np.mean([entry.us.max() for entry in mine])), unit="us", better="lower",
                peers={"mean rank": float(np.mean([entry.us.mean() for entry in mine]))},
            )
        )  # fmt: skip
    return rows


def fitted_rows(name: str, replayed: list[Replayed], params: dict[str, Any]) -> list[Row]:
    """Nanoseconds of a token and of an activated expert in these lists (least squares, one by one): where one of them explains nearly
    all, the step is bound by it, and this is what ``CostModel`` wants to be told.

    There is no row where lists do not differ in it, or where more of it takes no longer: that is noise, not a time.
    """
    tokens, activated, us = (np.concatenate([getattr(entry, what) for entry in replayed]) for what in ("tokens", "activated", "us"))
    ran = tokens > 0  # a rank without tokens launches nothing: its 0 us do not belong on the line
    rows = []
    for what, count in (("a token", tokens[ran]), ("an activated expert", activated[ran])):
        if len(count) < 2 or np.ptp(count) == 0:
            continue
        slope, start = np.polyfit(count, us[ran], 1)
        if slope <= 0:
            continue
        part = float(np.corrcoef(count, us[ran])[0, 1] ** 2)
        rows.append(
            Row(
                name=f"time of {what}, {name}", params={**params, "explains": round(part, 3), "fixed_us": round(float(start), 1)},
                value=1e3 * float(slope), unit="ns", better="lower",
            )
        )  # fmt: skip
    return rows


def host_timer(call: Callable[[], Any]) -> float:
    """Microseconds on the CPU: the quickest of three."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return 1e6 * best


def runner(ops: Any, experts: Any, x: torch.Tensor) -> Callable[[RankList], Callable[[], Any]]:
    """Calls that compute a rank's list with ``ops.fused_experts`` on rows of ``x`` [most rows, hidden]."""

    def run(part: RankList) -> Callable[[], Any]:
        slots = part.slots.to(x.device)
        weights = torch.full(slots.shape, 1.0 / slots.shape[1], device=x.device)
        rows = x[: len(slots)]
        return lambda: ops.fused_experts(rows, slots, weights, experts, n_rows=part.n_tokens, out_dtype=x.dtype)

    return run
