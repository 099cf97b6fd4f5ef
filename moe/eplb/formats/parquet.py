"""rorqual's Parquet: a row for each step and layer of a load (step, layer, counts ..), or for each layer of a map (layer, slots)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..topology import Ints
from ..trace import LoadTrace
from .expert_map import ExpertMap
from .files import Raw, need
from .jsonl import VERSION, agreed, header, map_header, map_of
from .note import KEY, note_of, with_note
from .options import Format, ReadOptions


def _head(raw: Raw) -> dict[str, Any]:
    """The header in the file's metadata; {} where there is none."""
    if raw.kind != "parquet":
        return {}
    found = need("pyarrow.parquet").read_schema(raw.data).metadata or {}
    try:
        head = json.loads(found.get(KEY.encode(), b"{}"))
    except json.JSONDecodeError:
        return {}
    return head if isinstance(head, dict) else {}


def _lists(values: Ints) -> Any:
    """[rows, n] as a column of lists of one length."""
    arrow = need("pyarrow")
    return arrow.FixedSizeListArray.from_arrays(arrow.array(np.ascontiguousarray(values).ravel()), values.shape[-1])


def _write(columns: dict[str, Any], head: dict[str, Any], path: Path) -> None:
    arrow = need("pyarrow")
    table = arrow.table(columns).replace_schema_metadata({KEY: json.dumps(head)})
    need("pyarrow.parquet").write_table(table, path, compression="zstd")


def _rows(table: Any, name: str, width: int) -> Ints:
    """[rows, width] of a column of lists."""
    column = table.column(name).combine_chunks()
    return np.asarray(column.flatten().to_numpy(zero_copy_only=False), dtype=np.int64).reshape(-1, width)


def matches_load(raw: Raw) -> bool:
    """Metadata that says so."""
    return _head(raw).get(KEY) == "load"


def read_load(raw: Raw, options: ReadOptions) -> LoadTrace:
    """Exactly what was written."""
    head = header("load", raw.name, _head(raw))
    layers, experts = len(head["layer_ids"]), int(head["n_experts"])
    table = need("pyarrow.parquet").read_table(raw.data, columns=["counts"])
    rows = _rows(table, "counts", experts)
    if layers == 0 or len(rows) != int(head["n_steps"]) * layers:
        raise ValueError(f"{raw.name}: has {len(rows)} rows, and {head['n_steps']} steps of {layers} layers were written")
    return with_note(rows.reshape(-1, layers, experts), head)


def write_load(trace: LoadTrace, path: Path) -> None:
    """Columns step, layer, counts, and tokens, phase, domain where known. The header in the metadata has them as well."""
    note = note_of(trace)
    layers = len(trace.layer_ids)
    columns: dict[str, Any] = {
        "step": np.repeat(np.arange(trace.n_steps), layers),
        "layer": np.tile(np.array(trace.layer_ids), trace.n_steps),
    }
    for name in ("tokens", "phase", "domain"):
        if note[name] is not None:
            columns[name] = np.repeat(np.array(note[name]), layers)
    columns["counts"] = _lists(trace.counts.reshape(-1, trace.n_experts))
    head = {KEY: "load", "version": VERSION, "n_experts": trace.n_experts, "n_steps": trace.n_steps} | note
    _write(columns, head, path)


def matches_map(raw: Raw) -> bool:
    """Metadata that says so."""
    return _head(raw).get(KEY) == "map"


def read_map(raw: Raw, options: ReadOptions) -> ExpertMap:
    """Exactly what was written."""
    head = header("map", raw.name, _head(raw))
    table = need("pyarrow.parquet").read_table(raw.data, columns=["slots"])
    return agreed(map_of(head, _rows(table, "slots", int(head["n_slots"])), raw.name), options)


def write_map(expert_map: ExpertMap, path: Path) -> None:
    """Columns layer and slots; the header is in the metadata."""
    columns = {"layer": np.array(expert_map.layer_ids), "slots": _lists(expert_map.slot_to_expert)}
    _write(columns, map_header(expert_map) | {"n_slots": expert_map.n_slots}, path)


FORMATS = [
    Format(
        name="parquet-load",
        what="load",
        suffixes=(".parquet",),
        about="rorqual's Parquet: rows of step, layer, tokens, phase, domain, counts",
        matches=matches_load,
        read=read_load,
        write=write_load,
    ),
    Format(
        name="parquet-map",
        what="map",
        suffixes=(".parquet",),
        about="rorqual's Parquet: rows of layer, slots",
        matches=matches_map,
        read=read_map,
        write=write_map,
    ),
]
