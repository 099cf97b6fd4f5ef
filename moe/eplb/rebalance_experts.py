"""The call that users of DeepSeek's EPLB make, answered by this planner."""

from __future__ import annotations

import numpy as np
import torch

from .planner.static import plan_static
from .topology import Ints, Topology


def rebalance_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Placement of experts for a load, with the signature, shapes and dtypes of EPLB's function.

    Experts may be on any GPU: ``num_groups`` is taken and not used, as staying within a group's node costs more balance than it
    saves (``plan_local`` weighs both). Slots that cannot be divided by the GPUs are allowed: the first GPUs have one more.

    Args:
        weight: [layers, logical experts] load, any number type, any device.
        num_replicas: physical slots.
        num_groups: expert groups of the gate.
        num_nodes: server nodes.
        num_gpus: ranks.

    Returns:
        phy2log [layers, slots] int64: expert of each slot; log2phy [layers, experts, most replicas] int64: slots of each expert, padded
        with -1; logcnt [layers, experts] int64: replicas of each. All on the CPU. No GPU has an expert twice, except in slots for
        which there is no other expert: where slots outnumber experts * GPUs.

    Raises:
        ValueError: fewer slots than experts, sizes that do not fit, or a load with impossible values.
    """
    del num_groups
    load = weight.detach().to("cpu", torch.float64).numpy()
    topology = Topology.even(n_slots=num_replicas, n_ranks=num_gpus, n_nodes=num_nodes)
    slots = _filled(plan_static(load, topology, may_empty=False).slot_to_expert, topology)
    where, counts = expert_to_slots(slots, load.shape[1])
    return torch.from_numpy(slots), torch.from_numpy(where), torch.from_numpy(counts)


def _filled(slots: Ints, topology: Topology) -> Ints:
    """No slot empty: what is left repeats an expert of its rank, as EPLB's callers expect an expert in every slot."""
    for layer, slot in np.argwhere(slots < 0):
        first = topology.first_slot[topology.rank_of_slot[slot]]
        slots[layer, slot] = slots[layer, first]
    return slots


def expert_to_slots(slot_to_expert: Ints, n_experts: int) -> tuple[Ints, Ints]:
    """[layers, slots] -> slots of each expert [layers, experts, most replicas], padded with -1, and replicas [layers, experts]."""
    layers, n_slots = slot_to_expert.shape
    order = np.argsort(slot_to_expert, axis=1, kind="stable")
    sorted_experts = np.take_along_axis(slot_to_expert, order, axis=1)
    counts = np.zeros((layers, n_experts + 1), dtype=np.int64)
    np.add.at(counts, (np.arange(layers)[:, None], slot_to_expert), 1)
    first = np.concatenate([counts[:, -1:], counts[:, -1:] + counts[:, :-1].cumsum(1)], axis=1)  # empty slots sort first
    turn = np.arange(n_slots)[None] - np.take_along_axis(first, np.maximum(sorted_experts, 0), axis=1)
    where = np.full((layers, n_experts, max(int(counts[:, :-1].max(initial=1)), 1)), -1, dtype=np.int64)
    layer, place = np.nonzero(sorted_experts >= 0)
    where[layer, sorted_experts[layer, place], turn[layer, place]] = order[layer, place]
    return where, counts[:, :-1]
