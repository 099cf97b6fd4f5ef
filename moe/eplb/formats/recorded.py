"""Writes what a running engine has recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ....parallel.group import Group
from ..load.recorder import LoadRecorder, TokenRecord
from ..topology import Ints
from ..trace import LoadTrace
from .registry import write_load
from .sglang_load import write_records


def dump(recorder: LoadRecorder, path: str | Path, group: Group | None = None, *, slot_to_expert: Ints | None = None) -> list[Path]:
    """Write the recorded steps. Collective over the EP group; returns the files that this rank wrote.

    Modes stat, stat_approx and per_pass: the first rank writes the sum of all ranks to ``path``, in the format of its suffix; ``.pt`` is
    SGLang's dump of the mode. Mode per_token: every rank writes its own tokens beside each other, as ``NAME_RANK.pt``; ``read_load``
    of all of them gives the sum.

    Args:
        recorder: with a mode.
        path: the file.
        group: the EP group; None: this rank alone.
        slot_to_expert: [layers, slots] the placement now, for SGLang's records of slots; None: slot s holds expert s.

    Raises:
        ValueError: nothing was recorded, or the suffix is of no format.
    """
    path, rank = Path(path), 0 if group is None else group.index
    trace = recorder.trace(group)
    rows = None if slot_to_expert is None else _every_layer(slot_to_expert, recorder.layer_ids, trace.n_experts)
    if recorder.mode == "per_token":
        mine = LoadTrace(
            counts=recorder.local_counts(),
            layer_ids=recorder.layer_ids,
            top_k=recorder.top_k,
            tokens=np.array([note.tokens for note in recorder.notes], dtype=np.int64),
            phase=np.array([note.phase for note in recorder.notes], dtype=np.int64),
            n_ranks=1,
            meta=trace.meta | {"rank": str(rank)},
        )
        tokens = [_tokens(record, rank, rows, recorder.layer_ids, trace.n_experts) for record in recorder.token_records()]
        file = path.with_name(f"{path.stem}_{rank}.pt")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_records(mine, file, rows, tokens)
        return [file]
    if rank != 0:
        return []
    if path.suffix == ".pt" and recorder.mode == "per_pass":
        path.parent.mkdir(parents=True, exist_ok=True)
        write_records(trace, path, rows)
        return [path]
    return [write_load(trace, path)]


def _every_layer(slot_to_expert: Ints, layer_ids: tuple[int, ...], n_experts: int) -> Ints:
    """[model layers, slots]; rows of dense layers hold expert s % experts in slot s."""
    whole = np.tile(np.arange(slot_to_expert.shape[1]) % n_experts, (max(layer_ids) + 1, 1))
    whole[list(layer_ids)] = slot_to_expert
    return whole


def _tokens(record: TokenRecord, rank: int, rows: Ints | None, layer_ids: tuple[int, ...], n_experts: int) -> dict[str, Any]:
    """What a record of tokens has beside its counts: ids of slots, of each expert the first that holds it; -1 in dense layers."""
    ids = record.ids.numpy().astype(np.int64)
    whole = np.full((max(layer_ids) + 1, *ids.shape[1:]), -1, dtype=np.int64)
    for i, layer in enumerate(layer_ids):
        first = np.arange(n_experts) if rows is None else _first_slots(rows[layer], n_experts)
        whole[layer] = first[ids[i]]
    more = {"input_ids": record.token_ids, "positions": record.positions}
    found = {name: value.numpy() for name, value in more.items() if value is not None}
    return {"rank": rank, "forward_pass_id": record.step, "topk_ids_of_layer": whole} | found


def _first_slots(slots: Ints, n_experts: int) -> Ints:
    """[experts] first slot of each; -1 where there is none."""
    found = np.full(n_experts, -1, dtype=np.int64)
    for slot in range(len(slots) - 1, -1, -1):
        if slots[slot] >= 0:
            found[slots[slot]] = slot
    return found
