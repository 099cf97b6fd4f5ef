"""A placement for locality-aware choice: hot experts on several nodes, so that a token finds them on the nodes that it goes to anyway."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..assess import assess
from ..cost import CostModel
from ..plan import Floats, Plan
from ..planner.replicate import share_out
from ..planner.static import keep_slots
from ..topology import Ints, Topology
from .coactivation import coactivation, gather
from .homes import Choices, Homes
from .near import NearChoice, learn_prices
from .nodes import Nodes, pack_nodes, replicate_within
from .parts import Parts, start_homes
from .routing import Routing
from .settle import Rooms, settle
from .task import TOKENS, Task

FILL = 0.6  # of a rank's fair share that a replica should bring
EVEN = 1.0  # of an expert's tokens that a node must have more than another whose load is higher by its fair share

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class NearPlan:
    """A plan that holds with its choice of replicas: both travel together."""

    plan: Plan  # its imbalance is that of the choice, as learned from the sample
    choice: NearChoice


def plan_near(
    load: Floats,
    routing: Routing,
    topology: Topology,
    *,
    weight: float = 0.3,
    n_groups: int = 1,
    cost: CostModel | None = None,
    steps: float = 1.0,
    previous: Ints | None = None,
) -> NearPlan:
    """Place experts for a choice of replicas token by token.

    Experts that are worth several replicas get them on different nodes: those whose tokens go there anyway. Where the others live
    decides which nodes a token touches, so they are placed for that (as in ``plan_local``). Then prices balance the nodes, experts
    are packed on ranks by what the choice brings to each node, and prices balance the ranks.

    Args:
        load: [layers, experts] tokens routed to each expert, over as long a time as the plan shall serve.
        routing: choices of some thousand tokens of these layers; the last ones are looked at.
        topology: with its nodes.
        weight: imbalance (max / mean) of the nodes that one node less a token is worth.
        n_groups: of the gate; 1 if it has none.
        cost: for the predicted seconds and bytes.
        steps: steps that the load sums over, for the predicted seconds of one.
        previous: [layers, slots] map that the ranks hold now, for ``moved``.

    Raises:
        ValueError: load, routing and topology do not fit each other, or a weight below zero.
    """
    task = Task.of(load, routing, topology, weight=weight, n_groups=n_groups)
    load, sample, nodes = task.load, task.sample, task.nodes
    counts, _ = share_out(load, int(nodes.slots.sum()), most=nodes.n_ranks)
    home, on_node = _homes(load, sample, nodes, counts == 1, weight, task.block)
    copies = _spread(load, sample, nodes, counts, home, on_node)
    brought = _brought(load, sample, nodes, copies)
    copies = replicate_within(brought, copies, nodes)
    slots = pack_nodes(brought, copies, nodes)
    each = brought / np.maximum(copies, 1)
    split = np.where(slots < 0, 0.0, each[np.arange(len(load))[:, None], nodes.of_slot, slots])
    slots = gather(slots, coactivation(sample), load, topology, split=split)
    if previous is not None:
        slots = keep_slots(previous, slots, topology)
    choice = NearChoice(slot_to_expert=slots, n_experts=load.shape[1], topology=topology, price=np.zeros(slots.shape))
    choice, split = learn_prices(choice, load, sample)
    plan = assess(
        slots, load, topology, cost=cost, steps=steps, previous=previous, split=split, reason="planned for choice of near replicas"
    )
    return NearPlan(plan=plan, choice=choice)


def _homes(load: Floats, sample: Routing, nodes: Nodes, single: Bools, weight: float, block: Ints) -> tuple[Ints, Bools]:
    """[layers, experts] node of experts that have one replica, and [layers, tokens, nodes] where they make tokens go."""
    layers = np.arange(len(load))[:, None, None]
    bound = np.concatenate([single, np.zeros((len(load), 1), dtype=bool)], axis=1)
    ids = np.where(bound[layers, sample.ids], sample.ids, -1)
    alone = np.where(single, load, 0.0)
    parts = Parts.of(alone / np.maximum(alone.sum(1, keepdims=True), 1e-300), nodes, whole=True)
    homes = Homes(Choices.of(ids, load.shape[1]), start_homes(parts, nodes, block), nodes.n)
    settle(homes, Rooms(load=parts.load, size=parts.size, share=nodes.share, slots=nodes.slots), weight)
    return homes.home[:, :-1], homes.count[:, :, :-1] > 0


def _spread(load: Floats, sample: Routing, nodes: Nodes, counts: Ints, home: Ints, on_node: Bools) -> Ints:
    """[layers, nodes, experts] 1 where an expert lives: replicas go where most of its tokens are that no replica of it has met yet."""
    layers, experts = load.shape
    copies = np.zeros((layers, nodes.n, experts), dtype=np.int64)
    choices = Choices.of(sample.ids, experts)
    share = load / np.maximum(load.sum(1, keepdims=True), 1e-300)
    for layer in range(layers):
        single = np.flatnonzero(counts[layer] == 1)
        copies[layer, home[layer, single], single] = 1
        free = nodes.slots - copies[layer].sum(1)
        busy = (copies[layer] * share[layer]).sum(1) / nodes.share
        hot = np.flatnonzero(counts[layer] > 1)
        for expert in hot[np.argsort(-load[layer, hot], kind="stable")]:
            first, last = choices.start[layer, expert], choices.start[layer, expert + 1]
            unmet = on_node[layer, choices.order[layer, first:last]]
            for _ in range(min(int(counts[layer, expert]), nodes.n)):
                meets = unmet.sum(0) / max(last - first, 1) - EVEN * busy
                meets[(free <= 0) | (copies[layer, :, expert] > 0)] = -np.inf
                node = int(meets.argmax())
                if not np.isfinite(meets[node]):
                    break
                copies[layer, node, expert] = 1
                free[node] -= 1
                busy[node] += share[layer, expert] / counts[layer, expert] / nodes.share[node]
                unmet = unmet[~unmet[:, node]]
    return copies


def _brought(load: Floats, sample: Routing, nodes: Nodes, copies: Ints) -> Floats:
    """[layers, nodes, experts] load that the choice brings to each node, when the nodes are balanced by prices."""
    layers, _, experts = copies.shape
    width = copies.sum(2).max(0)
    machine = Topology(slots=tuple(width.tolist()), nodes=tuple(range(nodes.n)), speeds=tuple(nodes.share.tolist()))
    order = np.argsort(-copies, axis=2, kind="stable")
    slots = np.concatenate(
        [np.where(np.take_along_axis(copies, order, 2) > 0, order, -1)[:, n, : width[n]] for n in range(nodes.n)], axis=1
    )
    choice = NearChoice(slot_to_expert=slots, n_experts=experts, topology=machine, price=np.zeros(slots.shape), rank_weight=0.0)
    fair = np.maximum(load / np.maximum(copies.sum(1), 1) * 1.1, FILL * load.sum(1, keepdims=True) / nodes.n_ranks)
    most = np.where(slots < 0, np.inf, fair[np.arange(layers)[:, None], slots])
    _, split = learn_prices(choice, load, sample.tokens(max(0, sample.n_tokens - TOKENS // 2)), most=np.maximum(most, 1e-300))
    brought = np.zeros((layers, nodes.n, experts + 1))
    brought[np.arange(layers)[:, None], machine.rank_of_slot, slots] = split  # an empty slot writes nothing to the column that is cut off
    return brought[:, :, :-1]
