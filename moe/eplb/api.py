"""The planner's entry: where the experts of all layers shall live, given a load and where they live now."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .assess import assess
from .cost import CostModel
from .locality.routing import Routing
from .locality.soft import plan_local
from .metrics import imbalance
from .plan import Floats, Plan, rank_loads
from .planner.bounds import bounds
from .planner.objective import Objective
from .planner.seats import Seats
from .planner.slack import plan_slack
from .planner.static import check_room, checked_load, keep_slots, plan_static
from .replan.coverage import can_cover, groups_of, mend
from .replan.decide import Decision, decide
from .replan.incremental import search
from .replan.state import Bools, holdings
from .topology import Ints, Topology
from .validate import validate

_FINE = 1.0005  # how near the best score a plan from nothing is refined to


def make_plan(
    load: Floats,
    topology: Topology,
    *,
    previous: Plan | Ints | None = None,
    objective: str = "tokens",
    steps: float = 1.0,
    budget_bytes: int | None = None,
    horizon_steps: int | None = None,
    target: float = 1.02,
    coverage: str = "any",
    cost: CostModel | None = None,
    routing: Routing | None = None,
    n_groups: int = 1,
    weight: float = 0.3,
) -> Plan:
    """Plan the placement of experts: from nothing, or from a previous one with as few moves as the target needs.

    Args:
        load: [layers, experts] routed choices (tokens x top_k in all) of each expert; finite, none negative.
        topology: ranks, slots, nodes, failed ranks.
        previous: what the slots hold now, a plan or [layers, slots] with -1 for empty, of a topology with the same slots. None: nothing
            yet. Slots of ranks that have failed since count as empty.
        objective: what the slowest rank of a layer has least of: "tokens", "activated" experts, or "seconds" of the cost model. "slack":
            tokens of batches that differ from the load, where replicas are filled by load (``plan_slack``); a re-plan is by tokens.
            "nodes": tokens, and nodes that a token touches (``plan_local``); from nothing only.
        steps: steps that ``load`` sums over: load / steps is what one step routes. All but the objective "tokens" depend on it.
        budget_bytes: that all ranks together may receive in this change. What a valid map and coverage need is received even if it is
            more.
        horizon_steps: steps that the plan is expected to serve. With it nothing moves that does not pay: seconds gained in so many steps
            against seconds of moving. None: moving is not weighed against the gain.
        target: a re-plan ends when the score of no rank of a layer is above this multiple of the best that the layer can have.
        coverage: "ranks" or "nodes": every expert on two of them where slots allow; "any": replicas where they are best.
        cost: prices of tokens, experts and moves.
        routing: for "nodes": choices of some thousand tokens.
        n_groups: for "nodes": groups of the gate.
        weight: for "nodes": imbalance that one node less a token is worth.

    Raises:
        ValueError: load, topology and previous placement do not fit each other, or a choice that there is not; with the fix.
    """
    load, cost = checked_load(load), cost or CostModel()
    if not 0 < steps < float("inf") or not 1 <= target < float("inf"):
        raise ValueError(f"steps must be above 0 and target 1 or more, both finite, found steps={steps} and target={target}")
    if (horizon_steps is not None and horizon_steps < 0) or (budget_bytes is not None and budget_bytes < 0):
        raise ValueError(f"horizon_steps and budget_bytes must be 0 or more, found {horizon_steps} and {budget_bytes}")
    groups_of(coverage, topology)
    if objective == "nodes":
        if previous is not None or routing is None or coverage != "any":
            raise ValueError('objective "nodes" plans from nothing: it needs routing=.., and takes neither previous=.. nor coverage=..')
        return plan_local(load, routing, topology, weight=weight, n_groups=n_groups, cost=cost, steps=steps)
    if objective == "slack" and previous is None:
        return _with_slack(load, topology, steps, coverage, cost)
    objective = "tokens" if objective == "slack" else objective
    aim = Objective(kind=objective, cost=cost)
    check_room(Seats(topology=topology, n_experts=load.shape[1]))
    if previous is None:
        return _from_nothing(load, topology, aim, steps, coverage, cost)
    before = held_slots(previous, load, topology)
    return _from_before(before, load, topology, aim, steps, coverage, cost, target, budget_bytes, horizon_steps)


def held_slots(previous: Plan | Ints, load: Floats, topology: Topology) -> Ints:
    """[layers, slots] what the slots hold now, those of failed ranks empty.

    Raises:
        ValueError: another number of layers or slots than load and topology have, or experts that there are not.
    """
    slots = np.asarray(previous.slot_to_expert if isinstance(previous, Plan) else previous)
    if slots.shape != (len(load), topology.n_slots):
        raise ValueError(
            f"previous placement is {list(slots.shape)} and load and topology ask for [{len(load)}, {topology.n_slots}]; "
            "without previous=.. a plan from nothing is made"
        )
    slots = np.where(topology.usable, slots, -1).astype(np.int64)
    wrong = [problem for problem in validate(slots, load.shape[1], topology, duplicates=False) if "has no slot" not in problem]
    if wrong:
        raise ValueError(f"previous placement: {wrong[0]}")
    return slots


def had_by_ranks(before: Ints, n_experts: int, topology: Topology) -> Bools:
    """[layers, ranks, experts + 1] whether a rank holds an expert; everyone has the last one, which an empty slot holds."""
    had = holdings(np.where(before < 0, n_experts, before), topology.rank_of_slot, topology.n_ranks, n_experts + 1) > 0
    had[..., n_experts] = True
    return had


def _from_nothing(load: Floats, topology: Topology, aim: Objective, steps: float, coverage: str, cost: CostModel) -> Plan:
    """The global planner's map, spread and refined for objectives and coverage that it does not know."""
    experts = load.shape[1]
    twice = can_cover(experts, coverage, topology)
    plan = plan_static(load, topology, cost=cost, steps=steps, least_replicas=2 if twice else 1)
    slots = mend(plan.slot_to_expert, load, topology, coverage)
    if aim.kind == "tokens" and (slots == plan.slot_to_expert).all():
        return plan
    nobody = np.zeros((len(load), topology.n_ranks, experts + 1), dtype=bool)
    limit = aim.mean(load / steps, topology) * (np.maximum(plan.imbalance, _FINE) if aim.kind == "tokens" else _FINE)
    path = search(load / steps, topology, slots, had=nobody, objective=aim, limit=limit, spread=coverage)
    wide = f", experts on two {coverage} where slots allow" if coverage != "any" else ""
    reason = f"planned from nothing for the fewest {aim.kind} on the slowest rank{wide}"
    return assess(path.slots[path.best()], load, topology, cost=cost, steps=steps, reason=reason)


def _from_before(
    before: Ints, load: Floats, topology: Topology, aim: Objective, steps: float, coverage: str, cost: CostModel, target: float,
    budget_bytes: int | None, horizon_steps: int | None,
) -> Plan:  # fmt: skip
    """What the ranks hold, changed by as few moves as the target needs and the budget and the horizon allow."""
    start = mend(before, load, topology, coverage)
    had = had_by_ranks(before, load.shape[1], topology)
    known = bounds(load, topology)
    limit = aim.mean(load / steps, topology) * target * (known.partner if aim.kind == "tokens" else 1.0)
    path = search(load / steps, topology, start, had=had, objective=aim, limit=limit, spread=coverage)
    choice = decide(path, load / steps, topology, had=had, cost=cost, budget_bytes=budget_bytes, horizon_steps=horizon_steps)
    slots = _in_their_places(before, choice.slots, topology)
    kept = (slots == before).all(1).astype(np.int64)
    plan = assess(slots, load, topology, cost=cost, steps=steps, previous=before, known_bounds=known, kept=kept)
    above = int((aim.scores(slots, load / steps, topology).max(1) > limit * (1 + 1e-9)).sum())
    return replace(plan, reason=_reason(plan, choice, before, load, horizon_steps, above))


def _with_slack(load: Floats, topology: Topology, steps: float, coverage: str, cost: CostModel) -> Plan:
    """The map with slack, spread for a coverage that it does not know."""
    twice = can_cover(load.shape[1], coverage, topology)
    plan = plan_slack(load, topology, cost=cost, steps=steps, least_replicas=2 if twice else 1)
    slots = mend(plan.slot_to_expert, load, topology, coverage)
    if (slots == plan.slot_to_expert).all():
        return plan
    return assess(slots, load, topology, cost=cost, steps=steps, reason=f"{plan.reason}, experts on two {coverage} where slots allow")


def _in_their_places(before: Ints, after: Ints, topology: Topology) -> Ints:
    """The map with experts that stay on a rank in the slots they had."""
    changed = np.flatnonzero((before != after).any(1))
    result = after.copy()
    result[changed] = keep_slots(before[changed], after[changed], topology)
    return result


def _reason(plan: Plan, choice: Decision, before: Ints, load: Floats, horizon_steps: int | None, above: int) -> str:
    """One line: what moves, what it gains, and why not more."""
    was = "" if choice.needed else f"{imbalance(rank_loads(before, load, plan.topology), plan.topology).mean():.4f} -> "
    balance = f"imbalance {was}{plan.imbalance.mean():.4f} (worst layer {plan.imbalance.max():.4f})"
    why = choice.declined or (f"no change helps {above} layers, which stay above the target" if above else "")
    if not choice.moves and plan.kept.all():
        return f"nothing moves: {why or 'no rank is above the target'}; {balance}"
    what = (
        f"{choice.moves} experts move ({plan.bytes_to_move / 1e9:.3g} GB, {choice.move_seconds:.3g} s)"
        if choice.moves
        else "replicas are given up"
    )
    text = f"{what} in {int((plan.kept == 0).sum())} of {plan.n_layers} layers"
    if choice.needed:
        text += f", {choice.needed} of them because no slot held them or for coverage"
    text += f": {balance}, {choice.gain_seconds * 1e3:.3g} ms a step gained"
    if horizon_steps is not None and choice.gain_seconds > 0:
        text += f", paid back after {choice.move_seconds / choice.gain_seconds:.0f} of {horizon_steps} steps"
    return text + (f"; {why}" if why else "")
