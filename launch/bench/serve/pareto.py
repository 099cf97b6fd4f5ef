"""Throughput against latency: each run is a point, and those that no other beats at both are the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Point:
    """A run as a trade."""

    layout: str  # of the server
    load: str  # such as "concurrency 8"
    speed: float  # tokens per second that one user sees: 1000 / median TPOT in ms
    throughput: float  # output tokens per second of the whole server, per device
    ttft_ms: float  # median
    run: dict[str, Any]  # the run


def points(runs: Sequence[dict[str, Any]]) -> list[Point]:
    """The runs that have a time per token, as points; throughput is per device where all of them say how many there were."""
    found = []
    known = per_device(runs)
    for run in runs:
        tpot = run.get("median_tpot_ms")
        if not tpot or not run["completed"]:
            continue
        share = run["devices"] if known else 1
        found.append(
            Point(
                layout=str(run.get("layout") or run.get("label") or "server"), load=load_of(run), speed=1000.0 / tpot,
                throughput=run["output_throughput"] / share, ttft_ms=float(run.get("median_ttft_ms") or 0.0), run=run,
            )
        )  # fmt: skip
    return found


def per_device(runs: Sequence[dict[str, Any]]) -> bool:
    """Whether all runs say how many devices there were."""
    return all(isinstance(run.get("devices"), int) and run["devices"] > 0 for run in runs)


def load_of(run: dict[str, Any]) -> str:
    """What arrived at the server, in words."""
    rate, most = run.get("request_rate", "inf"), run.get("max_concurrency")
    parts = [] if rate in ("inf", None) else [f"{rate:g} requests/s"]
    return ", ".join(parts + ([] if most is None else [f"concurrency {most}"])) or "all at once"


def frontier(found: Sequence[Point]) -> list[Point]:
    """The points that no other beats at speed and throughput both, from the fastest for one user on."""
    best: list[Point] = []
    for point in sorted(found, key=lambda p: (-p.speed, -p.throughput)):
        if not best or point.throughput > best[-1].throughput:
            best.append(point)
    return best
