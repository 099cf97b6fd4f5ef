"""SGLang's recorder dumps (``.pt``): mode stat, and the records of modes per_pass and per_token.

Layers are numbered by the model, dense layers included: their counts are zero. Of modes per_pass and per_token each rank writes its own
file; ``merge`` sums them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..topology import Ints
from ..trace import LoadTrace
from .expert_map import logical_to_physical, physical_to_logical
from .files import Raw, write_pt
from .note import KEY, note_of, with_note
from .options import Format, ReadOptions
from .values import counts_of, expert_count, first_of, integers

#: spellings of the counts of slots in a record
_PHYSICAL = ("global_physical_count", "physical_count")
_MAP = ("last_physical_to_logical_map", "physical_to_logical_map")


def matches_stat(raw: Raw) -> bool:
    """A dict with logical counts."""
    return raw.kind in ("pt", "json") and isinstance(raw.data, dict) and "logical_count" in raw.data


def read_stat(raw: Raw, options: ReadOptions) -> LoadTrace:
    """Counts [steps, layers, experts], or without steps."""
    counts = counts_of(raw.data["logical_count"], f"{raw.name}: logical_count", options.scale)
    return _trace(counts, raw.data, raw.name, options)


def write_stat(trace: LoadTrace, path: Path) -> None:
    """As mode stat dumps; what SGLang's dump has no place for goes under a key that it does not read."""
    write_pt({"rank": 0, "logical_count": _every_layer(trace), KEY: note_of(trace)}, path)


def matches_records(raw: Raw) -> bool:
    """A dict with records of passes."""
    return raw.kind == "pt" and isinstance(raw.data, dict) and isinstance(raw.data.get("records"), list)


def read_records(raw: Raw, options: ReadOptions) -> LoadTrace:
    """Records of passes, summed over the ranks and gatherers that one file has, in the order of their passes.

    Counts of slots are counted as of the experts that held the slots at the end; a dump says no more.
    """
    records = raw.data["records"]
    if not records:
        raise ValueError(f"{raw.name}: no pass was recorded")
    placement = options.slot_to_expert
    if placement is None:
        held = first_of(raw.data, *_MAP)
        placement = None if held is None else integers(held, f"{raw.name}: physical_to_logical_map", 2)
    found: dict[int, Ints] = {}
    for record in records:
        step = int(record.get("forward_pass_id", len(found)))
        counts = _record_counts(record, placement, f"{raw.name}, pass {step}", options)
        found[step] = found[step] + counts if step in found else counts
    steps = sorted(found)
    trace = _trace(np.stack([found[step] for step in steps]), raw.data, raw.name, options)
    ranks = sorted({int(record["rank"]) for record in records if record.get("rank") is not None})
    said = {"passes": f"{steps[0]}-{steps[-1]}"} | ({"ranks": ",".join(map(str, ranks))} if ranks else {})
    return trace if KEY in raw.data else _with_meta(trace, said)


def write_records(trace: LoadTrace, path: Path, slot_to_expert: Ints | None = None, tokens: list[dict[str, Any]] | None = None) -> None:
    """As mode per_pass dumps (per_token, with ``tokens``: what each record has beside its counts).

    ``slot_to_expert`` [model layers, slots] is the placement; None: slot s holds expert s. Counts are split evenly over replicas.
    """
    counts = _every_layer(trace)
    n_layers, n_experts = counts.shape[1:]
    placement = np.tile(np.arange(n_experts), (n_layers, 1)) if slot_to_expert is None else slot_to_expert
    physical = logical_to_physical(counts, placement)
    first = int(trace.meta.get("first_step", 0))
    records = [
        {"forward_pass_id": first + step, "rank": 0, "gatherer_key": "primary", "global_physical_count": physical[step]}
        | (tokens[step] if tokens is not None else {})
        for step in range(trace.n_steps)
    ]
    write_pt({"records": records, "last_physical_to_logical_map": placement, KEY: note_of(trace)}, path)


def _record_counts(record: Mapping[str, Any], placement: Ints | None, what: str, options: ReadOptions) -> Ints:
    """[layers, experts] of one record."""
    logical = record.get("logical_count")
    if logical is not None:
        whole: Ints = counts_of(logical, what)[0]
        return whole
    physical = first_of(dict(record), *_PHYSICAL)
    if physical is None and record.get("topk_ids_of_layer") is not None:
        physical = _counted(integers(record["topk_ids_of_layer"], what, 3), placement, options, what)
    if physical is None:
        raise ValueError(f"{what}: has neither {_PHYSICAL[0]} nor topk_ids_of_layer, found {sorted(record)}")
    counts = counts_of(physical, what)[0]
    if placement is None:
        raise ValueError(f"{what}: has counts of slots and the file no physical_to_logical_map; give the placement (`slot_to_expert`)")
    return physical_to_logical(counts, placement, expert_count(placement, options.n_experts, what))


def _counted(ids: Ints, placement: Ints | None, options: ReadOptions, what: str) -> Ints:
    """Counts [layers, slots] of ids [layers, tokens, top_k]; -1 is padding."""
    n = options.n_experts if placement is None else placement.shape[1]
    if n is None:
        raise ValueError(f"{what}: has ids of slots and the file no physical_to_logical_map; give the placement (`slot_to_expert`)")
    return np.stack([np.bincount(layer[layer >= 0].ravel(), minlength=n) for layer in ids])


def _trace(counts: Ints, data: Mapping[str, Any], name: str, options: ReadOptions) -> LoadTrace:
    """The counts with what the file says of them."""
    if isinstance(data.get(KEY), dict):
        note = data[KEY]
        return with_note(counts[:, [int(layer) for layer in note["layer_ids"]]], note)
    rank = data.get("rank")
    trace = LoadTrace(counts=counts, layer_ids=tuple(range(counts.shape[1])), meta={} if rank is None else {"rank": str(int(rank))})
    if options.layer_ids is None:
        return trace
    outside = [layer for layer in options.layer_ids if not 0 <= layer < counts.shape[1]]
    if outside:
        raise ValueError(f"{name}: has layers 0 to {counts.shape[1] - 1}, numbered by the model; found layer ids {outside}")
    return LoadTrace(counts=counts[:, list(options.layer_ids)], layer_ids=options.layer_ids, meta=trace.meta)


def _with_meta(trace: LoadTrace, more: dict[str, str]) -> LoadTrace:
    return LoadTrace(counts=trace.counts, layer_ids=trace.layer_ids, meta=trace.meta | more)


def _every_layer(trace: LoadTrace) -> Ints:
    """[steps, model layers, experts]: layers that are not in the trace are zero. ValueError: ids that number no layers."""
    if min(trace.layer_ids, default=0) < 0 or len(set(trace.layer_ids)) < len(trace.layer_ids):
        raise ValueError(
            f"SGLang's dump has a row for each layer of the model; layer ids must be 0 or more, each once, found {trace.layer_ids}"
        )
    whole = np.zeros((trace.n_steps, max(trace.layer_ids) + 1, trace.n_experts), dtype=np.int64)
    whole[:, list(trace.layer_ids)] = trace.counts
    return whole


FORMATS = [
    Format(
        name="sglang-load",
        what="load",
        suffixes=(".pt",),
        about="SGLang recorder, modes stat and stat_approx: logical_count [steps, layers, experts]",
        matches=matches_stat,
        read=read_stat,
        write=write_stat,
    ),
    Format(
        name="sglang-pass-load",
        what="load",
        suffixes=(".pt",),
        about="SGLang recorder, modes per_pass and per_token: records with counts of slots, and the placement",
        matches=matches_records,
        read=read_records,
        write=write_records,
    ),
]
