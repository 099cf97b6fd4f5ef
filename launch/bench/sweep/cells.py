"""What a sweep measures: servers, and the loads on each."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....parallel.json_text import parse_json
from ...text_lines import numbered_lines
from ..datasets.config import DatasetConfig
from ..datasets.make import dataset_of
from ..serve.config import ServeBenchConfig
from .config import SweepConfig, devices_of, layout_flags

#: datasets whose number of requests follows the concurrency
_COUNTED = ("random", "random-ids", "sharegpt")


@dataclass(frozen=True, kw_only=True)
class ServerCase:
    """A server to start."""

    name: str  # for people and for file names
    flags: tuple[str, ...]  # added to the command
    layout: str | None = None
    devices: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoadCase:
    """A load to put on it."""

    key: str  # the same for the same load
    load: ServeBenchConfig
    dataset: DatasetConfig


def server_cases(config: SweepConfig) -> list[ServerCase]:
    """Each layout with each set of flags; ValueError when the file of flags is none."""
    found = []
    for layout in config.layouts or ("",):
        for name, flags in _params(config.serve_params):
            words = (layout_flags(layout) if layout else []) + flags
            title = " ".join(part for part in (layout, name) if part) or "server"
            found.append(ServerCase(name=title, flags=tuple(words), layout=layout or None, devices=devices_of(layout) if layout else None))
    return found


def _params(path: str | None) -> list[tuple[str, list[str]]]:
    """(name, flags) of each set in a file."""
    if path is None:
        return [("", [])]
    try:
        values = parse_json(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--serve-params {path} is not JSON: {error}") from None
    if isinstance(values, dict):
        values = [{"_name": name, **(flags if isinstance(flags, dict) else {"": flags})} for name, flags in values.items()]
    if not isinstance(values, list) or not values or not all(isinstance(v, dict) and "" not in v for v in values):
        raise ValueError(f"--serve-params {path} must be a list of objects of flags, or an object of such objects by name")
    return [_named(value) for value in values]


def _named(value: dict[str, Any]) -> tuple[str, list[str]]:
    name = str(value.get("_name", ", ".join(f"{k}={v}" for k, v in value.items())))
    words: list[str] = []
    for key, setting in value.items():
        if key == "_name":
            continue
        flag = "--" + key.replace("_", "-").lstrip("-")
        if isinstance(setting, bool):
            words.append(flag if setting else "--no-" + flag[2:])
        else:
            words += [flag, setting if isinstance(setting, str) else json.dumps(setting)]
    return name, words


def load_cases(config: SweepConfig, load: ServeBenchConfig, dataset: DatasetConfig) -> list[LoadCase]:
    """Each concurrency, then each rate, as often as asked; the load as it is when neither is given."""
    loads = [replace(load, max_concurrency=n) for n in config.concurrency]
    loads += [replace(load, request_rate=rate) for rate in config.request_rates]
    found = []
    for one in loads or [load]:
        sized = dataset
        if dataset.num_prompts is None and one.max_concurrency is not None and dataset_of(dataset) in _COUNTED:
            sized = replace(dataset, num_prompts=one.max_concurrency * config.prompts_per_client)
        for number in range(config.num_runs):
            key = f"concurrency={one.max_concurrency} rate={one.request_rate:g} run={number}"
            found.append(LoadCase(key=key, load=replace(one, seed=load.seed + number), dataset=sized))
    return found


def done(path: Path) -> set[tuple[str, str]]:
    """(server, load) of each run that a file holds."""
    if not path.exists():
        return set()
    try:
        runs = [parse_json(line) for _, line in numbered_lines(path)]
        return {(run["sweep_server"], run["sweep_load"]) for run in runs}
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path} is no file of a sweep; name another folder with --output-dir") from None
