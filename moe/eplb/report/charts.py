"""Charts of loads and placements."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..plan import Floats
from .gather import Report
from .style import BLUE, COLOURS, DIVERGING, GREY, INK, LINE, ORANGE, PAPER, RED, SOFT

Figure = Any
LEAST_PERCENT = 0.01  # that a log axis of percent shows: less is drawn there
_TICKS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)  # of a colour bar of load over mean


def graph_objects() -> Any:
    """plotly.graph_objects.

    Raises:
        ValueError: plotly is not installed.
    """
    try:
        import plotly.graph_objects
    except ImportError:
        raise ValueError("a report needs plotly, which is not installed; pip install 'rorqual[eplb]'") from None
    return plotly.graph_objects


def finish(figure: Figure, *, height: int, x: str, y: str, legend: bool = True) -> Figure:
    """The look that all charts share."""
    axis = {
        "gridcolor": LINE,
        "zeroline": False,
        "linecolor": LINE,
        "ticks": "",
        "title_standoff": 8,
        "title_font": {"size": 13, "color": SOFT},
    }
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 64, "r": 20, "t": 34, "b": 52},
        font={"family": 'system-ui, "Segoe UI", Roboto, Arial, sans-serif', "size": 13, "color": INK},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        hoverlabel={"bgcolor": PAPER, "bordercolor": LINE, "font": {"color": INK}},
    )
    figure.update_xaxes(title_text=x, **axis)
    figure.update_yaxes(title_text=y, **axis)
    return figure


def layer_labels(report: Report) -> list[str]:
    """Numbers of the layers in the model, as text: an axis of categories."""
    return [str(number) for number in report.trace.layer_ids]


def expert_map(report: Report) -> Figure:
    """Layers x experts: load over the layer's mean, on a scale of doublings."""
    go = graph_objects()
    load = report.trace.total.astype(np.float64)
    ratio = load / np.maximum(load.mean(1, keepdims=True), 1e-300)
    shown = np.round(np.log2(np.clip(ratio, _TICKS[0], _TICKS[-1])), 2)
    figure = go.Figure(
        go.Heatmap(
            z=shown,
            y=layer_labels(report),
            customdata=np.round(ratio, 3),
            colorscale=DIVERGING,
            zmin=-4,
            zmax=4,
            hovertemplate="layer %{y}, expert %{x}<br>%{customdata:.2f} x the mean<extra></extra>",
            colorbar={
                "title": {"text": "of mean", "side": "top"},
                "tickvals": [float(np.log2(t)) for t in _TICKS],
                "ticktext": [f"{t:g}x" if t >= 1 else f"1/{1 / t:g}" for t in _TICKS],
                "thickness": 12,
                "outlinewidth": 0,
            },
        )
    )
    finish(figure, height=_height(len(load)), x="expert", y="layer", legend=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure.update_xaxes(showgrid=False)
    return figure


def rank_maps(report: Report) -> Figure:
    """Layers x ranks before and after, on one scale around the mean."""
    from plotly.subplots import make_subplots

    go = graph_objects()
    names = list(report.loads)[:2]
    titles = [f"{name}: max/mean {report.balances[name].imbalance:.4f}" for name in names]
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles)
    for place, name in enumerate(names):
        figure.add_trace(
            go.Heatmap(
                z=np.round(_over_mean(report.loads[name]), 3),
                y=layer_labels(report),
                coloraxis="coloraxis",
                hovertemplate="layer %{y}, rank %{x}<br>%{z:.3f} x the mean<extra>" + name + "</extra>",
            ),
            row=1,
            col=place + 1,
        )
    finish(figure, height=_height(len(report.trace.layer_ids)), x="rank", y="", legend=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure.update_yaxes(title_text="layer", col=1)
    figure.update_xaxes(showgrid=False)
    figure.update_layout(
        coloraxis={
            "colorscale": DIVERGING,
            "cmin": 0.0,
            "cmax": 2.0,
            "colorbar": {
                "title": {"text": "of mean", "side": "top"},
                "tickvals": [0, 0.5, 1, 1.5, 2],
                "ticktext": ["0x", "0.5x", "1x", "1.5x", "2x +"],
                "thickness": 12,
                "outlinewidth": 0,
            },
        }
    )
    return figure


def layer_lines(report: Report) -> Figure:
    """How far the busiest rank of each layer is above the mean: before, after, under the published algorithm, and the bound."""
    go = graph_objects()
    figure = go.Figure()
    lines: dict[str, tuple[Floats, str, str | None]] = {report.before_name: (report.before.imbalance, GREY, None)}
    if report.published is not None:
        lines["EPLB"] = (report.published.imbalance, ORANGE, None)
    lines["plan"] = (report.after.imbalance, BLUE, None)
    lines["bound"] = (report.after.bound, RED, "dot")
    for name, (values, colour, dash) in lines.items():
        figure.add_trace(
            go.Scatter(
                x=layer_labels(report),
                y=np.round(np.maximum(100 * (values - 1.0), LEAST_PERCENT), 4),  # a log axis has no 0
                customdata=np.round(values, 5),
                name=name,
                mode="lines+markers" if dash is None else "lines",
                line={"color": colour, "width": 2, "dash": dash},
                marker={"size": 5},
                hovertemplate="layer %{x}<br>max/mean %{customdata:.5f}<extra>" + name + "</extra>",
            )
        )
    finish(figure, height=360, x="layer", y="above the mean, busiest rank")
    figure.update_xaxes(type="category", nticks=30, showgrid=False)
    figure.update_yaxes(type="log", dtick=1, ticksuffix="%")
    return figure


def lost_bars(report: Report) -> Figure:
    """Experts of a layer that are lost with each rank, and with each node."""
    from plotly.subplots import make_subplots

    go = graph_objects()
    figure = make_subplots(rows=1, cols=2, column_widths=[0.72, 0.28], horizontal_spacing=0.07)
    layers = len(report.trace.layer_ids)
    for name in (report.before_name, "plan"):
        colour = COLOURS.get(name, GREY)
        for column, (kind, lost) in enumerate((("rank", report.lost[name].by_rank), ("node", report.lost[name].by_node))):
            figure.add_trace(
                go.Bar(
                    x=[str(i) for i in range(lost.shape[1])],
                    y=np.round(lost.sum(0) / layers, 3),
                    name=name,
                    legendgroup=name,
                    showlegend=column == 0,
                    marker_color=colour,
                    hovertemplate=f"{kind} %{{x}}<br>%{{y:.2f}} experts a layer<extra>{name}</extra>",
                ),
                row=1,
                col=column + 1,
            )
    finish(figure, height=320, x="rank that fails", y="experts lost, mean of layers")
    figure.update_xaxes(title_text="node that fails", col=2)
    figure.update_yaxes(title_text="", col=2)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_layout(barmode="group", bargap=0.25)
    return figure


def _over_mean(loads: Floats) -> Floats:
    mean = loads.mean(1, keepdims=True)
    return loads / np.where(mean > 0, mean, 1.0)


def _height(layers: int) -> int:
    """Of a heat map: enough for every layer to be seen, not more than a screen."""
    return int(np.clip(130 + 8.5 * layers, 260, 680))
