"""Loads and maps of experts in files, whoever wrote them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..generate import check_writable

if TYPE_CHECKING:
    from ...moe.eplb.formats import ExpertMap
    from ...moe.eplb.topology import Ints, Topology
    from ...moe.eplb.trace import LoadTrace


def load_of(paths: Sequence[str]) -> LoadTrace:
    """The load in a file or a folder, or in the files of several ranks, without layers that have none.

    What is suspicious about it is said on stderr.

    Raises:
        ValueError: no load in it.
        OSError: no such file, or one that cannot be read.
    """
    from ...moe.eplb.formats import drop_zero_layers, problems, read_load

    exist(paths)
    try:
        trace = read_load(paths[0] if len(paths) == 1 else list(paths))
    except ValueError as error:
        raise ValueError(str(error) if any(path in str(error) for path in paths) else f"{', '.join(paths)}: {error}") from None
    for problem in problems(trace):
        print(f"note: {problem.text}", file=sys.stderr)
    if not trace.counts.any():
        raise ValueError(f"{', '.join(paths)}: nothing was routed: all counts are zero")
    return drop_zero_layers(trace)


def save_load(trace: LoadTrace, path: str, to: str | None = None) -> None:
    """Write a load; the end of the name chooses the format unless ``to`` does.

    Raises:
        ValueError: a format that there is not, or that cannot hold this load.
        OSError: the file cannot be written.
    """
    from ...moe.eplb.formats import write_load

    write_load(trace, path, format=to)


def map_of(path: str, n_experts: int | None = None) -> ExpertMap:
    """The map of experts in a file, or in JSON given as text.

    Raises:
        ValueError: no map in it.
        OSError: no such file, or one that cannot be read.
    """
    from ...moe.eplb.formats import read_map

    exist([path])
    try:
        return read_map(path, n_experts=n_experts)
    except ValueError as error:
        raise ValueError(str(error) if path in str(error) else f"{path}: {error}") from None


def slots_of(path: str, trace: LoadTrace, machine: Topology) -> Ints:
    """[layers, slots] of a map for the layers of a load.

    Raises:
        ValueError: a map of other layers, or of another number of slots.
        OSError: no such file, or one that cannot be read.
    """
    found = map_of(path, trace.n_experts)
    if found.n_experts != trace.n_experts:
        raise ValueError(f"{path} places {found.n_experts} experts a layer, the load has {trace.n_experts}: they are of different models")
    if found.n_slots != machine.n_slots:
        raise ValueError(f"{path} has {found.n_slots} slots a layer and the machine {machine.n_slots}; give --slots {found.n_slots}")
    if found.topology is not None and found.topology.slots != machine.slots:
        raise ValueError(
            f"{path} was made for ranks of {_numbers(found.topology.slots)} slots and the machine has {_numbers(machine.slots)}: other "
            f"experts are together; leave --ranks out, or give --ranks {found.topology.n_ranks}"
        )
    if set(trace.layer_ids) <= set(found.layer_ids):
        return found.slot_to_expert[[found.layer_ids.index(layer) for layer in trace.layer_ids]]
    counted = tuple(range(len(trace.layer_ids)))
    if len(found.layer_ids) == len(trace.layer_ids) and counted in (found.layer_ids, trace.layer_ids):
        return found.slot_to_expert  # one of them does not know the model's numbers
    raise ValueError(f"{path} has the layers {_numbers(found.layer_ids)} and the load {_numbers(trace.layer_ids)}, which do not match")


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:8])) + (f" .. ({len(values)})" if len(values) > 8 else "")


def save_map(slots: Ints, trace: LoadTrace, machine: Topology, path: str, to: str | None = None) -> None:
    """Write the map [layers, slots] that was planned for a load.

    Raises:
        ValueError: a format that there is not, or that cannot hold this map.
        OSError: the file cannot be written.
    """
    from ...moe.eplb.formats import ExpertMap, write_map

    meta = {key: value for key, value in trace.meta.items() if key in ("model", "source")}
    found = ExpertMap(slot_to_expert=slots, n_experts=trace.n_experts, layer_ids=trace.layer_ids, topology=machine, meta=meta)
    write_map(found, path, format=to)


def check_steps(path: str, to: str | None = None) -> None:
    """Refuse a file for several steps whose format holds one load only, before the work is done.

    Raises:
        ValueError: naming the file and what to write instead.
    """
    if to == "eplb-load" or (to is None and Path(path).suffix in (".npz", ".safetensors")):
        raise ValueError(f"--out {path}: EPLB's tensors hold one load without steps; write .parquet, .jsonl, .json or .pt")


def check_out(path: str | None, to: str | None = None, what: str | None = None) -> None:
    """Refuse an output file that cannot be written, before the work is done.

    Args:
        path: of the file.
        to: format that was asked for.
        what: "load" or "map": then the format must be one of those; None: whatever it is.

    Raises:
        ValueError: naming the file and why.
    """
    check_writable(path, "--out")
    if path is None or what is None:
        return
    from ...moe.eplb.formats import FORMATS

    known = [each for each in FORMATS if each.what == what and each.write is not None]
    if to is not None and to not in [each.name for each in known]:
        raise ValueError(f"--to {to}: a {what} is written as one of {', '.join(each.name for each in known)}")
    suffixes = sorted({suffix for each in known for suffix in each.suffixes if suffix})
    if to is None and Path(path).suffix not in suffixes:
        raise ValueError(f"--out {path}: the name must end in one of {', '.join(suffixes)}, or --to must name the format")


def exist(paths: Sequence[str]) -> None:
    """FileNotFoundError: one of them is neither a file nor JSON given as text."""
    for path in paths:
        if path.lstrip()[:1] not in ("{", "[") and not Path(path).exists():
            raise FileNotFoundError(2, "No such file or directory", path)
