"""rorqual's lines of JSON: a header, then one line for each step of a load, or for each layer of a map."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..topology import Topology
from ..trace import PHASES, LoadTrace
from .expert_map import ExpertMap
from .files import Raw
from .note import KEY, note_of, with_note
from .options import Format, ReadOptions
from .values import counts_of, integers

#: of the formats below; a reader refuses a newer one
VERSION = 1


def header(what: str, name: str, found: Any) -> dict[str, Any]:
    """The header of a file of ``what``.

    Raises:
        ValueError: it is of another kind or a newer version.
    """
    if not isinstance(found, dict) or found.get(KEY) != what:
        raise ValueError(f"{name}: its first line must say {KEY!r}: {what!r}")
    if int(found.get("version", 0)) > VERSION:
        raise ValueError(f"{name}: is of version {found['version']}, this rorqual knows up to {VERSION}; update rorqual")
    return found


def map_header(expert_map: ExpertMap) -> dict[str, Any]:
    """Everything of a map besides its slots, as JSON values."""
    topology = expert_map.topology
    ranks = None
    if topology is not None:
        ranks = {"slots": topology.slots, "nodes": topology.nodes, "failed": sorted(topology.failed), "speeds": topology.speeds}
    return {
        KEY: "map",
        "version": VERSION,
        "layer_ids": list(expert_map.layer_ids),
        "n_experts": expert_map.n_experts,
        "topology": ranks,
        "meta": dict(expert_map.meta),
    }


def map_of(found: dict[str, Any], slots: Any, name: str) -> ExpertMap:
    """The map that ``map_header`` described, with these slots."""
    ranks = found.get("topology")
    topology = None
    if ranks is not None:
        topology = Topology(
            slots=tuple(int(n) for n in ranks["slots"]),
            nodes=tuple(int(n) for n in ranks["nodes"]),
            failed=frozenset(int(rank) for rank in ranks.get("failed") or ()),
            speeds=None if ranks.get("speeds") is None else tuple(float(speed) for speed in ranks["speeds"]),
        )
    return ExpertMap(
        slot_to_expert=integers(slots, f"{name}: slots", 2),
        n_experts=int(found["n_experts"]),
        layer_ids=tuple(int(layer) for layer in found["layer_ids"]),
        topology=topology,
        meta={str(key): str(value) for key, value in dict(found.get("meta") or {}).items()},
    )


def agreed(expert_map: ExpertMap, options: ReadOptions) -> ExpertMap:
    """The map. What was given beside must not contradict the file."""
    if options.n_experts not in (None, expert_map.n_experts):
        raise ValueError(f"expert map: has {expert_map.n_experts} experts, and {options.n_experts} were expected")
    return expert_map


def matches_load(raw: Raw) -> bool:
    """Lines whose first says so."""
    return raw.kind in ("jsonl", "json") and _first(raw).get(KEY) == "load"


def read_load(raw: Raw, options: ReadOptions) -> LoadTrace:
    """Exactly what was written."""
    head = header("load", raw.name, _first(raw))
    lines = raw.data[1:] if raw.kind == "jsonl" else []
    shape = (0, len(head["layer_ids"]), int(head["n_experts"]))
    counts = counts_of([line["counts"] for line in lines], f"{raw.name}: counts") if lines else np.zeros(shape, dtype=np.int64)
    if counts.shape[1:] != shape[1:]:
        raise ValueError(f"{raw.name}: counts are of {counts.shape[1:]} layers and experts, and its first line says {shape[1:]}")
    note = {key: head.get(key) for key in ("layer_ids", "n_steps", "top_k", "n_ranks", "meta")}
    for name in ("tokens", "phase", "domain"):
        note[name] = [line[name] for line in lines] if head.get("steps_have", {}).get(name) else None
    return with_note(counts, note)


def write_load(trace: LoadTrace, path: Path) -> None:
    """Header and steps; a line is short enough for tools that work on lines."""
    note = note_of(trace)
    known = {name: note.pop(name) for name in ("tokens", "phase", "domain")}
    head = {KEY: "load", "version": VERSION, "n_experts": trace.n_experts, "phases": PHASES}
    head |= note | {"steps_have": {name: values is not None for name, values in known.items()}}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head) + "\n")
        for step in range(trace.n_steps):
            line = {"step": step} | {name: values[step] for name, values in known.items() if values is not None}
            file.write(json.dumps(line | {"counts": trace.counts[step].tolist()}, separators=(",", ":")) + "\n")


def matches_map(raw: Raw) -> bool:
    """Lines whose first says so."""
    return raw.kind in ("jsonl", "json") and _first(raw).get(KEY) == "map"


def read_map(raw: Raw, options: ReadOptions) -> ExpertMap:
    """Exactly what was written."""
    head = header("map", raw.name, _first(raw))
    lines = raw.data[1:] if raw.kind == "jsonl" else []
    if [line.get("layer") for line in lines] != list(head["layer_ids"]):
        raise ValueError(f"{raw.name}: its lines are of other layers than its first line says; was it cut?")
    return agreed(map_of(head, [line["slots"] for line in lines], raw.name), options)


def write_map(expert_map: ExpertMap, path: Path) -> None:
    """Header and layers."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(map_header(expert_map)) + "\n")
        for layer, slots in zip(expert_map.layer_ids, expert_map.slot_to_expert.tolist(), strict=True):
            file.write(json.dumps({"layer": layer, "slots": slots}, separators=(",", ":")) + "\n")


def _first(raw: Raw) -> dict[str, Any]:
    first = raw.data[0] if raw.kind == "jsonl" and raw.data else raw.data
    return first if isinstance(first, dict) else {}


FORMATS = [
    Format(
        name="jsonl-load",
        what="load",
        suffixes=(".jsonl",),
        about="rorqual's JSONL: a header, then counts [layers, experts] of each step",
        matches=matches_load,
        read=read_load,
        write=write_load,
    ),
    Format(
        name="jsonl-map",
        what="map",
        suffixes=(".jsonl",),
        about="rorqual's JSONL: a header with the topology, then the slots of each layer",
        matches=matches_map,
        read=read_map,
        write=write_map,
    ),
]
