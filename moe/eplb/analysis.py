"""Is a load uneven, does it stay so, and would a plan from the past have helped?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .assess import assess
from .cost import CostModel
from .metrics import Balance, balance, imbalance
from .plan import Floats, rank_loads
from .planner.static import plan_static
from .simulation.step import in_order
from .topology import Ints, Topology
from .trace import PHASES, LoadTrace


@dataclass(frozen=True, kw_only=True)
class Foresight:
    """A plan made from the first half of a trace, met by the second half. Imbalances are the mean over layers."""

    in_order: float  # of the second half with experts in order
    planned: float  # of the second half under the plan
    promised: float  # of the first half under the plan
    seconds_in_order: float  # predicted, of a mean step of the second half with experts in order
    seconds_planned: float  # the same under the plan


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What a load is like."""

    experts: dict[str, Balance]  # balance of experts: of all steps together, of single steps, of each phase and domain
    ranks: dict[str, Balance]  # balance of ranks with experts in order; empty without a machine
    layer_imbalance: Floats  # [layers] of the experts, all steps together
    hottest: Ints  # [layers, 8] experts with most choices, the hottest first
    hot_share: Floats  # [layers] part of all choices that the hottest take
    persistence: Floats | None  # [layers] part of the hottest of the first half that are the hottest of the second; None for one step
    chance: float  # what persistence would be if the hottest were any experts
    foresight: Foresight | None  # None for one step, or without a machine


def analyze(trace: LoadTrace, topology: Topology | None = None, *, cost: CostModel | None = None) -> Analysis:
    """Measure a load; with a machine also what it means for its ranks.

    Raises:
        ValueError: nothing was routed, or the experts do not fit.
    """
    total = trace.total
    if not total.any():
        raise ValueError("analyze: nothing was routed, all counts are zero; the recorder was off, or this is an empty window")
    hot = min(8, trace.n_experts)
    groups = _groups(trace)
    experts = {name: balance(trace.counts[steps].sum(0)) for name, steps in groups.items()}
    if trace.n_steps > 1:
        experts["single steps"] = balance(trace.counts)
    ranks: dict[str, Balance] = {}
    if topology is not None:
        placed = in_order(len(trace.layer_ids), trace.n_experts, topology)
        by_rank = np.stack([rank_loads(placed, counts.astype(np.float64), topology) for counts in trace.counts])
        ranks = {name: balance(by_rank[steps].sum(0), topology) for name, steps in groups.items()}
        if trace.n_steps > 1:
            ranks["single steps"] = balance(by_rank, topology)
    hottest = np.argsort(-total, axis=1, kind="stable")[:, :hot]
    whole = np.maximum(total.sum(1), 1)
    return Analysis(
        experts=experts,
        ranks=ranks,
        layer_imbalance=imbalance(total),
        hottest=hottest,
        hot_share=np.take_along_axis(total, hottest, axis=1).sum(1) / whole,
        persistence=_persistence(trace, hot) if trace.n_steps > 1 else None,
        chance=hot / trace.n_experts,
        foresight=_foresight(trace, topology, cost or CostModel()) if topology is not None and trace.n_steps > 1 else None,
    )


def _groups(trace: LoadTrace) -> dict[str, np.ndarray]:
    """Steps of the whole trace, of each phase and of each domain, where there are several."""
    groups: dict[str, np.ndarray] = {"all steps": np.arange(trace.n_steps)}
    if trace.phase is not None and len(set(trace.phase.tolist())) > 1:
        groups |= {f"phase {PHASES[p]}": np.flatnonzero(trace.phase == p) for p in np.unique(trace.phase).tolist()}
    if trace.domain is not None and len(set(trace.domain)) > 1:
        names = np.array(trace.domain)
        groups |= {f"domain {name}": np.flatnonzero(names == name) for name in dict.fromkeys(trace.domain)}
    return {name: steps for name, steps in groups.items() if trace.counts[steps].any()}


def halves(trace: LoadTrace) -> tuple[Ints, Ints]:
    """[layers, experts] counts of the first and of the second half of the steps."""
    middle = trace.n_steps // 2
    return trace.counts[:middle].sum(0), trace.counts[middle:].sum(0)


def _persistence(trace: LoadTrace, hot: int) -> Floats:
    before, after = (np.argsort(-half, axis=1, kind="stable")[:, :hot] for half in halves(trace))
    shared: Floats = (before[:, :, None] == after[:, None, :]).any(2).mean(1)
    return shared


def _foresight(trace: LoadTrace, topology: Topology, cost: CostModel) -> Foresight:
    first, second = (half.astype(np.float64) for half in halves(trace))
    steps = trace.n_steps - trace.n_steps // 2
    planned = plan_static(first, topology, cost=cost)
    later = assess(planned.slot_to_expert, second, topology, cost=cost, steps=steps)
    plain = assess(in_order(len(first), trace.n_experts, topology), second, topology, cost=cost, steps=steps)
    return Foresight(
        in_order=float(plain.imbalance.mean()),
        planned=float(later.imbalance.mean()),
        promised=float(planned.imbalance.mean()),
        seconds_in_order=plain.seconds,
        seconds_planned=later.seconds,
    )
