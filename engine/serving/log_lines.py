"""A line in the log for each replica every few seconds, while there is something to tell."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .histogram import difference, mean
from .wire import Snapshot

log = logging.getLogger("rorqual")


class LogLines:
    """Turns snapshots into lines of rates. Silent while nothing happens, after a last line that says so."""

    def __init__(self, every_s: float, say: Callable[[str], None] | None = None) -> None:
        """``every_s``: seconds between lines, 0: none. ``say``: takes a line; by default the log."""
        self._every_s = every_s
        self._say = say or (lambda line: log.info("%s", line))
        self._before: list[dict[str, Any]] | None = None  # replicas at the last lines
        self._at = 0.0  # when that was
        self._busy: set[int] = set()  # replicas that had something to tell the last time

    def feed(self, snapshot: Snapshot, now: float) -> None:
        """The latest snapshot, at ``now`` (``time.monotonic()``)."""
        if not self._every_s:
            return
        if self._before is None:
            self._before, self._at = snapshot.replicas, now
            return
        seconds = now - self._at
        if seconds < self._every_s:
            return
        for then, replica in zip(self._before, snapshot.replicas, strict=True):
            rank = replica["dp_rank"]
            idle = _idle(replica, then)
            if not idle or rank in self._busy:
                self._say(line(replica, then, seconds, snapshot.engine))
            (self._busy.discard if idle else self._busy.add)(rank)
        self._before, self._at = snapshot.replicas, now


def _idle(replica: dict[str, Any], then: dict[str, Any]) -> bool:
    requests, before = replica["requests"], then["requests"]
    return not requests["open"] and requests["generation_tokens"] == before["generation_tokens"] and requests["routed"] == before["routed"]


def line(replica: dict[str, Any], then: dict[str, Any], seconds: float, engine: dict[str, Any]) -> str:
    """What one replica did in the ``seconds`` since ``then``."""
    requests, before = replica["requests"], then["requests"]
    leader, earlier = replica["leader"], then["leader"]
    prompt, output = (_grown(requests, before, name) / seconds for name in ("prompt_tokens", "generation_tokens"))
    parts = [
        f"Avg prompt throughput: {prompt:.1f} tokens/s",
        f"Avg generation throughput: {output:.1f} tokens/s",
        f"Running: {leader.get('running', 0)} reqs",
        f"Waiting: {leader.get('waiting', 0)} reqs",
        f"KV cache usage: {leader.get('kv_usage', 0.0):.1%}",
    ]
    parts += _shares(leader, earlier)
    experts = engine.get("experts")
    if experts is not None:
        parts.append(f"Expert balance: {experts['balancedness']:.2f}")
    return f"Engine {replica['dp_rank']:03d}: " + ", ".join(parts)


def _shares(leader: dict[str, Any], earlier: dict[str, Any]) -> list[str]:
    """Parts of a line that are there only when there is something to divide by."""
    parts = []
    if queries := _grown(leader, earlier, "prefix_queries"):
        parts.append(f"Prefix cache hit rate: {_grown(leader, earlier, 'prefix_hits') / queries:.1%}")
    if preempted := _grown(leader, earlier, "preemptions"):
        parts.append(f"Preemptions: {preempted}")
    steps = _grown(leader, earlier, "steps")
    if steps:
        step = mean(difference(leader["step_seconds"], earlier.get("step_seconds")))
        if step is not None:
            parts.append(f"Step: {step * 1e3:.1f} ms")
        computed, padding = _grown(leader, earlier, "computed_tokens"), _grown(leader, earlier, "padding_tokens")
        parts.append(f"Padding: {padding / (computed + padding) if computed + padding else 0.0:.1%}")
        parts.append(f"Idle-rank steps: {_grown(leader, earlier, 'idle_steps') / steps:.1%}")
        parts.append(f"Graph steps: {_grown(leader, earlier, 'graph_steps') / steps:.1%}")
    tiers, tiers_before = leader.get("tiers"), earlier.get("tiers") or {}
    if tiers:
        hits, misses = _grown(tiers, tiers_before, "hits"), _grown(tiers, tiers_before, "misses")
        if hits + misses:
            parts.append(f"KV hot-row hit rate: {hits / (hits + misses):.1%}")
    return parts


def _grown(now: dict[str, Any], before: dict[str, Any], name: str) -> int:
    """How much a counter has grown; it may have begun anew."""
    value, old = int(now.get(name, 0)), int(before.get(name, 0))
    return value - old if value >= old else value
