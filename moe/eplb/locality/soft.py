"""A soft hierarchical plan: nodes that tokens touch against balance, by one weight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..assess import assess
from ..cost import CostModel
from ..metrics import imbalance
from ..plan import Floats, Plan, rank_loads
from ..planner.static import keep_slots, plan_static
from ..topology import Ints, Topology
from .coactivation import coactivation, gather
from .fan_out import choose_even, fan_out
from .homes import Choices, Homes
from .nodes import Nodes, pack_nodes, replicate_within
from .parts import Parts, start_homes
from .routing import Routing
from .settle import Rooms, settle
from .task import Task

JUDGES = 512  # tokens that judge whether the search did better than balance alone


def plan_local(
    load: Floats,
    routing: Routing,
    topology: Topology,
    *,
    weight: float = 0.3,
    n_groups: int = 1,
    cost: CostModel | None = None,
    steps: float = 1.0,
    previous: Ints | None = None,
) -> Plan:
    """Place experts such that tokens touch few nodes and ranks are balanced, with even use of an expert's replicas.

    Experts start on nodes group by group, as the gate's groups are chosen whole, and move one by one where that lessens (largest node
    load over the mean) + weight * (nodes a token). Replicas of an expert stay on its node. Within a node only balance counts.

    Args:
        load: [layers, experts] tokens routed to each expert, over as long a time as the plan shall serve.
        routing: choices of some thousand tokens of these layers; the last ones are looked at.
        topology: with its nodes.
        weight: imbalance (max / mean) that one node less a token is worth: 0 only balances, above 1 comes near to whole groups.
        n_groups: of the gate; 1 if it has none or they are not known: then co-activation finds what goes together, less well.
        cost: for the predicted seconds and bytes.
        steps: steps that the load sums over, for the predicted seconds of one.
        previous: [layers, slots] map that the ranks hold now, for ``moved``.

    Raises:
        ValueError: load, routing and topology do not fit each other, or a weight below zero.
    """
    task = Task.of(load, routing, topology, weight=weight, n_groups=n_groups)
    load, sample, nodes = task.load, task.sample, task.nodes
    live = settle_nodes(load, sample, nodes, weight, task.block)
    slots = pack_nodes(live.load, replicate_within(live.load, live.copies, nodes), nodes)
    if weight > 0:
        slots = gather(slots, coactivation(sample), load, topology)
    slots = _better(slots, plan_static(load, topology).slot_to_expert, load, sample, topology, weight)
    if previous is not None:
        slots = keep_slots(previous, slots, topology)
    reason = f"planned for few nodes a token (weight {weight:g})"
    return assess(slots, load, topology, cost=cost, steps=steps, previous=previous, reason=reason)


def _better(slots: Ints, balanced: Ints, load: Floats, sample: Routing, topology: Topology, weight: float) -> Ints:
    """Of each layer the better by the weight: on nodes with few slots for each rank, balance may not leave room for anything else."""
    few = sample.tokens(max(0, sample.n_tokens - JUDGES))
    cost = [
        imbalance(rank_loads(way, load, topology), topology) + weight * fan_out(choose_even(few, way), topology).nodes
        for way in (slots, balanced)
    ]
    return np.where((cost[1] < cost[0])[:, None], balanced, slots)


@dataclass(frozen=True, kw_only=True)
class Residents:
    """Which experts live on which node."""

    load: Floats  # [layers, nodes, experts] that an expert brings to a node; layers sum to 1
    copies: Ints  # [layers, nodes, experts] 1 where an expert lives


def settle_nodes(load: Floats, sample: Routing, nodes: Nodes, weight: float, block: Ints) -> Residents:
    """Experts to nodes; an expert that is too hot for one node is several, among which its tokens are dealt.

    Load [layers, experts]; block [layers, experts] which experts start together, as ``communities.blocks`` has it.
    """
    layers, experts = load.shape
    share = load / np.maximum(load.sum(1, keepdims=True), 1e-300)
    parts = Parts.of(share, nodes)
    homes = Homes(Choices.of(parts.ids(sample.ids), parts.owner.shape[1]), start_homes(parts, nodes, block), nodes.n)
    settle(homes, Rooms(load=parts.load, size=parts.size, share=nodes.share, slots=nodes.slots), weight)
    brought = np.zeros((layers, nodes.n, experts + 1))
    lives = np.zeros((layers, nodes.n, experts + 1), dtype=np.int64)
    at = np.arange(layers)[:, None]
    np.add.at(brought, (at, homes.home[:, :-1], parts.owner), parts.load)
    lives[at, homes.home[:, :-1], parts.owner] = 1
    return Residents(load=brought[:, :, :-1], copies=lives[:, :, :-1])
