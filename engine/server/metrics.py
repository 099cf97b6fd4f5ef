"""``GET /metrics``: the latest snapshot in Prometheus's text format. Never asks the engine, and says how old the numbers are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..serving.wire import Snapshot, Welcome
from .exposition import CONTENT_TYPE, Exposition, label_text
from .http_counts import HttpCounts
from .metric_table import REPLICA_ROWS, ROUTING_ROWS, Row, find

__all__ = ["CONTENT_TYPE", "HttpCounts", "render"]

PREFIX = "rorqual:"


def render(welcome: Welcome | None, snapshot: Snapshot | None, http: HttpCounts | None = None, *, model: str | None = None) -> bytes:
    """All metrics as text.

    Args:
        welcome: of the engine; None while it loads.
        snapshot: the latest one; None before the first.
        http: of this process and, where they share a folder, the others.
        model: label ``model_name``, such as the first served name; the model as given to the engine by default.
    """
    text = Exposition(PREFIX)
    name = model or (welcome.model if welcome is not None else "")
    _simple(text, "engine_up", "1 when the engine is ready.", int(welcome is not None))
    if welcome is not None:
        _about(text, welcome, name)
    if snapshot is not None:
        age = max(0.0, time.time() - snapshot.at)
        _simple(text, "snapshot_age_seconds", "Age of the engine's numbers; about a second while anything happens.", age)
        _replicas(text, snapshot.replicas, name)
        _engine(text, snapshot.engine, name)
    if http is not None:
        _http(text, http.totals())
    return text.encode()


def _simple(text: Exposition, name: str, help: str, value: float, labels: str = "") -> None:
    """A gauge with one sample."""
    text.family("gauge", name, help)
    text.sample(labels, value)


def _about(text: Exposition, welcome: Welcome, model: str) -> None:
    about = {"model_name": model, "version": welcome.version, "layout": welcome.layout, "model_type": welcome.model_type}
    about |= {"max_model_len": str(welcome.max_model_len), "page_size": str(welcome.page_size), "dp_size": str(welcome.dp_size)}
    _simple(text, "engine_info", "What is served; always 1.", 1, label_text(about))
    _simple(text, "engine_start_time_seconds", "When the engine was ready.", welcome.started)


def _ranks(model: str, n: int) -> list[str]:
    """Labels of each DP rank, or of something else that is counted from 0."""
    return [label_text({"model_name": model, "engine": str(rank)}) for rank in range(n)]


def _replicas(text: Exposition, replicas: Sequence[dict[str, Any]], model: str) -> None:
    labels = [label_text({"model_name": model, "engine": str(replica["dp_rank"])}) for replica in replicas]
    for row in REPLICA_ROWS:
        text.family(row.kind, row.name, row.help)
        for own, replica in zip(labels, replicas, strict=True):
            _add(text, row, own, find(replica, row.path))


def _add(text: Exposition, row: Row, labels: str, value: Any) -> None:
    """Samples of one DP rank; none where it has no such number."""
    if value is None:
        return
    if row.kind == "histogram":
        text.histogram(labels, value)
    elif row.label:
        for key, count in sorted(value.items()):
            text.sample(f"{labels},{label_text({row.label: str(key)})}", count)
    else:
        text.sample(labels, value)


def _engine(text: Exposition, engine: dict[str, Any], model: str) -> None:
    """What belongs to no DP rank, and what routing says of each."""
    text.family("counter", "requests_refused", "Requests that were not taken, by HTTP status.")
    for status, count in engine.get("refused", {}).items():
        text.sample(label_text({"model_name": model, "status": status}), count)
    experts, own = engine.get("experts"), label_text({"model_name": model})
    if experts is not None:
        help = "Mean over maximum of the expert ranks' loads in the last second, mean of all layers; 1 is even."
        _simple(text, "expert_balancedness", help, experts["balancedness"], own)
        _simple(text, "expert_balancedness_worst", "The same of the layer that is worst.", experts["worst"], own)
        text.family("gauge", "expert_rank_load", "Choices that fell on an expert rank in the last second.")
        for rank, load in enumerate(experts["rank_loads"]):
            text.sample(label_text({"model_name": model, "ep_rank": str(rank)}), load)
    _routing(text, engine.get("routing"), model)


def _routing(text: Exposition, routing: dict[str, Any] | None, model: str) -> None:
    if not routing:
        return
    _simple(text, "routing_info", "How DP ranks are chosen; always 1.", 1, label_text({"policy": str(routing.get("policy", ""))}))
    for row in ROUTING_ROWS:
        values = find(routing, row.path)
        if isinstance(values, list):
            text.family(row.kind, row.name, row.help)
            for labels, value in zip(_ranks(model, len(values)), values, strict=True):
                text.sample(labels, value)


def _http(text: Exposition, totals: dict[str, Any]) -> None:
    _simple(text, "http_processes", "HTTP processes that answer.", totals["processes"])
    text.family("counter", "http_requests", "HTTP requests answered.")
    for route, method, status, count in totals["requests"]:
        text.sample(label_text({"handler": route, "method": method, "status": str(status)}), count)
    _simple(text, "http_requests_in_flight", "HTTP requests under way.", totals["in_flight"])
    text.family("histogram", "http_request_duration_seconds", "From an HTTP request to the last byte of its answer.")
    for route, histogram in totals["seconds"].items():
        text.histogram(label_text({"handler": route}), histogram)
