"""Read what ``bench serve`` wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....parallel.json_text import parse_json

#: keys that a result of a served run has, whoever wrote it
_MARKS = ("output_throughput", "completed", "duration")


def is_run(value: Any) -> bool:
    """Whether it is the result of a served run."""
    return isinstance(value, dict) and all(key in value for key in _MARKS)


def read_runs(paths: Sequence[str | Path]) -> list[dict[str, Any]]:
    """All runs of files and of folders' ``.json`` and ``.jsonl`` files, in the order of names; each gets its "file".

    Raises:
        ValueError: a file that was named holds something else, or there is no run at all.
        OSError: it cannot be read.
    """
    found: list[dict[str, Any]] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in (".json", ".jsonl"))
            found += [run for p in inside for run in _runs(p) if is_run(run)]
            continue
        runs = _runs(path)
        if not runs or not all(map(is_run, runs)):
            raise ValueError(f"{path} is no result of `rorqual bench serve` or `bench sweep`: it lacks {', '.join(_MARKS)}")
        found += runs
    if not found:
        raise ValueError(f"no results of served runs in {', '.join(map(str, paths))}")
    return found


def _runs(path: Path) -> list[dict[str, Any]]:
    """The objects in a file: one, or one a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    try:
        values = [parse_json(text)]
    except json.JSONDecodeError:
        try:
            values = [parse_json(line) for line in text.split("\n") if line.strip()]
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON, nor JSON lines: {error}") from None
    values = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    return [{**value, "file": str(path)} if isinstance(value, dict) else {} for value in values]
