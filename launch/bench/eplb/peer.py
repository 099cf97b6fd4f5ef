"""DeepSeek's EPLB as its description tells it, in plain loops: the peer of the planners here, and what their tests hold them against."""

from __future__ import annotations

import numpy as np

from ....moe.eplb.plan import Floats
from ....moe.eplb.topology import Ints


def eplb(load: Floats, *, n_slots: int, n_groups: int, n_nodes: int, n_ranks: int) -> Ints:
    """[layers, experts] -> [layers, slots] expert of each slot; slots of a rank are neighbours.

    Where the groups can be shared out evenly to the nodes, an expert and its replicas stay on the node of its group (hierarchical);
    otherwise any rank may hold any expert (global). Slots must divide by ranks, ranks by nodes, experts by groups.

    Raises:
        ValueError: they do not.
    """
    experts = load.shape[1]
    if n_slots % n_ranks or n_ranks % n_nodes or experts % n_groups or n_slots < experts:
        raise ValueError(
            f"EPLB needs slots % ranks, ranks % nodes and experts % groups to be 0 and slots >= experts, found {n_slots} slots, "
            f"{n_ranks} ranks, {n_nodes} nodes, {experts} experts, {n_groups} groups"
        )
    if n_groups % n_nodes:
        n_groups = n_nodes = 1
    return np.array([_layer(row.tolist(), n_slots, n_groups, n_nodes, n_ranks) for row in load], dtype=np.int64)


def replicate(load: list[float], n_slots: int) -> list[int]:
    """Expert of each slot: one each, then every further slot to the expert whose replicas carry most."""
    counts, holders = [1] * len(load), list(range(len(load)))
    for _ in range(n_slots - len(load)):
        expert = max(range(len(load)), key=lambda e: load[e] / counts[e])
        counts[expert] += 1
        holders.append(expert)
    return holders


def pack(load: list[float], n_packs: int) -> list[list[int]]:
    """Items of each pack, as many in each: the heaviest first, each into the lightest pack that is not full."""
    size = len(load) // n_packs
    if size == 1:
        return [[item] for item in range(len(load))]
    packs: list[list[int]] = [[] for _ in range(n_packs)]
    carried = [0.0] * n_packs
    for item in sorted(range(len(load)), key=lambda i: -load[i]):
        lightest = min((p for p in range(n_packs) if len(packs[p]) < size), key=lambda p: carried[p])
        packs[lightest].append(item)
        carried[lightest] += load[item]
    return packs


def _layer(load: list[float], n_slots: int, n_groups: int, n_nodes: int, n_ranks: int) -> list[int]:
    size = len(load) // n_groups
    groups = pack([sum(load[group * size : (group + 1) * size]) for group in range(n_groups)], n_nodes)
    slots: list[int] = []
    for node in groups:
        members = [group * size + expert for group in node for expert in range(size)]
        own = [load[expert] for expert in members]
        holders = replicate(own, n_slots // n_nodes)
        each = [own[place] / holders.count(place) for place in range(len(own))]
        for rank in pack([each[place] for place in holders], n_ranks // n_nodes):
            slots += [members[holders[item]] for item in rank]
    return slots
