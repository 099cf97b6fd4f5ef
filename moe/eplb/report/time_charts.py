"""Charts of what costs what: bytes against balance, redundancy against balance, and steps under policies."""

from __future__ import annotations

import numpy as np

from ..simulation.rules import POLICIES
from .charts import Figure, finish, graph_objects
from .gather import Report
from .style import BLUE, COLOURS, GREY, INK, RED, SOFT

_POINTS = 1500  # of a line; longer traces are thinned to the largest of each stretch


def trade_curve(report: Report) -> Figure:
    """Bytes moved against the balance that is reached."""
    go = graph_objects()
    figure = go.Figure()
    for name in dict.fromkeys(trade.name for trade in report.trades):
        rows = [trade for trade in report.trades if trade.name == name]
        curve = len(rows) > 1
        figure.add_trace(
            go.Scatter(
                x=[row.bytes / 1e9 for row in rows],
                y=[round(row.imbalance, 5) for row in rows],
                text=[row.label for row in rows],
                name=name,
                mode="lines+markers" if curve else "markers",
                line={"color": COLOURS[name], "width": 2},
                cliponaxis=False,
                marker={"size": 7 if curve else 12, "color": COLOURS[name], "symbol": "circle" if curve else "diamond"},
                hovertemplate="%{text}<br>%{x:.1f} GB, max/mean %{y:.4f}<extra>" + name + "</extra>",
            )
        )
    finish(figure, height=370, x="GB that all ranks receive", y="max/mean of ranks, mean of layers")
    figure.update_xaxes(rangemode="tozero")
    return figure


def spare_curve(report: Report) -> Figure:
    """Slots for replicas against balance and memory."""
    go = graph_objects()
    rows = report.spares
    figure = go.Figure()
    figure.add_trace(
        go.Bar(
            x=[str(row.spare) for row in rows],
            y=[row.rank_bytes / 1e9 for row in rows],
            name="memory of experts, fullest rank",
            yaxis="y2",
            marker_color="#dbe4ee",
            hovertemplate="%{x} slots for replicas<br>%{y:.2f} GB a rank<extra></extra>",
        )
    )
    for name, values, colour, dash in (
        ("plan", [row.imbalance for row in rows], BLUE, None),
        ("bound", [row.bound for row in rows], RED, "dot"),
    ):
        figure.add_trace(
            go.Scatter(
                x=[str(row.spare) for row in rows],
                y=np.round(values, 5),
                name=name,
                mode="lines+markers",
                line={"color": colour, "width": 2, "dash": dash},
                hovertemplate="%{x} slots for replicas<br>max/mean %{y:.4f}<extra>" + name + "</extra>",
            )
        )
    finish(figure, height=340, x="slots for replicas, all ranks together", y="max/mean of ranks, mean of layers")
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_layout(
        margin={"r": 64},
        yaxis={"overlaying": "y2", "side": "left", "tickmode": "auto", "nticks": 6},
        yaxis2={"side": "right", "title": {"text": "GB a rank", "font": {"size": 13, "color": SOFT}}, "showgrid": False, "nticks": 6},
    )
    return figure


def step_bars(report: Report) -> Figure:
    """Mean time of a step under each policy: what the experts take, and what moving takes."""
    go = graph_objects()
    names = [found.policy for found in report.outcomes]
    moving = [1e3 * float(found.moving.mean()) for found in report.outcomes]
    whole = [1e3 * found.mean_seconds for found in report.outcomes]
    figure = go.Figure()
    for label, values, colours in (
        ("step", [a - b for a, b in zip(whole, moving, strict=True)], [COLOURS[name] for name in names]),
        ("moving", moving, [RED] * len(names)),
    ):
        figure.add_trace(
            go.Bar(
                x=names,
                y=values,
                name=label,
                marker_color=colours,
                text=[f"{value:.2f} ms" for value in whole] if label == "moving" else None,
                textposition="outside",
                cliponaxis=False,
                hovertemplate="%{x}<br>" + label + " %{y:.3f} ms<extra></extra>",
            )
        )
    if report.floor_seconds is not None:
        least = 1e3 * report.floor_seconds
        figure.add_hline(y=least, line={"color": INK, "width": 1.2, "dash": "dot"})
        figure.add_annotation(
            x=1, y=least, xref="paper", text=f"perfect<br>balance<br>{least:.2f} ms", showarrow=False, xanchor="left", xshift=6
        )
    finish(figure, height=340, x="", y="ms a step, mean", legend=False)
    figure.update_layout(barmode="stack", bargap=0.45, margin={"r": 84})
    figure.update_xaxes(showgrid=False)
    return figure


def step_lines(report: Report) -> Figure:
    """Balance and bytes over time, policy by policy."""
    from plotly.subplots import make_subplots

    go = graph_objects()
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.6, 0.4])
    for found in report.outcomes:
        steps, balance = _thinned(found.imbalance.mean(1))
        _, moved = _thinned(np.cumsum(found.moved_bytes) / 1e9)
        for row, values, text in ((1, balance, "max/mean %{y:.3f}"), (2, moved, "%{y:.1f} GB so far")):
            figure.add_trace(
                go.Scatter(
                    x=steps,
                    y=np.round(values, 4),
                    name=found.policy,
                    legendgroup=found.policy,
                    showlegend=row == 1,
                    mode="lines",
                    line={"color": COLOURS.get(found.policy, GREY), "width": 2 if found.policy in ("live", "incremental") else 1.4},
                    hovertemplate="step %{x}<br>" + text + "<extra>" + found.policy + "</extra>",
                ),
                row=row,
                col=1,
            )
    finish(figure, height=480, x="", y="")
    figure.update_yaxes(title_text="max/mean of ranks", row=1)
    figure.update_yaxes(title_text="GB moved", row=2)
    figure.update_xaxes(title_text="step", row=2)
    return figure


def policies_in_words(report: Report) -> list[tuple[str, str]]:
    """(name, words) of the policies that were simulated."""
    return [(found.policy, POLICIES[found.policy]) for found in report.outcomes]


def _thinned(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) with at most ``_POINTS`` points: of each stretch the largest."""
    stretch = -(-len(values) // _POINTS)
    starts = np.arange(0, len(values), stretch)
    return starts, np.maximum.reduceat(values, starts)
