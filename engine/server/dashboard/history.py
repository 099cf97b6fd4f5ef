"""The last minutes of the engine as points of a chart, made from one snapshot and the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ...serving.histogram import difference, mean, merged, quantile
from ...serving.wire import Snapshot
from ..metric_table import find

#: points that are kept, one a second while anything happens
MOST_POINTS = 600
#: seconds that a point sums up, so that few requests make a line too
WINDOW_S = 5.0
#: histograms of requests whose quantiles are drawn
_TIMES = {"ttft": "time_to_first_token_seconds", "tpot": "inter_token_latency_seconds", "e2e": "e2e_request_latency_seconds"}


class History:
    """Points of one engine. A snapshot with other replicas, or counters that fell, begins anew."""

    def __init__(self) -> None:
        self.points: deque[dict[str, Any]] = deque(maxlen=MOST_POINTS)
        self._recent: deque[Snapshot] = deque()  # of the window, and the last one before it

    def feed(self, snapshot: Snapshot) -> None:
        """The latest snapshot; one that was seen is ignored."""
        recent = self._recent
        if recent and snapshot.at <= recent[-1].at:
            return
        if recent and (len(recent[-1].replicas) != len(snapshot.replicas) or _fell(snapshot, recent[-1])):
            recent.clear()
        recent.append(snapshot)
        while len(recent) > 2 and snapshot.at - recent[1].at >= WINDOW_S:
            recent.popleft()
        if len(recent) > 1:
            self.points.append(point(snapshot, recent[0]))

    def since(self, at: float) -> list[dict[str, Any]]:
        """Points after the time ``at``."""
        return [one for one in self.points if one["at"] > at]


def _fell(now: Snapshot, before: Snapshot) -> bool:
    """The engine began anew: it has served less than before."""
    return any(a["requests"]["routed"] < b["requests"]["routed"] for a, b in zip(now.replicas, before.replicas, strict=True))


def point(now: Snapshot, before: Snapshot) -> dict[str, Any]:
    """What happened between two snapshots, over all replicas; rates are a second, times are seconds, shares are 0 to 1."""
    seconds = max(1e-3, now.at - before.at)
    pairs = list(zip(now.replicas, before.replicas, strict=True))
    found: dict[str, Any] = {"at": now.at}
    found["prompt_tps"] = _grown(pairs, "requests", "prompt_tokens") / seconds
    found["output_tps"] = _grown(pairs, "requests", "generation_tokens") / seconds
    found["ended_ps"] = sum(sum(a["requests"]["ended"].values()) - sum(b["requests"]["ended"].values()) for a, b in pairs) / seconds
    for name in ("running", "waiting"):
        found[name] = sum(replica["leader"].get(name, 0) for replica in now.replicas)
    found["kv_usage"] = _average([replica["leader"].get("kv_usage") for replica in now.replicas])
    found["prefix_hits"] = _share(_grown(pairs, "leader", "prefix_hits"), _grown(pairs, "leader", "prefix_queries"))
    for short, name in _TIMES.items():
        parts = [difference(a["requests"]["histograms"][name], b["requests"]["histograms"][name]) for a, b in pairs]
        found |= {f"{short}_p50": quantile(merged(parts), 0.5), f"{short}_p99": quantile(merged(parts), 0.99)}
    found |= _steps(pairs)
    experts = now.engine.get("experts")
    found["balance"] = None if experts is None else experts["balancedness"]
    hits, misses = _grown(pairs, "leader", "tiers", "hits"), _grown(pairs, "leader", "tiers", "misses")
    found["tier_hits"], found["tier_bps"] = _share(hits, hits + misses), _grown(pairs, "leader", "tiers", "bytes") / seconds
    found["dispatch_bps"] = _grown(pairs, "leader", "dispatch_bytes") / seconds
    return found


def _steps(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Of steps: their mean time, and the shares that were padding, idle or replayed from a graph."""
    steps, computed = _grown(pairs, "leader", "steps"), _grown(pairs, "leader", "computed_tokens")
    padding = _grown(pairs, "leader", "padding_tokens")
    times = [(find(a, ("leader", "step_seconds")), find(b, ("leader", "step_seconds"))) for a, b in pairs]
    parts = [difference(a, b) for a, b in times if a is not None]
    return {
        "step_s": mean(merged(parts)) if parts else None,
        "padding": _share(padding, padding + computed),
        "idle_steps": _share(_grown(pairs, "leader", "idle_steps"), steps),
        "graph_steps": _share(_grown(pairs, "leader", "graph_steps"), steps),
        "even_tokens": _share(computed, _grown(pairs, "leader", "busiest_tokens")),
    }


def _grown(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], *path: str) -> float:
    """How much a counter has grown, over the replicas; one that fell began anew."""
    total = 0.0
    for a, b in pairs:
        value, old = find(a, path) or 0, find(b, path) or 0
        total += value - old if value >= old else value
    return total


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    """A row of the table for each DP rank, as of now, with counts since the start."""
    found = []
    routing: Mapping[str, Any] = snapshot.engine.get("routing") or {}
    for place, replica in enumerate(snapshot.replicas):
        leader, requests = replica["leader"], replica["requests"]
        row = {"engine": replica["dp_rank"], "open": requests["open"], "age": replica["age"]}
        row |= {name: leader.get(name) for name in ("running", "waiting", "kv_usage", "pages", "preemptions", "steps", "dispatch_bytes")}
        row |= {name: requests[name] for name in ("prompt_tokens", "generation_tokens", "routed")}
        row["ended"] = requests["ended"]
        row["prefix_hits"] = _share(leader.get("prefix_hits", 0), leader.get("prefix_queries", 0))
        row["tiers"] = leader.get("tiers")
        row["eplb"] = leader.get("eplb")
        hits, blocks = routing.get("hit_blocks"), routing.get("prompt_blocks")
        if isinstance(hits, list) and isinstance(blocks, list) and place < min(len(hits), len(blocks)):
            row["routing_hits"] = _share(hits[place], blocks[place])
        found.append(row)
    return found
