"""Files of a run: vLLM's keys, and with them what it ran on."""

from __future__ import annotations

import json
import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from .... import __version__
from ..results import Results, Row, command_line, today
from .config import ServeBenchConfig, TargetConfig
from .run import Measured, now

_PACKAGES = ("torch", "numpy", "msgspec", "httptools", "uvloop")


def client_versions() -> dict[str, str | None]:
    """Versions of what made the load."""
    found: dict[str, str | None] = {"rorqual": __version__, "python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def record(measured: Measured, target: TargetConfig, load: ServeBenchConfig) -> dict[str, Any]:
    """All that the file holds; ``save_detailed`` adds each request."""
    result: dict[str, Any] = {
        "date": now(),
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": load.label or target.backend,
        "model_id": measured.facts["model_id"],
        "tokenizer_id": target.tokenizer or measured.facts["model_id"],
        "dataset": measured.facts["dataset"],
        "num_prompts": measured.figures["completed"] + measured.figures["failed"],
        **load.notes,
        "request_rate": load.request_rate if math.isfinite(load.request_rate) else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        **measured.figures,
        "error_counts": measured.errors,
        "warnings": list(measured.warnings),
        "server": measured.facts["server"],
        "device": load.notes.get("device") or measured.facts["server"].get("device"),
        "layout": load.notes.get("layout") or measured.facts["server"].get("layout"),
        "versions": client_versions(),
        "command": command_line(),
    }
    return result | measured.details if load.save_detailed else result


def file_of(result: dict[str, Any], load: ServeBenchConfig) -> Path:
    """Where the result goes; the name is vLLM's unless one was given."""
    name = load.result_filename
    if name is None:
        rate = f"{load.request_rate}qps"
        if load.ramp_up_strategy is not None:
            rate = f"ramp-up-{load.ramp_up_strategy}-{load.ramp_up_start_rps}qps-{load.ramp_up_end_rps}qps"
        most = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
        model = str(result["model_id"]).rstrip("/").rpartition("/")[2] or "model"
        name = f"{result['label']}-{rate}{most}-{model}-{result['date']}.json".replace("/", "_")
    return Path(load.result_dir) / name


def save(result: dict[str, Any], load: ServeBenchConfig) -> Path:
    """Write the file, or add a line to it.

    Raises:
        OSError: it cannot be written.
    """
    path = file_of(result, load)
    path.parent.mkdir(parents=True, exist_ok=True)
    if load.append_result:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
    else:
        path.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def rows(result: dict[str, Any]) -> Results:
    """The figures as a result file of the project's kind."""
    names = ("model_id", "dataset", "request_rate", "max_concurrency", "num_prompts", "layout")
    params = {name: result[name] for name in names if result.get(name) is not None}
    kinds = [("output_throughput", "output tokens/s", "higher"), ("request_throughput", "requests/s", "higher")]
    kinds += [(f"{word}_{name}_ms", "ms", "lower") for name in ("ttft", "tpot", "itl", "e2el") for word in ("median", "p99")]
    found = [
        Row(
            name=f"served, {key.replace('_', ' ')}",
            params=params,
            value=result[key],
            unit=unit,
            better="higher" if way == "higher" else "lower",
        )
        for key, unit, way in kinds
        if result.get(key) is not None
    ]
    device = str(result.get("device") or "unknown")
    return Results(bench="serve", command=result["command"], date=today(), device=device, versions=result["versions"], rows=tuple(found))
