"""The placement algorithm that DeepSeek published as EPLB, batched over layers: the peer that policies are measured against.

Written from its published description: experts are packed into nodes by groups, replicated where the largest replica is, and
packed onto ranks, always the heaviest next, onto the lightest pack that is not full. It knows nothing of what is placed already.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..plan import Floats, replica_counts
from ..topology import Ints, Topology


def published_plan(load: Floats, topology: Topology, *, n_groups: int = 1) -> Ints:
    """Slots [layers, slots] of a load [layers, experts]: by nodes and groups if groups divide over nodes, otherwise over all ranks alike.

    Raises:
        ValueError: a machine that the algorithm cannot plan for: ranks of different sizes, failed ranks, numbers that do not divide.
    """
    n_experts, n_nodes, n_ranks = load.shape[1], topology.n_nodes, topology.n_ranks
    if len(set(topology.slots)) > 1 or topology.failed:
        raise ValueError("EPLB plans for ranks of equal size that all live; leave the policy out, or change slots and ranks")
    if topology.n_slots < n_experts:
        raise ValueError(f"{n_experts} experts do not fit into {topology.n_slots} slots; give at least as many slots as experts")
    if n_groups % n_nodes:
        n_groups = n_nodes = 1
    for what, many, parts, over in (("ranks", n_ranks, n_nodes, "nodes"), ("experts", n_experts, n_groups, "groups")):
        if many % parts:
            raise ValueError(f"EPLB needs {what} that divide over {over}, found {many} over {parts}")
    to_group = _packed(load.reshape(len(load), n_groups, -1).sum(-1), n_nodes)  # [layers, groups] in the order of their nodes
    size = n_experts // n_groups
    by_node = (to_group[:, :, None] * size + np.arange(size)).reshape(len(load) * n_nodes, -1)  # experts of every (layer, node)
    node_load = np.take_along_axis(np.repeat(load, n_nodes, axis=0), by_node, axis=1)
    copies = _replicated(node_load, topology.n_slots // n_nodes)
    each = node_load / replica_counts(copies, node_load.shape[1])
    order = _packed(np.take_along_axis(each, copies, axis=1), n_ranks // n_nodes)
    placed = np.take_along_axis(by_node, np.take_along_axis(copies, order, axis=1), axis=1)
    return placed.reshape(len(load), topology.n_slots).astype(np.int64)


def _packed(weight: Floats, packs: int) -> Ints:
    """The items [rows, n] in the order of their packs, n / packs in each: heaviest first, to the lightest pack with room."""
    rows, n = weight.shape
    room = n // packs
    if room == 1:
        return np.broadcast_to(np.arange(n), (rows, n)).copy()
    order = np.argsort(-weight, axis=1, kind="stable")
    ordered = np.take_along_axis(weight, order, axis=1)
    filled: npt.NDArray[np.int64] = np.zeros((rows, packs), dtype=np.int64)
    sums = np.zeros((rows, packs))
    placed, row = np.empty((rows, n), dtype=np.int64), np.arange(rows)
    for item in range(n):
        pack = np.where(filled < room, sums, np.inf).argmin(1)
        placed[row, pack * room + filled[row, pack]] = order[:, item]
        sums[row, pack] += ordered[:, item]
        filled[row, pack] += 1
    return placed


def _replicated(weight: Floats, slots: int) -> Ints:
    """Experts of ``slots`` replicas [rows, slots]: one of each, then one more, each time, of the expert with the largest replicas."""
    rows, n = weight.shape
    held = np.empty((rows, slots), dtype=np.int64)
    held[:, :n] = np.arange(n)
    counts, row = np.ones((rows, n)), np.arange(rows)
    for slot in range(n, slots):
        largest = (weight / counts).argmax(1)
        held[:, slot] = largest
        counts[row, largest] += 1
    return held
