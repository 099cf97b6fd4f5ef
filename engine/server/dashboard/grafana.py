"""The Grafana dashboard: ``python -m rorqual.engine.server.dashboard.grafana > docs/grafana.json``."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

#: width of a dashboard in Grafana's units, and size of a panel
_WIDTH, _PANEL_WIDTH, _PANEL_HEIGHT = 24, 8, 7
#: every query is of the models and DP ranks chosen at the top
_CHOSEN = 'model_name=~"$model_name", engine=~"$engine"'
_MODEL = 'model_name=~"$model_name"'


class Panel(NamedTuple):
    """One chart: queries with what their lines are called."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    top: float | None = None  # of the axis


def _rate(name: str, by: str = "engine", chosen: str = _CHOSEN) -> str:
    return f"sum by ({by}) (rate(rorqual:{name}{{{chosen}}}[$__rate_interval]))"


def _sum(name: str) -> str:
    return f"sum by (engine) (rorqual:{name}{{{_CHOSEN}}})"


def _ratio(part: str, whole: str) -> str:
    return f"{_rate(part)} / {_rate(whole)}"


def _quantiles(name: str) -> tuple[tuple[str, str], ...]:
    buckets = f"sum by (le) (rate(rorqual:{name}_bucket{{{_CHOSEN}}}[$__rate_interval]))"
    return tuple((f"histogram_quantile({q}, {buckets})", f"p{round(q * 100)}") for q in (0.5, 0.9, 0.99))


def _mean(name: str) -> str:
    return f"{_rate(name + '_sum')} / {_rate(name + '_count')}"


_RANK = "DP {{engine}}"
#: rows of panels
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Requests", (
        Panel("Generated tokens a second", "short", ((_rate("generation_tokens_total"), _RANK),)),
        Panel("Prompt tokens a second", "short", ((_rate("prompt_tokens_total"), _RANK),)),
        Panel("Running and waiting requests", "short", (
            (_sum("num_requests_running"), f"{_RANK} running"), (_sum("num_requests_waiting"), f"{_RANK} waiting"))),
        Panel("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", _quantiles("inter_token_latency_seconds")),
        Panel("Latency of requests", "s", _quantiles("e2e_request_latency_seconds")),
        Panel("Where a request's time goes (mean)", "s", (
            (_mean("request_queue_time_seconds"), f"{_RANK} queue"), (_mean("request_prefill_time_seconds"), f"{_RANK} prefill"),
            (_mean("request_decode_time_seconds"), f"{_RANK} decode"))),
        Panel("Ended requests a second, by reason", "short", ((_rate("request_success_total", "finished_reason"), "{{finished_reason}}"),)),
        Panel("Refused requests a second, by status", "short", ((_rate("requests_refused_total", "status", _MODEL), "{{status}}"),)),
    )),
    ("KV cache", (
        Panel("KV pages in use", "percentunit", ((_sum("kv_cache_usage_perc"), _RANK),), 1),
        Panel("Prefix cache hits", "percentunit", ((_ratio("prefix_cache_hits_total", "prefix_cache_queries_total"), _RANK),), 1),
        Panel("Preemptions a second", "short", ((_rate("num_preemptions_total"), _RANK),)),
        Panel("Hot rows hit (KV offloading)", "percentunit", (
            (f"{_rate('kv_tier_hits_total')} / ({_rate('kv_tier_hits_total')} + {_rate('kv_tier_misses_total')})", _RANK),), 1),
        Panel("Bytes fetched from the host a second (KV offloading)", "Bps", ((_rate("kv_tier_fetched_bytes_total"), _RANK),)),
        Panel("Free device pages (KV offloading)", "short", ((_sum("kv_tier_device_pages_free"), _RANK),)),
    )),
    ("Steps", (
        Panel("Step time", "s", _quantiles("step_time_seconds")),
        Panel("Tokens of a step (mean)", "short", ((_mean("iteration_tokens_total"), _RANK),)),
        Panel("Steps replayed from a graph", "percentunit", ((_ratio("graph_steps_total", "steps_total"), _RANK),), 1),
        Panel("Steps without own tokens", "percentunit", ((_ratio("idle_rank_steps_total", "steps_total"), _RANK),), 1),
        Panel("Padding rows a second", "short", ((_rate("padding_tokens_total"), _RANK),)),
        Panel("Tokens of a rank in relation to the busiest", "percentunit", (
            (f"({_rate('prefill_tokens_computed_total')} + {_rate('decode_tokens_computed_total')}) / {_rate('busiest_rank_tokens_total')}",
             _RANK),), 1),
    )),
    ("Experts and routing", (
        Panel("Balance of the expert ranks (mean / max)", "percentunit", (
            (f"rorqual:expert_balancedness{{{_MODEL}}}", "all layers"),
            (f"rorqual:expert_balancedness_worst{{{_MODEL}}}", "worst layer")), 1),
        Panel("Load of the expert ranks, choices of a second", "short", ((f"rorqual:expert_rank_load{{{_MODEL}}}", "EP {{ep_rank}}"),)),
        Panel("Bytes dispatched a second", "Bps", ((_rate("dispatch_bytes_total"), _RANK),)),
        Panel("Experts moved a second", "short", ((_rate("eplb_experts_received_total"), _RANK),)),
        Panel("Requests routed a second", "short", ((_rate("routing_picked_total"), _RANK),)),
        Panel("Blocks that routing found cached", "percentunit", (
            (_ratio("routing_hit_blocks_total", "routing_prompt_blocks_total"), _RANK),), 1),
    )),
    ("HTTP", (
        Panel("HTTP requests a second", "short", (
            ("sum by (handler, status) (rate(rorqual:http_requests_total[$__rate_interval]))", "{{handler}} {{status}}"),)),
        Panel("HTTP requests under way", "short", (("rorqual:http_requests_in_flight", "{{instance}}"),)),
        Panel("Age of the engine's numbers", "s", (("rorqual:snapshot_age_seconds", "{{instance}}"),)),
    )),
)  # fmt: skip


def grafana() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "collapsed": False, "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1}, "panels": []})
        y += 1
        for place, panel in enumerate(row):
            down, x = divmod(place * _PANEL_WIDTH, _WIDTH)
            panels.append(_panel(panel, {"x": x, "y": y + down * _PANEL_HEIGHT, "w": _PANEL_WIDTH, "h": _PANEL_HEIGHT}))
        y += -(-len(row) * _PANEL_WIDTH // _WIDTH) * _PANEL_HEIGHT
    for number, panel_dict in enumerate(panels, 1):
        panel_dict["id"] = number
    return {
        "title": "rorqual", "uid": "rorqual", "tags": ["llm", "inference"], "schemaVersion": 39, "version": 1, "editable": True,
        "refresh": "5s", "time": {"from": "now-15m", "to": "now"}, "timezone": "browser", "panels": panels,
        "templating": {
            "list": [_source(), _variable("model_name", "rorqual:engine_info"), _variable("engine", "rorqual:num_requests_open")]
        },
    }  # fmt: skip


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {"expr": query, "legendFormat": legend, "refId": chr(65 + i), "datasource": {"type": "prometheus", "uid": "${datasource}"}}
        for i, (query, legend) in enumerate(panel.queries)
    ]
    limits: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        limits["max"] = panel.top
    return {
        "type": "timeseries", "title": panel.title, "gridPos": place, "targets": targets,
        "datasource": {"type": "prometheus", "uid": "${datasource}"}, "fieldConfig": {"defaults": limits, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
    }  # fmt: skip


def _source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(label: str, metric: str) -> dict[str, Any]:
    query = f"label_values({metric}, {label})"
    return {
        "name": label, "type": "query", "datasource": {"type": "prometheus", "uid": "${datasource}"}, "refresh": 2, "sort": 3,
        "definition": query, "query": {"query": query, "refId": label}, "multi": True, "includeAll": True, "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def text() -> str:
    """The dashboard as JSON."""
    return json.dumps(grafana(), indent=1) + "\n"


if __name__ == "__main__":
    print(text(), end="")
