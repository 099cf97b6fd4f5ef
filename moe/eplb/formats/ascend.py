"""vLLM Ascend's expert map (JSON): for each MoE layer the experts of each device, in the order of its slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..topology import Topology
from .expert_map import ExpertMap
from .files import Raw
from .options import Format, ReadOptions
from .sglang_map import numbered_map
from .values import integers


def matches(raw: Raw) -> bool:
    """An object with a list of layers that have devices."""
    return raw.kind == "json" and isinstance(raw.data, dict) and "layer_list" in raw.data


def read(raw: Raw, options: ReadOptions) -> ExpertMap:
    """Layer ids are those of the file; devices may have different numbers of slots, all layers alike."""
    layers = sorted(raw.data["layer_list"], key=lambda layer: int(layer["layer_id"]))
    said = raw.data.get("moe_layer_count")
    if said is not None and int(said) != len(layers):
        raise ValueError(f"{raw.name}: moe_layer_count is {said} and layer_list has {len(layers)} layers; some are missing")
    rows, sizes = [], set()
    for layer in layers:
        devices = sorted(layer["device_list"], key=lambda device: int(device["device_id"]))
        if [int(device["device_id"]) for device in devices] != list(range(len(devices))):
            raise ValueError(f"{raw.name}: layer {layer['layer_id']}: device ids must be 0 to {len(devices) - 1}, each once")
        sizes.add(tuple(len(device["device_expert"]) for device in devices))
        rows.append([int(expert) for device in devices for expert in device["device_expert"]])
    if len(sizes) != 1:
        raise ValueError(f"{raw.name}: devices have different numbers of experts in different layers: {sorted(sizes)[:3]}")
    slots = next(iter(sizes))
    topology = options.topology or Topology(slots=slots, nodes=(0,) * len(slots))
    ids = tuple(int(layer["layer_id"]) for layer in layers)
    told = ReadOptions(n_experts=options.n_experts, topology=topology)
    return numbered_map(integers(rows, raw.name, 2), ids, raw.name, told)


def write(expert_map: ExpertMap, path: Path) -> None:
    """Needs the topology: which slots a device has. ValueError without, or with empty slots."""
    expert_map.refuse_gaps("vLLM Ascend's expert map", even=False)
    if expert_map.topology is None:
        raise ValueError("vLLM Ascend's expert map says which device holds an expert; give the map a topology")
    bounds = expert_map.topology.first_slot[1:-1]
    layers: list[dict[str, Any]] = []
    for layer, slots in zip(expert_map.layer_ids, expert_map.slot_to_expert, strict=True):
        held = [part.tolist() for part in np.split(slots, bounds)]
        devices = [{"device_id": device, "device_expert": experts} for device, experts in enumerate(held)]
        layers.append({"layer_id": layer, "device_count": len(devices), "device_list": devices})
    path.write_text(json.dumps({"moe_layer_count": len(layers), "layer_list": layers}), encoding="utf-8")


FORMATS = [
    Format(
        name="ascend-map",
        what="map",
        suffixes=(),
        about="vLLM Ascend expert_map_path: layer_list of device_list of device_expert",
        matches=matches,
        read=read,
        write=write,
    )
]
