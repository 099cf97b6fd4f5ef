"""Reads and writes loads and placements; tells formats apart by what files hold."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ..topology import Ints, Topology
from ..trace import LoadTrace
from . import ascend, eplb_tensors, jsonl, parquet, sglang_load, sglang_map, trtllm, vllm
from .expert_map import ExpertMap
from .files import Raw, read_raw
from .merge import merge
from .options import Format, ReadOptions

#: all formats; the first that matches is it
FORMATS: tuple[Format, ...] = (
    *jsonl.FORMATS, *parquet.FORMATS, *sglang_load.FORMATS, *vllm.FORMATS, *sglang_map.FORMATS, *ascend.FORMATS, *trtllm.FORMATS,
    *eplb_tensors.FORMATS,
)  # fmt: skip
_DUMP = re.compile(r"expert_distribution_recorder_.*?(?:_(\d+))?\.pt$")
Source = str | Path


def sniff(source: Source) -> str:
    """Name of the format of a file, a folder, or JSON given as text; it ends in "load" or "map".

    Raises:
        ValueError: no format is like this.
    """
    return _opened(source, None, None)[1].name


def format_named(name: str) -> Format:
    """The format of this name. ValueError: there is none."""
    found = next((each for each in FORMATS if each.name == name), None)
    if found is None:
        raise ValueError(f"no format is named {name!r}; there are {', '.join(each.name for each in FORMATS)}")
    return found


def read_load(
    source: Source | Sequence[Source],
    *,
    format: str | None = None,
    n_experts: int | None = None,
    layer_ids: Sequence[int] | None = None,
    scale: float | None = None,
    slot_to_expert: Ints | None = None,
) -> LoadTrace:
    """The load of a file; of several files or a folder of dumps, the sum over their ranks.

    Layers are as in the file: dumps that number all layers of the model have dense layers, of zeros (``drop_zero_layers``).
    ``problems`` says what is suspicious.

    Args:
        source: a path, JSON as text, or several of them.
        format: name of the format; None: told by the contents.
        n_experts: logical experts of a layer, where the file does not say.
        layer_ids: numbers of the layers, where the file does not say; those to read, where it numbers them.
        scale: multiplies values that are shares or means, to make counts of them.
        slot_to_expert: [layers, slots] placement under which counts of slots were recorded, where the file does not say.

    Raises:
        ValueError: what is wrong with the file, or with how files fit each other.
    """
    options = ReadOptions(
        n_experts=n_experts, layer_ids=None if layer_ids is None else tuple(layer_ids), scale=scale, slot_to_expert=slot_to_expert
    )
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a finite number above 0, found {scale}")
    sources = [source] if isinstance(source, str | Path) else list(source)
    found = []
    for each in [file for one in sources for file in _dumps(one)]:
        trace = _picked(_read(each, format, "load", options), options, str(each))
        found.append(_with_rank(trace, each) if len(sources) > 1 or Path(str(each)) != Path(str(sources[0])) else trace)
    return merge(found)


def read_map(
    source: Source,
    *,
    format: str | None = None,
    n_experts: int | None = None,
    layer_ids: Sequence[int] | None = None,
    topology: Topology | None = None,
) -> ExpertMap:
    """The placement of a file, or of JSON given as text.

    Args:
        source: a path, or JSON as text.
        format: name of the format; None: told by the contents.
        n_experts: logical experts of a layer; None: as the file says, or one more than its largest id.
        layer_ids: numbers of the layers, where the file does not say; those to read, where it numbers them.
        topology: of the slots, where the file does not say.

    Raises:
        ValueError: what is wrong with the file.
    """
    options = ReadOptions(n_experts=n_experts, layer_ids=None if layer_ids is None else tuple(layer_ids), topology=topology)
    found: ExpertMap = _read(source, format, "map", options)
    if options.layer_ids is not None and found.layer_ids != options.layer_ids:
        found = found.pick(options.layer_ids)
    return found if topology is None or found.topology is not None else replace(found, topology=topology)


def write_load(trace: LoadTrace, path: Source, *, format: str | None = None) -> Path:
    """Write a load, in the format named or that of the suffix.

    .parquet and .jsonl keep everything; .pt is SGLang's, .json vLLM's, .npz and .safetensors are EPLB's.

    Raises:
        ValueError: an unknown format or suffix, or a trace that the format cannot say.
    """
    return _write(trace, Path(path), format, "load")


def write_map(expert_map: ExpertMap, path: Source, *, format: str | None = None) -> Path:
    """Write a placement, in the format named or that of the suffix.

    .parquet and .jsonl keep everything; .json and .pt are SGLang's, .yaml is TRT-LLM's, .npz and .safetensors are EPLB's.

    Raises:
        ValueError: an unknown format or suffix, or a placement that the format cannot say.
    """
    return _write(expert_map, Path(path), format, "map")


def _write(value: Any, path: Path, name: str | None, what: Literal["load", "map"]) -> Path:
    found = format_named(name) if name is not None else next((f for f in FORMATS if f.what == what and path.suffix in f.suffixes), None)
    if found is None:
        known = sorted({suffix for each in FORMATS if each.what == what for suffix in each.suffixes if suffix})
        raise ValueError(f"{path}: no format of a {what} has the suffix {path.suffix!r}; use one of {', '.join(known)}, or name the format")
    if found.what != what or found.write is None:
        raise ValueError(f"format {found.name} cannot be written as a {what}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if found.suffixes == ("",):  # a folder
        found.write(value, path)
        return path
    part = path.with_name(f".part-{os.getpid()}-{path.name}")  # a reader never sees half a file
    try:
        found.write(value, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _opened(source: Source, name: str | None, what: str | None) -> tuple[Raw, Format]:
    """Contents and format; nothing but ValueError comes of it."""
    try:
        raw = read_raw(source)
        return raw, _format_of(raw, name, what)
    except ValueError:
        raise
    except Exception as error:  # libraries raise errors of their own on damaged files
        raise ValueError(f"{str(source)[:200]}: cannot be read: {error!r}; it is damaged, or of an unknown kind") from error


def _read(source: Source, name: str | None, what: str, options: ReadOptions) -> Any:
    """What the file holds."""
    raw, found = _opened(source, name, what)
    try:
        return found.read(raw, options)
    except ValueError:
        raise
    except Exception as error:  # a key or a row that is not as the format says, anywhere
        raise ValueError(f"{raw.name}: cannot be read as {found.name}: {error!r}; it is damaged, or of another version") from error


def _format_of(raw: Raw, name: str | None, what: str | None) -> Format:
    """The format that is named, or that the contents are of."""
    found = format_named(name) if name is not None else next((each for each in FORMATS if each.matches(raw)), None)
    if found is None:
        keys = f" with keys {sorted(map(str, raw.data))[:8]}" if isinstance(raw.data, dict) else ""
        raise ValueError(f"{raw.name}: a {raw.kind} file{keys} of no known format; known are {', '.join(each.name for each in FORMATS)}")
    if what is not None and found.what != what:
        raise ValueError(f"{raw.name}: is a {found.what} ({found.name}), a {what} was asked for")
    return found


def _dumps(source: Source) -> list[Source]:
    """The dumps of a folder; anything else is itself."""
    if isinstance(source, str) and source.lstrip()[:1] in ("{", "["):
        return [source]
    path = Path(source)
    if not path.is_dir() or trtllm.matches_load(Raw(kind="folder", data=path, name=str(path))):
        return [source]
    found: list[Source] = sorted(file for file in path.iterdir() if _DUMP.search(file.name))
    if not found:
        raise ValueError(f"{path}: this folder has neither dumps (expert_distribution_recorder_*.pt) nor statistics (rank*.safetensors)")
    return found


def _picked(trace: LoadTrace, options: ReadOptions, name: str) -> LoadTrace:
    """The layers that were asked for.

    Raises:
        ValueError: some are not there.
    """
    if options.layer_ids is None or trace.layer_ids == options.layer_ids:
        return trace
    row = {layer: i for i, layer in enumerate(trace.layer_ids)}
    absent = [layer for layer in options.layer_ids if layer not in row]
    if absent or len(set(options.layer_ids)) < len(options.layer_ids):
        what = f"layers {absent} are not in it" if absent else f"layers {list(options.layer_ids)} were asked for, some twice"
        raise ValueError(f"{name}: {what}; it has {list(trace.layer_ids)}")
    return replace(trace, counts=trace.counts[:, [row[layer] for layer in options.layer_ids]], layer_ids=options.layer_ids)


def _with_rank(trace: LoadTrace, source: Source) -> LoadTrace:
    """The trace with the rank that its file's name says, if the file does not say it."""
    match = _DUMP.search(Path(str(source)).name)
    if match is None or match[1] is None or "rank" in trace.meta or "ranks" in trace.meta:
        return trace
    return replace(trace, meta=trace.meta | {"rank": match[1]})
