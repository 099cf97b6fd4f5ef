"""Served runs as one HTML page that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....moe.eplb.report.html import chart, more, page, section, table
from .charts import is_detailed, latency_chart, pareto_chart, time_chart
from .pareto import frontier, load_of, per_device, points

_COLUMNS = (
    ("requests", "completed", "{:.0f}"),
    ("failed", "failed", "{:.0f}"),
    ("requests/s", "request_throughput", "{:.2f}"),
    ("goodput/s", "request_goodput", "{:.2f}"),
    ("output tok/s", "output_throughput", "{:,.1f}"),
    ("total tok/s", "total_token_throughput", "{:,.1f}"),
    ("TTFT ms, median", "median_ttft_ms", "{:,.1f}"),
    ("p99", "p99_ttft_ms", "{:,.1f}"),
    ("TPOT ms, median", "median_tpot_ms", "{:,.2f}"),
    ("p99", "p99_tpot_ms", "{:,.2f}"),
    ("ITL ms, p99", "p99_itl_ms", "{:,.2f}"),
    ("E2EL ms, median", "median_e2el_ms", "{:,.0f}"),
)
#: runs whose requests are drawn: more make no readable chart
_DRAWN = 8


def render(runs: Sequence[dict[str, Any]], *, title: str) -> str:
    """The page.

    Raises:
        ValueError: plotly is not installed.
    """
    labels = _labels(runs)
    named = list(zip(labels, runs, strict=True))
    found = points(runs)
    parts = []
    if len(found) > 1:
        best = ", ".join(f"{p.layout} ({p.load})" for p in frontier(found))
        lead = f"Up: the server does more; right: a user waits less. On the frontier, from the fastest for a user on: {best}."
        parts.append(section("Throughput against latency", lead, chart("pareto", pareto_chart(found, per_device=per_device(runs)))))
    rows = [[label, *(_cell(run.get(key), form) for _, key, form in _COLUMNS)] for label, run in named]
    about = "TTFT: sending to the first token. TPOT: time per later token of a request. ITL: gaps between chunks. E2EL: sending to the end."
    parts.append(section("Runs", about, table(["run", *(name for name, _, _ in _COLUMNS)], rows) + _warnings(named)))
    deep = [(label, run) for label, run in named if is_detailed(run)][:_DRAWN]
    if deep:
        names = (("ttft", "time to first token"), ("tpot", "time per output token"), ("e2el", "end-to-end latency"))
        drawn = "".join(chart(f"cdf-{name}", latency_chart(deep, name, text)) for name, text in names)
        parts.append(section("Latency of requests", "How many requests had at most that latency.", drawn))
        drawn = "".join(chart(f"time-{i}", time_chart(label, run)) for i, (label, run) in enumerate(deep))
        parts.append(section("Over time", "Output tokens and requests that were open.", drawn))
    parts.append(section("Where the runs come from", "Commands, versions and devices as the files say.", _sources(named)))
    return page(title, [f"{len(runs)} runs, {_dates(runs)}"], "\n".join(parts))


def _labels(runs: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each run; what is the same for all is left out."""
    keys = ("label", "model_id", "layout", "dataset")
    vary = [key for key in keys if len({str(run.get(key)) for run in runs}) > 1]
    names = [", ".join([str(run.get(key)) for key in vary if run.get(key) is not None] + [load_of(run)]) for run in runs]
    return [f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _dates(runs: Sequence[dict[str, Any]]) -> str:
    dates = sorted({str(run.get("date", ""))[:8] for run in runs} - {""})
    return " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "without a date"


def _warnings(named: Sequence[tuple[str, dict[str, Any]]]) -> str:
    lines = [[label, text] for label, run in named for text in run.get("warnings", [])]
    lines += [[label, f"{count} x {text}"] for label, run in named for text, count in run.get("error_counts", {}).items()]
    return more(f"{len(lines)} warnings and errors", table(["run", "what"], lines)) if lines else ""


def _sources(named: Sequence[tuple[str, dict[str, Any]]]) -> str:
    rows = []
    for label, run in named:
        versions = ", ".join(f"{k} {v}" for k, v in (run.get("versions") or {}).items() if v)
        rows.append(
            [label, run.get("model_id", "-"), run.get("device") or "-", run.get("layout") or "-", versions or "-", run.get("command", "-")]
        )
    return table(["run", "model", "device", "layout", "versions", "command"], rows)
