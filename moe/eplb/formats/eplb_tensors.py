"""Tensors of DeepSeek's EPLB, in ``.pt``, ``.safetensors`` or ``.npz``.

It takes ``weight`` and gives ``phy2log``, ``log2phy`` and ``logcnt``. Also read and written is the map of [layers, ranks, experts] from
a rank's experts to its own slots (-1: not there), under ``expert_map``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..topology import Ints, Topology
from ..trace import LoadTrace
from .expert_map import ExpertMap
from .files import Raw, write_pt
from .options import Format, ReadOptions
from .sglang_map import numbered_map
from .values import MOST, counts_of, integers
from .vllm import check_back

_KINDS = ("pt", "safetensors", "npz")


def matches_load(raw: Raw) -> bool:
    """Tensors with a weight, or one bare [layers, experts] array."""
    if isinstance(raw.data, np.ndarray):
        return raw.kind in ("pt", "npy") and raw.data.ndim == 2
    return raw.kind in _KINDS and isinstance(raw.data, dict) and "weight" in raw.data


def read_load(raw: Raw, options: ReadOptions) -> LoadTrace:
    """One step. EPLB's weights may be any load; what is not counts needs a ``scale``."""
    data = {"weight": raw.data} if isinstance(raw.data, np.ndarray) else raw.data
    counts = counts_of(data["weight"], f"{raw.name}: weight", options.scale)
    return LoadTrace(counts=counts, layer_ids=_ids(data, counts.shape[1], raw.name, options))


def write_load(trace: LoadTrace, path: Path) -> None:
    """The load of a trace of one step. ValueError for several: their sum is what EPLB takes."""
    if trace.n_steps != 1:
        raise ValueError(f"EPLB's weight is one load, and this trace has {trace.n_steps} steps; sum them first (`summed`)")
    _save({"weight": trace.counts[0], "layer_ids": np.array(trace.layer_ids)}, path)


def matches_map(raw: Raw) -> bool:
    """Tensors with phy2log."""
    return raw.kind in _KINDS and isinstance(raw.data, dict) and "phy2log" in raw.data


def read_map(raw: Raw, options: ReadOptions) -> ExpertMap:
    """phy2log; log2phy and logcnt, where they are there, must say the same."""
    slots = integers(raw.data["phy2log"], f"{raw.name}: phy2log", 2)
    told = options
    back, many = raw.data.get("log2phy"), raw.data.get("logcnt")
    if back is not None:
        check_back(slots, np.asarray(back), raw.name)
        told = _with_experts(options, np.asarray(back).shape[1])
    elif many is not None:
        told = _with_experts(options, np.asarray(many).shape[1])
    found = numbered_map(slots, _ids(raw.data, len(slots), raw.name, options), raw.name, told)
    if many is not None and (integers(many, f"{raw.name}: logcnt") != _replicas(found)).any():
        raise ValueError(f"{raw.name}: logcnt does not agree with phy2log")
    return found


def write_map(expert_map: ExpertMap, path: Path) -> None:
    """All three tensors."""
    from ..rebalance_experts import expert_to_slots

    expert_map.refuse_gaps("EPLB's phy2log")
    back, many = expert_to_slots(expert_map.slot_to_expert, expert_map.n_experts)
    ids = np.array(expert_map.layer_ids)
    _save({"phy2log": expert_map.slot_to_expert, "log2phy": np.asarray(back), "logcnt": np.asarray(many), "layer_ids": ids}, path)


def matches_local(raw: Raw) -> bool:
    """Tensors with an expert map [layers, ranks, experts]."""
    return raw.kind in (*_KINDS, "json") and isinstance(raw.data, dict) and np.ndim(raw.data.get("expert_map", 0)) == 3


def read_local(raw: Raw, options: ReadOptions) -> ExpertMap:
    """Slots of a rank are numbered 0 .. in every layer; ranks may have different numbers of them."""
    local = integers(raw.data["expert_map"], f"{raw.name}: expert_map", 3)
    layers, ranks, experts = local.shape
    sizes = local.max((0, 2)) + 1
    if local.min() < -1 or sizes.max() > MOST:
        raise ValueError(f"{raw.name}: expert_map must hold slots of a rank, or -1, found {local.min()} to {local.max()}")
    first = np.concatenate([[0], np.cumsum(sizes)])
    slots = np.full((layers, int(first[-1])), -1, dtype=np.int64)
    layer, rank, expert = np.nonzero(local >= 0)
    at = first[rank] + local[layer, rank, expert]
    slots[layer, at] = expert
    if (slots >= 0).sum() != len(at):
        raise ValueError(f"{raw.name}: expert_map puts two experts of a layer in one slot of a rank")
    if (sizes < 1).any():
        raise ValueError(f"{raw.name}: rank {int(sizes.argmin())} has no slot in expert_map")
    topology = options.topology or Topology(slots=tuple(sizes.tolist()), nodes=(0,) * ranks)
    return numbered_map(slots, _ids(raw.data, layers, raw.name, options), raw.name, ReadOptions(n_experts=experts, topology=topology))


def write_local(expert_map: ExpertMap, path: Path) -> None:
    """Needs the topology. ValueError without, or where a rank holds an expert twice, which this map cannot say."""
    topology = expert_map.topology
    if topology is None:
        raise ValueError("a map from a rank's experts to its slots needs to know the ranks; give the map a topology")
    slots = expert_map.slot_to_expert
    local = np.full((len(slots), topology.n_ranks, expert_map.n_experts), -1, dtype=np.int64)
    layer, slot = np.nonzero(slots >= 0)
    rank = topology.rank_of_slot[slot]
    local[layer, rank, slots[layer, slot]] = slot - topology.first_slot[rank]
    if (local >= 0).sum() != len(slot):
        raise ValueError("a map from a rank's experts to its slots cannot say that a rank holds an expert twice")
    if ((local.max((0, 2)) + 1) != topology.slots).any():
        raise ValueError("a map from a rank's experts to its slots cannot say that the last slot of a rank is empty in every layer")
    _save({"expert_map": local, "layer_ids": np.array(expert_map.layer_ids)}, path)


def _save(tensors: dict[str, Any], path: Path) -> None:
    whole = {name: np.ascontiguousarray(value, dtype=np.int64) for name, value in tensors.items()}
    if path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file(whole, path)
    elif path.suffix == ".npz":
        with path.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **whole)
    else:
        write_pt(whole, path)


def _ids(data: dict[str, Any], n_layers: int, name: str, options: ReadOptions) -> tuple[int, ...]:
    """Layer ids of the file, else those given."""
    if "layer_ids" in data:
        return tuple(int(layer) for layer in data["layer_ids"])
    return options.ids(n_layers, name)


def _with_experts(options: ReadOptions, n_experts: int) -> ReadOptions:
    return options if options.n_experts is not None else ReadOptions(n_experts=n_experts, topology=options.topology)


def _replicas(found: ExpertMap) -> Ints:
    from ..plan import replica_counts

    return replica_counts(found.slot_to_expert, found.n_experts)


FORMATS = [
    Format(
        name="eplb-load",
        what="load",
        suffixes=(".safetensors", ".npz"),
        about="EPLB's weight [layers, experts], in .pt, .safetensors or .npz; a bare two-dimensional array is read too",
        matches=matches_load,
        read=read_load,
        write=write_load,
    ),
    Format(
        name="eplb-map",
        what="map",
        suffixes=(".safetensors", ".npz"),
        about="EPLB's phy2log [layers, slots], log2phy and logcnt",
        matches=matches_map,
        read=read_map,
        write=write_map,
    ),
    Format(
        name="local-map",
        what="map",
        suffixes=(),
        about="expert_map [layers, ranks, experts]: a rank's own slot of each expert, -1 if it has none (early vLLM)",
        matches=matches_local,
        read=read_local,
        write=write_local,
    ),
]
