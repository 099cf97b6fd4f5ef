"""Why an expert has the replicas that a plan gives it."""

from __future__ import annotations

import numpy as np

from .plan import Floats, Plan, rank_loads


def explain(plan: Plan, load: Floats, expert: int, *, layer: int = 0) -> str:
    """Some lines on one expert of one layer: its replicas, who they share a rank with, and why it has not one more.

    Args:
        plan: any.
        load: [layers, experts] that it was made for.
        expert: of that layer.
        layer: place of the layer in the plan.

    Raises:
        ValueError: no such layer or expert.
    """
    if not (0 <= layer < plan.n_layers and 0 <= expert < plan.n_experts):
        raise ValueError(f"no expert {expert} in layer {layer}: the plan has {plan.n_layers} layers of {plan.n_experts} experts")
    topology, slots = plan.topology, plan.slot_to_expert[layer]
    weight = np.asarray(load, dtype=np.float64)[layer]
    places = np.flatnonzero(slots == expert)
    counts = np.bincount(slots[slots >= 0], minlength=plan.n_experts)
    loads = rank_loads(slots[None], weight[None], topology)[0]
    order = (-weight).argsort(kind="stable")
    share = weight[expert] / max(weight.mean(), 1e-300)
    at = int((order == expert).argmax()) + 1
    lines = [
        f"layer {layer}, expert {expert}: load {weight[expert]:g}, {share:.2f} times the mean, number {at} of {plan.n_experts}; "
        f"{len(places)} replicas of {weight[expert] / max(len(places), 1):g} each"
    ]
    for place in places:
        rank = int(topology.rank_of_slot[place])
        beside = [int(other) for other in slots[topology.rank_of_slot == rank] if other not in (expert, -1)]
        lines.append(f"  slot {place}: rank {rank}, node {topology.nodes[rank]}, load of the rank {loads[rank]:g}, with experts {beside}")
    lines.append("  " + _why_not_more(weight, counts, expert, topology.n_ranks - len(topology.failed)))
    return "\n".join(lines)


def _why_not_more(weight: Floats, counts: np.ndarray, expert: int, ranks: int) -> str:
    """The reason that the expert has no further replica."""
    if counts[expert] >= ranks:
        return "it is on every usable rank"
    each = weight / np.maximum(counts, 1)
    others = np.flatnonzero((counts > 1) & (np.arange(len(weight)) != expert))
    if not len(others):
        return "no other expert has a replica to spare: more slots would be needed"
    # taking one from the other leaves it with more per replica than this expert has now?
    relief = weight[others] / (counts[others] - 1)
    best = int(others[relief.argmin()])
    if relief.min() >= each[expert]:
        return (
            f"a slot taken from expert {best}, which needs its replicas least, would leave that one {relief.min():g} a replica: "
            f"more than the {each[expert]:g} that a replica of this one has"
        )
    return (
        f"a slot taken from expert {best} would leave that one {relief.min():g} a replica, less than the {each[expert]:g} here; "
        "but ranks are balanced by what shares a rank with it"
    )
