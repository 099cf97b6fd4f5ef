"""Files in the names of vLLM's expert state: windows of counts of slots, and maps.

vLLM keeps these in memory and has no file format of its own: ``expert_load_window`` [steps, MoE layers, slots],
``physical_to_logical_map`` [MoE layers, slots], ``logical_to_physical_map``, ``logical_replica_count``. JSON has them as they are,
JSONL one step a line. Routed experts, as its replay interface returns them (int16 [tokens, MoE layers, top_k]), are read from ``.npy`` and
``.npz``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..topology import Ints
from ..trace import LoadTrace
from .expert_map import ExpertMap, physical_to_logical
from .files import Raw
from .note import KEY, note_of, with_note
from .options import Format, ReadOptions
from .sglang_map import numbered_map
from .values import counts_of, expert_count, first_of, integers

#: found beside ``physical_to_logical_map`` in files of vLLM's names only
_BESIDE = ("logical_to_physical_map", "logical_replica_count", "num_logical_experts", "layer_ids", "moe_layer_ids")
_WINDOW = ("expert_load_window", "expert_load_pass", "expert_load", "logical_expert_load", "tokens_per_expert")


def matches_load(raw: Raw) -> bool:
    """An object, or lines of objects, with a load under one of its names."""
    first = raw.data[0] if raw.kind == "jsonl" and raw.data else raw.data
    return raw.kind in ("json", "jsonl") and isinstance(first, dict) and any(name in first for name in _WINDOW)


def read_load(raw: Raw, options: ReadOptions) -> LoadTrace:
    """Counts of slots where there is a map beside them, otherwise of experts."""
    lines: list[dict[str, Any]] = raw.data if raw.kind == "jsonl" else [raw.data]
    parts = [_window(line, f"{raw.name}, line {i + 1}" if len(lines) > 1 else raw.name, lines[0], options) for i, line in enumerate(lines)]
    if len({part.shape[1:] for part in parts}) > 1:
        raise ValueError(f"{raw.name}: its lines have different layers or experts: {sorted({part.shape[1:] for part in parts})}")
    counts = np.concatenate(parts)
    note = lines[0].get(KEY)
    if isinstance(note, dict):
        return with_note(counts, note)
    said = first_of(lines[0], "layer_ids", "moe_layer_ids")
    ids = options.ids(counts.shape[1], raw.name) if said is None else tuple(int(layer) for layer in said)
    return LoadTrace(counts=counts, layer_ids=ids)


def _window(line: dict[str, Any], name: str, head: dict[str, Any], options: ReadOptions) -> Ints:
    """[steps, layers, experts] of one object; the map may stand in the first."""
    value = first_of(line, *_WINDOW)
    if value is None:
        raise ValueError(f"{name}: has none of {', '.join(_WINDOW)}, found {sorted(line)}")
    counts = counts_of(value, name, options.scale)
    held = first_of(line, "physical_to_logical_map") or first_of(head, "physical_to_logical_map")
    placement = options.slot_to_expert if held is None else integers(held, f"{name}: physical_to_logical_map", 2)
    if placement is None:
        return counts
    said = options.n_experts or first_of(head, "num_logical_experts")
    return physical_to_logical(counts, placement, expert_count(placement, said, name))


def write_load(trace: LoadTrace, path: Path) -> None:
    """One object with the window of all steps, slot s holding expert s."""
    identity = np.tile(np.arange(trace.n_experts), (len(trace.layer_ids), 1))
    whole = {"expert_load_window": trace.counts.tolist(), "physical_to_logical_map": identity.tolist()}
    path.write_text(json.dumps(whole | {"num_logical_experts": trace.n_experts, KEY: note_of(trace)}), encoding="utf-8")


def write_load_lines(trace: LoadTrace, path: Path) -> None:
    """One line a step; the first says what belongs to all."""
    with path.open("w", encoding="utf-8") as file:
        for step in range(trace.n_steps):
            line: dict[str, Any] = {"step": step, "expert_load": trace.counts[step].tolist()}
            line |= {"num_logical_experts": trace.n_experts, KEY: note_of(trace)} if step == 0 else {}
            file.write(json.dumps(line) + "\n")


def matches_map(raw: Raw) -> bool:
    """An object with the map of slots and others of vLLM's names."""
    data = raw.data
    if raw.kind not in ("json", "pt") or not isinstance(data, dict) or "physical_to_logical_map" not in data:
        return False
    return any(name in data for name in _BESIDE)


def read_map(raw: Raw, options: ReadOptions) -> ExpertMap:
    """Rows are MoE layers; a map from experts to slots beside it must say the same."""
    slots = integers(raw.data["physical_to_logical_map"], f"{raw.name}: physical_to_logical_map", 2)
    said = first_of(raw.data, "layer_ids", "moe_layer_ids")
    ids = options.ids(len(slots), raw.name) if said is None else tuple(int(layer) for layer in said)
    n_experts = options.n_experts or first_of(raw.data, "num_logical_experts")
    other = first_of(raw.data, "logical_to_physical_map")
    if other is not None:
        check_back(slots, np.asarray(other), raw.name)
        n_experts = n_experts or np.asarray(other).shape[1]
    told = ReadOptions(n_experts=None if n_experts is None else int(n_experts), topology=options.topology)
    return numbered_map(slots, ids, raw.name, told)


def check_back(slots: Ints, back: np.ndarray, name: str) -> None:
    """Refuse a map [layers, experts, replicas] (-1 padded) from experts to slots that does not say what ``slots`` says.

    Raises:
        ValueError: naming the first entry that is wrong.
    """
    if back.ndim != 3 or len(back) != len(slots):
        raise ValueError(
            f"{name}: the map from experts to slots must be [layers, experts, replicas] of {len(slots)} layers, found {back.shape}"
        )
    layer, expert, replica = np.nonzero(back >= 0)
    slot = back[layer, expert, replica]
    wrong = (slot >= slots.shape[1]) | (slots[layer, np.minimum(slot, slots.shape[1] - 1)] != expert)
    if wrong.any() or len(slot) != (slots >= 0).sum():
        where = f": layer {layer[wrong][0]} puts expert {expert[wrong][0]} in slot {slot[wrong][0]}" if wrong.any() else ""
        raise ValueError(f"{name}: the map from experts to slots does not agree with the map from slots to experts{where}")


def write_map(expert_map: ExpertMap, path: Path) -> None:
    """Both directions, as vLLM names them."""
    from ..rebalance_experts import expert_to_slots

    expert_map.refuse_gaps("vLLM's map")
    back, counts = expert_to_slots(expert_map.slot_to_expert, expert_map.n_experts)
    whole = {
        "physical_to_logical_map": expert_map.slot_to_expert.tolist(),
        "logical_to_physical_map": np.asarray(back).tolist(),
        "logical_replica_count": np.asarray(counts).tolist(),
        "num_logical_experts": expert_map.n_experts,
        "layer_ids": list(expert_map.layer_ids),
    }
    path.write_text(json.dumps(whole), encoding="utf-8")


def matches_routed(raw: Raw) -> bool:
    """Ids of experts [tokens, layers, top_k] in 16 bits."""
    return _routed(raw) is not None


def _routed(raw: Raw) -> np.ndarray | None:
    if raw.kind not in ("npy", "npz"):
        return None
    array = raw.data if raw.kind == "npy" else raw.data.get("routed_experts")
    return array if isinstance(array, np.ndarray) and array.ndim == 3 and array.dtype in (np.int16, np.uint16) else None


def read_routed(raw: Raw, options: ReadOptions) -> LoadTrace:
    """One request as one step. Rows whose ids are -1 are padding."""
    ids = _routed(raw)
    assert ids is not None, "matches_routed"
    if options.n_experts is None:
        raise ValueError(f"{raw.name}: ids of routed experts do not say how many experts there are; give n_experts")
    if ids.size and (ids.max() >= options.n_experts or ids.min() < -1):
        raise ValueError(f"{raw.name}: ids must be from 0 to {options.n_experts - 1} (-1: padding), found {ids.min()} to {ids.max()}")
    real = ids[(ids >= 0).all((1, 2))].astype(np.int64)
    n_layers = ids.shape[1]
    counts = np.stack([np.bincount(real[:, layer].ravel(), minlength=options.n_experts) for layer in range(n_layers)])
    tokens = np.array([len(real)], dtype=np.int64)
    return LoadTrace(counts=counts[None], layer_ids=options.ids(n_layers, raw.name), top_k=ids.shape[2], tokens=tokens)


FORMATS = [
    Format(
        name="vllm-load",
        what="load",
        suffixes=(".json",),
        about="vLLM's names in JSON: expert_load_window [steps, MoE layers, slots] and physical_to_logical_map; lines are read as well",
        matches=matches_load,
        read=read_load,
        write=write_load,
    ),
    Format(
        name="vllm-lines-load",
        what="load",
        suffixes=(),
        about="vLLM's names in JSONL: a line with expert_load [MoE layers, experts] for each step",
        matches=lambda raw: False,  # read as vllm-load
        read=read_load,
        write=write_load_lines,
    ),
    Format(
        name="vllm-routed-load",
        what="load",
        suffixes=(),
        about="vLLM's routed experts of a request: int16 [tokens, MoE layers, top_k] in .npy or .npz (key routed_experts)",
        matches=matches_routed,
        read=read_routed,
        write=None,
    ),
    Format(
        name="vllm-map",
        what="map",
        suffixes=(),
        about="vLLM's names in JSON: physical_to_logical_map [MoE layers, slots] and its way back",
        matches=matches_map,
        read=read_map,
        write=write_map,
    ),
]
