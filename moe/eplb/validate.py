"""Whether a map of slots may be used: every expert somewhere, nothing impossible."""

from __future__ import annotations

import numpy as np

from .topology import Ints, Topology

_SHOWN = 8  # layers or experts that a problem names


def validate(slot_to_expert: Ints, n_experts: int, topology: Topology, *, duplicates: bool = True) -> list[str]:
    """Problems of a map [layers, slots] (-1: empty), each in words; none for a map that may be used.

    Args:
        slot_to_expert: any array.
        n_experts: logical experts of a layer.
        topology: of the slots.
        duplicates: whether an expert twice on a rank is a problem: the output is right, a slot is wasted. Other planners do this.
    """
    slots = np.asarray(slot_to_expert)
    if slots.ndim != 2 or slots.shape[1] != topology.n_slots or not np.issubdtype(slots.dtype, np.integer):
        return [f"a map must be integers [layers, {topology.n_slots}] for this topology, found {slots.dtype} {list(slots.shape)}"]
    wrong = (slots < -1) | (slots >= n_experts)
    if wrong.any():
        layer, slot = np.argwhere(wrong)[0]
        return [f"{wrong.sum()} slots hold no expert of 0 to {n_experts - 1}: layer {layer} slot {slot} holds {slots[layer, slot]}"]
    problems = []
    on_failed = (slots >= 0) & ~topology.usable
    if on_failed.any():
        ranks = np.unique(topology.rank_of_slot[on_failed.any(0)]).tolist()
        problems.append(f"{on_failed.sum()} slots of failed ranks {ranks} hold experts; they must be empty (-1)")
    present = np.zeros((len(slots), n_experts + 1), dtype=bool)
    np.put_along_axis(present, np.where(topology.usable, slots, -1), True, axis=1)
    for layer in np.flatnonzero(~present[:, :n_experts].all(1))[:_SHOWN]:
        missing = np.flatnonzero(~present[layer, :n_experts])
        problems.append(f"layer {layer} has no slot for {len(missing)} experts: {_some(missing)}")
    if duplicates:
        problems += _duplicates(slots, n_experts, topology)
    return problems


def check_complete(slot_to_expert: Ints, n_experts: int, topology: Topology, name: str) -> None:
    """Refuse a map that would not compute every token: what is measured on it would leave tokens out. Duplicates are no reason.

    Raises:
        ValueError: with the map's name and its first problem.
    """
    problems = validate(slot_to_expert, n_experts, topology, duplicates=False)
    if problems:
        raise ValueError(f"{name}: {problems[0]}")


def count_duplicates(slot_to_expert: Ints, n_experts: int, topology: Topology) -> Ints:
    """[layers] slots whose expert another slot of the same rank holds already."""
    counts = np.zeros((len(slot_to_expert), topology.n_ranks, n_experts + 1), dtype=np.int64)
    np.add.at(counts, (np.arange(len(slot_to_expert))[:, None], topology.rank_of_slot, slot_to_expert), 1)
    extra: Ints = np.maximum(counts[:, :, :n_experts] - 1, 0).sum((1, 2))
    return extra


def _duplicates(slots: Ints, n_experts: int, topology: Topology) -> list[str]:
    found = count_duplicates(slots, n_experts, topology)
    layers = np.flatnonzero(found)
    if not len(layers):
        return []
    return [f"{found.sum()} slots repeat an expert of their own rank, in layers {_some(layers)}; leave such a slot empty (-1)"]


def _some(numbers: np.ndarray) -> str:
    shown = ", ".join(str(number) for number in numbers[:_SHOWN])
    return shown + (" .." if len(numbers) > _SHOWN else "")
