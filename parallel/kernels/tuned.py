"""Launch settings found by measuring, kept as JSON by device: ``tuned/<device>.json``; ``rorqual bench tune`` rewrites them.

A file maps an operation to rows ``{"shape": {...}, "config": {...}, "us": microseconds}``. The row whose shape is nearest
(each number compared by its logarithm; names must be equal) gives the config, so that a shape nobody measured gets its
neighbour's.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent / "tuned"
Shape = tuple[tuple[str, Any], ...]


def device_slug(name: str) -> str:
    """``NVIDIA H200`` -> ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@lru_cache(maxsize=1)
def this_device() -> str:
    """Slug of the current GPU, ``cpu`` without one."""
    return device_slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


@lru_cache(maxsize=8)
def table(device: str) -> dict[str, list[dict[str, Any]]]:
    """All rows of a device; {} for one that was never measured.

    Raises:
        ValueError: the file is no JSON.
    """
    path = FOLDER / f"{device}.json"
    if not path.exists():
        return {}
    try:
        rows: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it or run `rorqual bench tune`") from None
    return rows


def _distance(shape: dict[str, Any], wanted: dict[str, Any]) -> float:
    total = 0.0
    for name, value in wanted.items():
        other = shape.get(name)
        if isinstance(value, (int, float)) and isinstance(other, (int, float)) and not isinstance(value, bool):
            total += abs(math.log((value + 1) / (other + 1)))
        elif value != other:
            return math.inf
    return total


@lru_cache(maxsize=4096)
def _nearest(device: str, op: str, wanted: Shape) -> dict[str, Any] | None:
    best, found = math.inf, None
    for row in table(device).get(op, []):
        distance = _distance(row["shape"], dict(wanted))
        if distance < best:
            best, found = distance, dict(row["config"])
    return found


def config_for(op: str, default: dict[str, Any], **shape: Any) -> dict[str, Any]:
    """Settings of ``op`` for a shape on this GPU: measured ones over ``default``. Cached; do not change the result.

    Where there are defaults, names they lack are dropped: a file may be older than the kernel.
    """
    found = _nearest(this_device(), op, tuple(sorted(shape.items())))
    if found is None:
        return default
    return {**default, **{name: value for name, value in found.items() if name in default or not default}}
