"""A placement as files hold it: which expert each physical slot of each layer has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ..topology import Ints, Topology


@dataclass(frozen=True, kw_only=True)
class ExpertMap:
    """Slots of all layers. Slots are numbered rank by rank."""

    slot_to_expert: Ints  # [layers, slots] logical expert of each slot; -1: empty
    n_experts: int  # logical experts of a layer
    layer_ids: tuple[int, ...]  # number of each layer in the model
    topology: Topology | None = None  # None: the file does not say how slots are spread over ranks
    meta: dict[str, str] = field(default_factory=dict)  # source, date ..; kept by the formats that can

    def __post_init__(self) -> None:
        """ValueError: the parts do not fit each other."""
        if self.slot_to_expert.ndim != 2:
            raise ValueError(f"expert map: slots must be [layers, slots], found shape {self.slot_to_expert.shape}")
        layers, slots = self.slot_to_expert.shape
        if len(self.layer_ids) != layers:
            raise ValueError(f"expert map: {layers} layers of slots and {len(self.layer_ids)} layer ids; give one for each")
        if len(set(self.layer_ids)) != layers or min(self.layer_ids, default=0) < 0:
            raise ValueError(f"expert map: layer ids must be 0 or more and differ, found {self.layer_ids}")
        if self.topology is not None and self.topology.n_slots != slots:
            raise ValueError(f"expert map: {slots} slots and a topology of {self.topology.n_slots}; give the topology of this map")
        outside = (self.slot_to_expert < -1) | (self.slot_to_expert >= self.n_experts)
        if outside.any():
            layer, slot = np.argwhere(outside)[0].tolist()
            raise ValueError(
                f"expert map: layer {self.layer_ids[layer]}, slot {slot} holds expert {self.slot_to_expert[layer, slot]}; "
                f"there are 0 to {self.n_experts - 1}, and -1 for an empty slot"
            )

    @property
    def n_slots(self) -> int:
        """Physical slots."""
        return int(self.slot_to_expert.shape[1])

    def missing(self) -> list[tuple[int, int]]:
        """(layer id, expert) of experts that no slot holds."""
        held = np.zeros((len(self.layer_ids), self.n_experts + 1), dtype=bool)
        np.put_along_axis(held, np.where(self.slot_to_expert < 0, self.n_experts, self.slot_to_expert), True, axis=1)
        return [(self.layer_ids[layer], int(expert)) for layer, expert in np.argwhere(~held[:, : self.n_experts])]

    def pick(self, layer_ids: Sequence[int]) -> ExpertMap:
        """The map of these layers, in this order.

        Raises:
            ValueError: layers that are not in the map.
        """
        row = {layer: i for i, layer in enumerate(self.layer_ids)}
        absent = [layer for layer in layer_ids if layer not in row]
        if absent:
            raise ValueError(f"expert map: layers {absent} are not in it; it has {list(self.layer_ids)}")
        return replace(self, slot_to_expert=self.slot_to_expert[[row[layer] for layer in layer_ids]], layer_ids=tuple(layer_ids))

    def for_every_layer(self, n_layers: int | None = None) -> Ints:
        """[model layers, slots]: rows of layers that are not in the map hold expert s % experts in slot s.

        For formats that number layers by the model and know no gaps; ``n_layers`` default: up to the last layer of the map.
        """
        n = max(self.layer_ids) + 1 if n_layers is None else n_layers
        whole = np.tile(np.arange(self.n_slots) % self.n_experts, (n, 1))
        whole[list(self.layer_ids)] = self.slot_to_expert
        return whole

    def refuse_gaps(self, format_name: str, *, even: bool = True) -> None:
        """Refuse what a foreign format cannot say.

        Raises:
            ValueError: empty slots, or (``even``) ranks of different sizes.
        """
        if (self.slot_to_expert < 0).any():
            raise ValueError(
                f"{format_name} cannot say that a slot is empty, and this map has empty slots; write .jsonl or .parquet instead"
            )
        if even and self.topology is not None and len(set(self.topology.slots)) > 1:
            raise ValueError(
                f"{format_name} knows only ranks of the same size, found slots {self.topology.slots}; write .jsonl or .parquet"
            )


def physical_to_logical(counts: npt.NDArray[np.int64], slot_to_expert: Ints, n_experts: int) -> Ints:
    """Counts of slots [..., layers, slots] -> of experts [..., layers, experts]: replicas are summed.

    Raises:
        ValueError: shapes that do not fit, or counts on empty slots.
    """
    layers, slots = slot_to_expert.shape
    if counts.shape[-2:] != (layers, slots):
        raise ValueError(
            f"counts of slots have shape {counts.shape} and the map [{layers} layers, {slots} slots]; they must belong together"
        )
    if counts[..., slot_to_expert < 0].any():
        raise ValueError("counts of slots: slots that the map calls empty have counts; the map is of another time")
    flat = counts.reshape(-1, layers, slots)
    found = np.zeros((len(flat), layers, n_experts), dtype=np.int64)
    where = np.maximum(slot_to_expert, 0)
    np.add.at(found, (np.arange(len(flat))[:, None, None], np.arange(layers)[None, :, None], where[None]), flat)
    return found.reshape(*counts.shape[:-1], n_experts)


def logical_to_physical(counts: Ints, slot_to_expert: Ints) -> Ints:
    """Counts of experts [..., layers, experts] -> of slots [..., layers, slots]: split evenly over replicas, the first get the rest.

    ``physical_to_logical`` of the result gives the counts again.
    """
    n_experts = counts.shape[-1]
    layers, slots = slot_to_expert.shape
    replicas = np.zeros((layers, n_experts + 1), dtype=np.int64)
    turn = np.zeros((layers, slots), dtype=np.int64)  # how many slots before have the same expert
    rows = np.arange(layers)
    for slot in range(slots):
        turn[:, slot] = replicas[rows, slot_to_expert[:, slot]]
        replicas[rows, slot_to_expert[:, slot]] += 1
    at = np.maximum(slot_to_expert, 0)
    each = counts[..., rows[:, None], at]
    n = np.maximum(replicas[rows[:, None], at], 1)
    found: Ints = np.where(slot_to_expert < 0, 0, each // n + (turn < each % n))
    return found
