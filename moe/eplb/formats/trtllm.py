"""TensorRT-LLM's load balancer: its YAML of placements, and the folder of statistics that it dumps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..topology import Ints
from ..trace import LoadTrace
from .expert_map import ExpertMap
from .files import Raw, json_of, need
from .options import Format, ReadOptions
from .sglang_map import numbered_map
from .values import integers

#: "iteration_layer", the name of a tensor of counts
_KEY = re.compile(r"^(\d+)_(\d+)$")
_RANK = re.compile(r"rank_?(\d+)\.safetensors$")


def matches_map(raw: Raw) -> bool:
    """A mapping with the assignments of layers."""
    return raw.kind in ("yaml", "json") and isinstance(raw.data, dict) and "initial_global_assignments" in raw.data


def read_map(raw: Raw, options: ReadOptions) -> ExpertMap:
    """Layers by their numbers in the model."""
    layers = {int(layer): slots for layer, slots in dict(raw.data["initial_global_assignments"] or {}).items()}
    if not layers:
        raise ValueError(f"{raw.name}: initial_global_assignments is empty: this file leaves the placement to TensorRT-LLM")
    ids = tuple(sorted(layers))
    slots = integers([layers[layer] for layer in ids], f"{raw.name}: initial_global_assignments", 2)
    said = raw.data.get("num_slots")
    if said is not None and int(said) != slots.shape[1]:
        raise ValueError(f"{raw.name}: num_slots is {said} and layers have {slots.shape[1]} slots")
    updates = raw.data.get("layer_updates_per_iter")
    meta = {} if updates is None else {"layer_updates_per_iter": str(int(updates))}
    return numbered_map(slots, ids, raw.name, options, meta)


def write_map(expert_map: ExpertMap, path: Path) -> None:
    """A static placement (layer_updates_per_iter 0) unless the map's meta says how many layers are updated."""
    expert_map.refuse_gaps("TensorRT-LLM's load balancer")
    whole: dict[str, Any] = {
        "num_slots": expert_map.n_slots,
        "initial_global_assignments": dict(zip(expert_map.layer_ids, expert_map.slot_to_expert.tolist(), strict=True)),
        "layer_updates_per_iter": int(expert_map.meta.get("layer_updates_per_iter", 0)),
    }
    yaml = need("yaml")
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    path.write_text(yaml.dump(whole, Dumper=dumper, default_flow_style=None, sort_keys=False, width=1 << 20), encoding="utf-8")


def matches_load(raw: Raw) -> bool:
    """A folder with files of ranks."""
    return raw.kind == "folder" and any(_RANK.search(path.name) for path in raw.data.iterdir())


def read_load(raw: Raw, options: ReadOptions) -> LoadTrace:
    """All iterations that every layer has, summed over the ranks."""
    from safetensors.numpy import load_file

    files = sorted(path for path in raw.data.iterdir() if _RANK.search(path.name))
    meta_file = raw.data / "meta_info.json"
    meta: dict[str, Any] = json_of(meta_file.read_text(encoding="utf-8"), str(meta_file)) if meta_file.is_file() else {}
    found: dict[tuple[int, int], Ints] = {}
    for path in files:
        for key, value in load_file(path).items():
            match = _KEY.match(key)
            if match is None:
                raise ValueError(f"{path}: tensors must be named ITERATION_LAYER, found {key!r}")
            at, counts = (int(match[1]), int(match[2])), integers(value, f"{path}: {key}").ravel()
            found[at] = found[at] + counts if at in found else counts
    steps, ids = sorted({step for step, _ in found}), tuple(sorted({layer for _, layer in found}))
    absent = [(step, layer) for step in steps for layer in ids if (step, layer) not in found]
    if absent or not found:
        raise ValueError(
            f"{raw.name}: iteration and layer {absent[:4]} are missing" if absent else f"{raw.name}: no counts in {len(files)} files"
        )
    said = meta.get("num_experts") or options.n_experts
    sizes = {len(counts) for counts in found.values()}
    if len(sizes) != 1 or (said is not None and sizes != {int(said)}):
        raise ValueError(f"{raw.name}: counts are of {sorted(sizes)} experts, and the model has {said}")
    counts = np.stack([np.stack([found[step, layer] for layer in ids]) for step in steps])
    top_k = meta.get("num_experts_per_token")
    n_ranks = meta.get("ep_size")
    if n_ranks is not None and int(n_ranks) != len(files):
        raise ValueError(f"{raw.name}: ep_size is {n_ranks} and {len(files)} ranks have dumped; get the files of all ranks")
    return LoadTrace(
        counts=counts,
        layer_ids=ids,
        top_k=None if top_k is None else int(top_k),
        n_ranks=len(files),
        meta={"iterations": f"{steps[0]}-{steps[-1]}"},
    )


def write_load(trace: LoadTrace, path: Path) -> None:
    """A folder with one file, of rank 0, that has the counts of all ranks."""
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    first = int(trace.meta.get("iterations", "0").split("-")[0])
    tensors = {
        f"{first + step}_{layer}": np.ascontiguousarray(trace.counts[step, i])
        for step in range(trace.n_steps)
        for i, layer in enumerate(trace.layer_ids)
    }
    save_file(tensors, path / "rank0.safetensors")
    meta = {"num_experts": trace.n_experts, "ep_size": 1} | ({} if trace.top_k is None else {"num_experts_per_token": trace.top_k})
    (path / "meta_info.json").write_text(json.dumps(meta), encoding="utf-8")


FORMATS = [
    Format(
        name="trtllm-map",
        what="map",
        suffixes=(".yaml", ".yml"),
        about="TensorRT-LLM load balancer YAML: num_slots, initial_global_assignments, layer_updates_per_iter",
        matches=matches_map,
        read=read_map,
        write=write_map,
    ),
    Format(
        name="trtllm-load",
        what="load",
        suffixes=("",),
        about="TensorRT-LLM EXPERT_STATISTIC_PATH: a folder of rankN.safetensors (ITERATION_LAYER) and meta_info.json",
        matches=matches_load,
        read=read_load,
        write=write_load,
    ),
]
