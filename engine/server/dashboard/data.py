"""What the dashboard's page asks for: ``GET /dashboard.json``."""

from __future__ import annotations

import base64
import time
from array import array
from typing import Any

from ...serving.wire import Snapshot, Welcome
from .history import History, rows

#: columns of the heat map; models with more experts show several in one
_MOST_COLUMNS = 256


def dashboard(
    welcome: Welcome | None, snapshot: Snapshot | None, history: History, *, model: str = "", state: str = "ready", since: float = 0.0
) -> dict[str, Any]:
    """Everything of one moment, as plain values for JSON.

    Args:
        welcome: of the engine; None while it loads.
        snapshot: the latest one.
        history: points of the last minutes.
        model: name to show; the engine's own by default.
        state: "loading", "ready", "ending" or "lost".
        since: only points after this time.
    """
    about: dict[str, Any] = {"model": model, "state": state, "time": time.time()}
    if welcome is not None:
        about["model"] = model or welcome.model
        about |= {"version": welcome.version, "layout": welcome.layout, "dp_size": welcome.dp_size, "started": welcome.started}
        about |= {"max_model_len": welcome.max_model_len, "pool_tokens": welcome.pool_tokens, "model_type": welcome.model_type}
    found: dict[str, Any] = {"about": about, "points": history.since(since), "replicas": [], "experts": None, "heat": None}
    if snapshot is not None:
        found |= {"at": snapshot.at, "replicas": rows(snapshot), "experts": snapshot.engine.get("experts")}
        found |= {"refused": snapshot.engine.get("refused", {}), "routing": snapshot.engine.get("routing")}
        found["heat"] = heat(snapshot.engine.get("expert_counts"))
    return found


def heat(packed: dict[str, Any] | None) -> dict[str, Any] | None:
    """The load of experts in relation to the mean of their layer, 64 = mean, at most 255, as base64 of a byte a cell.

    None without counts, or while nothing was counted.
    """
    if not packed:
        return None
    columns, counts = int(packed["columns"]), array("i")
    counts.frombytes(packed["counts"])
    width = -(-columns // _MOST_COLUMNS)  # experts in a cell
    cells = bytearray()
    peaks: list[float | None] = []  # of the hottest expert of each layer, in relation to the mean
    for start in range(0, len(counts), columns):
        row = counts[start : start + columns]
        if not (total := sum(row)):
            cells.extend(bytes(-(-columns // width)))
            peaks.append(None)
            continue
        scale = 64.0 * columns / total
        groups = (row[place : place + width] for place in range(0, columns, width))
        cells.extend(min(255, round(max(group) * scale)) for group in groups)
        peaks.append(max(row) * columns / total)
    if not any(cells):
        return None
    shown = -(-columns // width)
    return {"layers": packed["layers"], "experts": columns, "columns": shown, "peaks": peaks, "cells": base64.b64encode(cells).decode()}
