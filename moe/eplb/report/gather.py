"""What a report shows, computed before anything is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..analysis import Analysis, analyze, halves
from ..api import make_plan
from ..assess import assess
from ..cost import CostModel
from ..metrics import Balance, balance
from ..plan import Floats, Plan, rank_loads
from ..replan.advise import Option, advise
from ..replan.coverage import Losses, losses
from ..replan.tradeoff import tradeoff
from ..simulation.outcome import Outcome
from ..simulation.published import published_plan
from ..simulation.replay import floor, simulate
from ..simulation.rules import POLICIES, Rules
from ..simulation.step import in_order
from ..topology import Ints, Topology
from ..trace import LoadTrace
from ..validate import check_complete

_POINTS = 14  # of the curve of bytes against balance
_FINE = 1.0005  # target of its last point: as even as can be
#: steps of progress of ``gather`` apart from those of the simulation
WORK = 4

Progress = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One way to answer a changed load: what it moves and what it reaches."""

    name: str  # for a legend
    label: str  # of the point
    bytes: int  # that all ranks receive
    imbalance: float  # mean over layers


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that the page draws."""

    trace: LoadTrace  # the load
    topology: Topology  # the machine
    cost: CostModel  # of a step
    analysis: Analysis  # of the load
    before: Plan  # what is placed
    before_name: str  # in words
    after: Plan  # the plan
    published: Plan | None  # the published algorithm's; None where it cannot plan for this machine
    balances: dict[str, Balance]  # of the ranks' loads under each of them
    loads: dict[str, Floats]  # [layers, ranks] the same loads
    lost: dict[str, Losses]  # experts lost with a rank or node, before and after
    trades: tuple[Point, ...]  # bytes against balance
    trades_about: str  # the change that they answer
    spares: tuple[Option, ...]  # redundancy against balance
    outcomes: tuple[Outcome, ...]  # of a simulation; empty for a trace of one step
    floor_seconds: float | None  # of a simulated step with perfect balance
    rules: Rules  # of the simulation


def gather(
    trace: LoadTrace,
    topology: Topology,
    *,
    before: Ints | None = None,
    before_name: str = "experts in order",
    after: Ints | None = None,
    rules: Rules | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Compute a report.

    Args:
        trace: the load; with two steps or more there is a simulation as well.
        topology: the machine.
        before: [layers, slots] what is placed; None: experts in order, spare slots empty.
        before_name: what to call it.
        after: [layers, slots] a plan to show; None: one is made from nothing.
        rules: of the simulation, and what steps cost.
        progress: called with 1 for each of ``WORK`` pieces, and for every simulated step.

    Raises:
        ValueError: load, machine and placements do not fit each other.
    """
    rules = rules or Rules()
    if before_name in ("plan", "EPLB"):
        before_name += ", before"
    plans = _plans(trace, topology, before, before_name, after, rules)
    progress(1)
    loads = {name: rank_loads(plan.slot_to_expert, trace.total.astype(np.float64), topology) for name, plan in plans.items()}
    trades, about = _trades(trace, topology, before, rules)
    progress(1)
    spares = _spares(trace, topology, rules)
    progress(1)
    found = analyze(trace, topology, cost=rules.cost)
    progress(1)
    return Report(
        trace=trace,
        topology=topology,
        cost=rules.cost,
        analysis=found,
        before=plans[before_name],
        before_name=before_name,
        after=plans["plan"],
        published=plans.get("EPLB"),
        balances={name: balance(one, topology) for name, one in loads.items()},
        loads=loads,
        lost={name: losses(plan.slot_to_expert, trace.n_experts, topology) for name, plan in plans.items()},
        trades=trades,
        trades_about=about,
        spares=spares,
        outcomes=_simulated(trace, topology, rules, progress),
        floor_seconds=floor(trace, topology, rules) if trace.n_steps > rules.interval else None,
        rules=rules,
    )


def _plans(trace: LoadTrace, topology: Topology, before: Ints | None, name: str, after: Ints | None, rules: Rules) -> dict[str, Plan]:
    """What is placed, under its name, the plan, and the published algorithm's if it can plan for this machine."""
    cost, load, steps = rules.cost, trace.total.astype(np.float64), float(trace.n_steps)
    held = in_order(len(load), trace.n_experts, topology) if before is None else before
    check_complete(held, trace.n_experts, topology, name)
    new = make_plan(load, topology, steps=steps, cost=cost).slot_to_expert if after is None else after
    check_complete(new, trace.n_experts, topology, "plan")
    plans = {
        name: assess(held, load, topology, cost=cost, steps=steps),
        "plan": assess(new, load, topology, cost=cost, steps=steps, previous=held),
    }
    peer = _published(load, topology, cost, steps, rules.n_groups)
    return plans if peer is None else plans | {"EPLB": peer}


def _published(load: Floats, topology: Topology, cost: CostModel, steps: float, n_groups: int) -> Plan | None:
    try:
        slots = published_plan(load, topology, n_groups=n_groups)
    except ValueError:
        return None
    return assess(slots, load, topology, cost=cost, steps=steps)


def _simulated(trace: LoadTrace, topology: Topology, rules: Rules, progress: Progress) -> tuple[Outcome, ...]:
    if trace.n_steps <= rules.interval:
        return ()
    names = [name for name in POLICIES if name != "eplb" or _can_publish(trace, topology, rules)]
    return tuple(simulate(trace, topology, names, rules=rules, progress=progress))


def _can_publish(trace: LoadTrace, topology: Topology, rules: Rules) -> bool:
    return _published(trace.total[:1].astype(np.float64), topology, rules.cost, 1.0, rules.n_groups) is not None


def _trades(trace: LoadTrace, topology: Topology, held: Ints | None, rules: Rules) -> tuple[tuple[Point, ...], str]:
    """Ways to answer a change of the load, and the change in words.

    With a placement that was given: from it to the load of the trace. Otherwise a plan from the first half meets the second half.
    """
    cost, load, steps = rules.cost, trace.total.astype(np.float64), float(trace.n_steps)
    about = "from the placement that was given to one for this load"
    if held is None:
        first, second = (half.astype(np.float64) for half in halves(trace))
        if trace.n_steps > 1 and first.any(1).all() and second.any(1).all():
            load, steps = second, float(trace.n_steps - trace.n_steps // 2)
            held = make_plan(first, topology, steps=float(trace.n_steps // 2), cost=cost).slot_to_expert
            about = "a plan from the first half of the trace meets the second half"
        else:
            held = in_order(len(load), trace.n_experts, topology)
            about = "from experts in order to a placement for this load"
    way = tradeoff(load, topology, held, steps=steps, target=_FINE, points=_POINTS, cost=cost)
    found = [Point(name="rorqual, re-plan", label=f"{one.moves:,} experts move", bytes=one.bytes, imbalance=one.imbalance) for one in way]
    found[0] = replace(found[0], label="nothing moves" if way[0].moves == 0 else found[0].label)
    others = {"rorqual, from nothing": make_plan(load, topology, steps=steps, cost=cost).slot_to_expert}
    peer = _published(load, topology, cost, steps, rules.n_groups)
    if peer is not None:
        others["EPLB"] = peer.slot_to_expert
    for name, slots in others.items():
        plan = assess(slots, load, topology, cost=cost, steps=steps, previous=held)
        label = f"{int(plan.moved.sum()):,} experts move"
        found.append(Point(name=name, label=label, bytes=plan.bytes_to_move, imbalance=float(plan.imbalance.mean())))
    return tuple(found), about


def _spares(trace: LoadTrace, topology: Topology, rules: Rules) -> tuple[Option, ...]:
    """Plans with more and fewer slots for replicas; only for a machine whose ranks are all alike and alive."""
    if topology.failed or topology.speeds is not None:
        return ()
    ranks, nodes = topology.n_ranks, topology.n_nodes
    fewest = -(-trace.n_experts // ranks) * ranks
    tried = sorted({fewest + more * ranks for more in range(5)} | {topology.n_slots})
    load, steps = trace.total.astype(np.float64), float(trace.n_steps)
    return advise(load, n_ranks=ranks, n_nodes=nodes, target=rules.target, slots=tried, steps=steps, cost=rules.cost).options
