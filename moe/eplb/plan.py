"""A plan: which expert each physical slot of each layer shall hold, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .topology import Ints, Topology

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Slots of all layers, for one topology. What a planner predicts is for the load it was given, split evenly over replicas
    unless its ``split`` says otherwise.
    """

    slot_to_expert: Ints  # [layers, slots] logical expert of each slot; -1: empty
    n_experts: int  # logical experts of a layer
    topology: Topology
    imbalance: Floats  # [layers] largest over mean of the ranks' loads (weighted by their speeds), mean over usable ranks
    bound: Floats  # [layers] no placement on this topology has less
    seconds: float  # predicted, of one step's experts over all layers
    moved: Ints  # [layers, ranks] experts that a rank must receive: it did not hold them under the plan before
    expert_bytes: int  # of one moving expert
    kept: Ints  # [layers] 1: the layer is left as it was, because moving would not pay
    reason: str  # of the decision, for a log

    @property
    def gap(self) -> Floats:
        """[layers] imbalance above the bound, as a fraction of it."""
        return self.imbalance / self.bound - 1.0

    @property
    def bytes_to_move(self) -> int:
        """Bytes that all ranks receive."""
        return int(self.moved.sum()) * self.expert_bytes

    @property
    def n_layers(self) -> int:
        """Layers with experts."""
        return len(self.slot_to_expert)


def replica_counts(slot_to_expert: Ints, n_experts: int) -> Ints:
    """[layers, slots] experts of slots (-1: empty) -> [layers, experts] slots that hold each."""
    layers = len(slot_to_expert)
    counts = np.zeros((layers, n_experts + 1), dtype=np.int64)
    np.add.at(counts, (np.arange(layers)[:, None], slot_to_expert), 1)  # -1 is counted in the column that is cut off
    return counts[:, :n_experts]


def rank_loads(slot_to_expert: Ints, load: Floats, topology: Topology, split: Floats | None = None) -> Floats:
    """[layers, ranks] load of each rank.

    Args:
        slot_to_expert: [layers, slots].
        load: [layers, experts].
        topology: of the slots.
        split: [layers, slots] load that each slot gets; None: an expert's load is split evenly over its slots.
    """
    if split is None:
        layers = np.arange(len(load))[:, None]
        each = load / np.maximum(replica_counts(slot_to_expert, load.shape[1]), 1)
        split = np.where(slot_to_expert < 0, 0.0, each[layers, slot_to_expert])
    return np.add.reduceat(split, topology.first_slot[:-1], axis=1)
