"""What nodes a token cost in balance: plans of several weights, judged by tokens that they were not made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import Floats, Plan
from ..topology import Topology
from .fan_out import choose_even, fan_out
from .routing import Routing
from .soft import plan_local

WEIGHTS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class NodeTrade:
    """A point between few nodes a token and balance; means over layers."""

    weight: float  # imbalance that one node less a token was worth
    imbalance: float  # largest over mean rank load
    worst: float  # the same of the worst layer
    nodes: float  # nodes that a token touches
    remote_nodes: float  # of them other than the token's own
    ranks: float  # ranks that a token touches
    plan: Plan  # how to get it


def pareto(
    load: Floats, routing: Routing, topology: Topology, *, weights: Sequence[float] = WEIGHTS, n_groups: int = 1
) -> tuple[NodeTrade, ...]:
    """Balance against nodes a token, by the one weight of ``plan_local``.

    Args:
        load: [layers, experts] tokens routed to each expert.
        routing: the first half of its tokens judges, the second half is planned with.
        topology: with its nodes.
        weights: one plan each.
        n_groups: of the gate; 1 if it has none.

    Returns:
        A point for each weight, the most balanced first. Points that another one beats in both ways are left out.

    Raises:
        ValueError: as ``plan_local``, or fewer than two tokens.
    """
    half = routing.n_tokens // 2
    if half < 1:
        raise ValueError(f"pareto: routing has {routing.n_tokens} tokens; give two or more, as one half judges the other")
    judges, sample = routing.tokens(0, half), routing.tokens(half)
    trades = []
    for weight in weights:
        plan = plan_local(load, sample, topology, weight=weight, n_groups=n_groups)
        out = fan_out(choose_even(judges, plan.slot_to_expert), topology)
        trades.append(
            NodeTrade(
                weight=weight,
                imbalance=float(plan.imbalance.mean()),
                worst=float(plan.imbalance.max()),
                nodes=float(out.nodes.mean()),
                remote_nodes=float(out.remote_nodes.mean()),
                ranks=float(out.ranks.mean()),
                plan=plan,
            )
        )
    trades.sort(key=lambda trade: (trade.imbalance, trade.nodes))
    best = [trade for n, trade in enumerate(trades) if all(trade.nodes < other.nodes for other in trades[:n])]
    return tuple(best)
