"""The rig's timings as rows of a result file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....attention.kv.tier import TierCounter
from ..results import Row
from .shape import RigShape
from .ways import Timing, Way

_LAYER_TARGET_US = 20.0  # added to a layer at batch 1
_TOKEN_TARGET_US = 1500.0  # added to a token at batch 1
_HIDDEN_TARGET = 0.5  # of the fetch, from batch 16 on
#: ways whose fetch runs beside other work
OVERLAPPED: tuple[Way, ...] = ("beside", "parts", "waves", "halves", "hits")


def settings(shape: RigShape, timing: Timing | None = None) -> dict[str, Any]:
    """What a figure was measured under."""
    found: dict[str, Any] = {
        "batch": shape.requests, "context": shape.context, "heads": shape.heads, "layers": shape.layers, "hot_rows": shape.hot_rows,
        "trace": shape.trace_name, "policy": shape.policy, "products": shape.with_products, "indexer": shape.with_choice,
    }  # fmt: skip
    if timing is not None:
        found["missed_percent"] = round(100.0 * timing.missed(shape.requests * shape.k), 1)
    return found


def rows_of(shape: RigShape, timings: Mapping[Way, Timing]) -> list[Row]:
    """Step times, what offloading adds, how much of the fetch is hidden, and the counters."""
    rows = []
    for way, timing in timings.items():
        peers = {"resident": timings["resident"].us} if "resident" in timings and way not in ("resident", "tier") else {}
        name = "resolve and fetch alone" if way == "tier" else f"attention of a step, {way}"
        rows.append(Row(name=name, params=settings(shape, timing), value=timing.us, unit="us", better="lower", peers=peers))
    if "resident" in timings:
        for way in ("serial", *OVERLAPPED):
            if way in timings:
                rows += _added(shape, timings, way)
    if "serial" in timings and "resolve" in timings:
        rows += _hidden(shape, timings)
        rows += _link(shape, timings)
    if "serial" in timings:
        rows += _counted(shape, timings["serial"])
    return rows


def _added(shape: RigShape, timings: Mapping[Way, Timing], way: Way) -> list[Row]:
    """Microseconds that offloading adds to a layer, and to a token."""
    extra = timings[way].us - timings["resident"].us
    aim = shape.layers == 61 and shape.requests == 1 and shape.hot_rows == 2 * shape.k and shape.trace == "published"
    params = settings(shape, timings[way])
    layer = Row(
        name=f"added to a layer, {way}", params=params, value=extra / shape.layers, unit="us", better="lower",
        target=_LAYER_TARGET_US if aim else None,
    )  # fmt: skip
    token = Row(
        name=f"added to a step, {way}", params=params, value=extra, unit="us", better="lower", target=_TOKEN_TARGET_US if aim else None
    )
    return [layer, token]


def _hidden(shape: RigShape, timings: Mapping[Way, Timing]) -> list[Row]:
    """Share of the fetch's time that other work covers."""
    floor = timings["resolve"].us
    fetch = timings["serial"].us - floor
    if fetch <= 0.0:
        return []
    aim = _HIDDEN_TARGET if shape.requests >= 16 else None
    return [
        Row(
            name=f"fetch hidden, {way}", params=settings(shape, timings[way]) | {"fetch_us_per_layer": round(fetch / shape.layers, 1)},
            value=1.0 - (timings[way].us - floor) / fetch, unit="share", better="higher", target=aim,
        )
        for way in OVERLAPPED if way in timings
    ]  # fmt: skip


def _link(shape: RigShape, timings: Mapping[Way, Timing]) -> list[Row]:
    """What the fetch draws from the link while it runs alone."""
    seconds = (timings["serial"].us - timings["resolve"].us) / 1e6
    if seconds <= 0.0:
        return []
    n_bytes = float(timings["serial"].count(TierCounter.BYTES).sum())
    return [
        Row(
            name="link, fetch alone", params=settings(shape, timings["serial"]), value=n_bytes / seconds / 1e9, unit="GB/s", better="higher"
        )
    ]


def _counted(shape: RigShape, timing: Timing) -> list[Row]:
    """Rows of a step and layer by where they were found."""
    rows = []
    for counter in (TierCounter.HITS, TierCounter.MISSES, TierCounter.RESIDENT, TierCounter.EVICTIONS, TierCounter.UNWRITTEN):
        each = timing.count(counter)
        params = settings(shape) | {"least": float(each.min()), "most": float(each.max())}
        target = 0.0 if counter is TierCounter.UNWRITTEN else None
        rows.append(
            Row(
                name=f"{counter.name.lower()} of a layer and step",
                params=params,
                value=float(each.mean()),
                unit="rows",
                better="lower",
                target=target,
            )
        )
    return rows
