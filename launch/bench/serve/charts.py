"""Charts of served runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....moe.eplb.report.charts import finish, graph_objects
from ....moe.eplb.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from .pareto import Point, frontier

Figure = Any
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY)


def pareto_chart(found: Sequence[Point], *, per_device: bool) -> Figure:
    """Throughput over the speed that one user sees; a line a layout, and the frontier of all."""
    go = graph_objects()
    figure = go.Figure()
    layouts = list(dict.fromkeys(p.layout for p in found))
    for place, layout in enumerate(layouts):
        own = sorted((p for p in found if p.layout == layout), key=lambda p: p.speed)
        figure.add_scatter(
            x=[p.speed for p in own], y=[p.throughput for p in own], mode="lines+markers", name=layout,
            line={"color": _COLOURS[place % len(_COLOURS)], "width": 1.5}, marker={"size": 8},
            customdata=[[p.load, p.ttft_ms] for p in own],
            hovertemplate="%{customdata[0]}<br>%{y:,.1f} tokens/s, %{x:.1f} tokens/s a user<br>TTFT %{customdata[1]:.0f} ms"
            "<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    best = frontier(found)
    figure.add_scatter(
        x=[p.speed for p in best], y=[p.throughput for p in best], mode="lines", name="frontier", hoverinfo="skip",
        line={"color": "#17212b", "width": 5, "dash": "solid"}, opacity=0.18,
    )  # fmt: skip
    return finish(figure, height=440, x="output tokens/s that a user sees", y="output tokens/s" + (" per device" if per_device else ""))


def latency_chart(runs: Sequence[tuple[str, dict[str, Any]]], name: str, title: str) -> Figure:
    """Shares of requests below a latency (ms), a line a run; for runs with their requests."""
    go = graph_objects()
    figure = go.Figure()
    for place, (label, run) in enumerate(runs):
        values = np.sort(1000.0 * np.array(latencies(run, name)))
        if not len(values):
            continue
        keep = np.unique(np.linspace(0, len(values) - 1, min(len(values), 400)).astype(int))  # a page holds no more than that
        figure.add_scatter(
            x=np.round(values[keep], 3).tolist(), y=np.round(100.0 * (keep + 1) / len(values), 2).tolist(), mode="lines", name=label,
            line={"color": _COLOURS[place % len(_COLOURS)], "width": 2}, hovertemplate="%{y:.1f}% within %{x:.1f} ms",
        )  # fmt: skip
    figure = finish(figure, height=320, x=f"{title}, ms", y="% of requests")
    figure.update_xaxes(type="log")
    return figure


def latencies(run: dict[str, Any], name: str) -> list[float]:
    """Seconds of each good request of a detailed run: "ttft", "tpot" or "e2el"."""
    found = []
    for error, ttft, latency, made in zip(run["errors"], run["ttfts"], run["latencies"], run["output_lens"], strict=True):
        if error or (name == "tpot" and made < 2):
            continue
        found.append({"ttft": ttft, "e2el": latency, "tpot": (latency - ttft) / max(1, made - 1)}[name])
    return found


def is_detailed(run: dict[str, Any]) -> bool:
    """Whether a run holds its requests."""
    return all(key in run for key in ("errors", "ttfts", "latencies", "output_lens", "start_times", "itls"))


def time_chart(label: str, run: dict[str, Any]) -> Figure:
    """Output tokens and open requests over the time of a run."""
    go = graph_objects()
    good = [i for i, error in enumerate(run["errors"]) if not error]
    ends = [run["start_times"][i] + run["latencies"][i] for i in good]
    seconds = max(ends, default=0.0)
    width = max(seconds / 120, 0.05)
    edges = np.arange(0.0, seconds + width, width)
    tokens, starts = np.zeros(len(edges)), np.array([run["start_times"][i] for i in good])
    for i in good:
        at = run["start_times"][i] + run["ttfts"][i] + np.cumsum([0.0, *run["itls"][i]])
        np.add.at(tokens, np.minimum((at / width).astype(int), len(edges) - 1), run["output_lens"][i] / len(at))
    open_now = [int((starts <= t).sum() - (np.array(ends) < t).sum()) for t in edges]
    figure = go.Figure()
    figure.add_scatter(
        x=edges.round(2).tolist(), y=(tokens / width).round(1).tolist(), name="output tokens/s", line={"color": BLUE, "width": 2}
    )
    figure.add_scatter(
        x=edges.round(2).tolist(), y=open_now, name="open requests", yaxis="y2", line={"color": ORANGE, "width": 1.5, "shape": "hv"}
    )
    figure = finish(figure, height=300, x=f"seconds, {label}", y="output tokens/s")
    figure.update_layout(
        margin_r=64,
        yaxis2={"overlaying": "y", "side": "right", "title": {"text": "open requests"}, "showgrid": False, "rangemode": "tozero"},
    )
    return figure
