"""The page: text, tables and charts in one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from .charts import LEAST_PERCENT, Figure, expert_map, graph_objects, layer_lines, lost_bars, rank_maps
from .gather import Report
from .style import CSS
from .time_charts import policies_in_words, spare_curve, step_bars, step_lines, trade_curve
from .words import balance_rows, cards, hot_rows, outcome_rows, source_lines

#: draws every chart, says in its place what could not be drawn, and counts both for whoever looks at the page by program
_DRAW = """
(function () {
  var drawn = 0, failed = [];
  document.querySelectorAll("script[data-chart]").forEach(function (holder) {
    var place = document.getElementById(holder.dataset.chart);
    try {
      var figure = JSON.parse(holder.textContent);
      Plotly.newPlot(place, figure.data, figure.layout, {
        responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]
      });
      drawn += 1;
    } catch (error) {
      failed.push(holder.dataset.chart + ": " + error);
      place.className = "failed";
      place.textContent = "This chart could not be drawn: " + error;
    }
  });
  document.documentElement.dataset.drawn = drawn;
  document.documentElement.dataset.failed = failed.join("; ");
})();
"""


def render(report: Report, *, title: str = "Balance of experts") -> str:
    """The page as HTML.

    Raises:
        ValueError: plotly is not installed.
    """
    graph_objects()
    from plotly.offline import get_plotlyjs

    parts = [_section(*part) for part in _sections(report)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    lines = "".join(f"<p>{escape(line)}</p>" for line in source_lines(report))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{CSS}</style>\n<script>{get_plotlyjs()}</script></head>\n'
        f"<body><main><header><h1>{escape(title)}</h1>{lines}</header>\n{_cards(report)}\n"
        + "\n".join(parts)
        + f"\n{_FOOT}</main>\n<script>{_DRAW}</script></body></html>\n"
    )


def write_report(report: Report, path: str | Path, *, title: str = "Balance of experts") -> None:
    """Write the page.

    Raises:
        ValueError: plotly is not installed.
        OSError: the file cannot be written.
    """
    Path(path).write_text(render(report, title=title), encoding="utf-8")


_FOOT = (
    "<footer>max/mean: load of the busiest rank over the mean of all ranks, in one layer; 1 is perfect. Times are predicted by the "
    "cost model, and are of the experts only. A replica gets an even share of its expert's load.</footer>"
)


def _sections(report: Report) -> list[tuple[str, str, str]]:
    """(heading, lead, content) of each section."""
    found = [
        (
            "Load of the experts",
            "Choices of all steps together, over the mean of their layer. Red experts are hot, blue ones cold.",
            _chart("experts", expert_map, report) + _more("The most uneven layers", _table(*hot_rows(report))),
        ),
        (
            "Ranks before and after",
            "Load of each rank over the mean, in each layer. A plan is good where all is white: a layer waits for its busiest rank.",
            _chart("ranks", rank_maps, report),
        ),
        (
            "Balance of each layer",
            f"How far the busiest rank is above the mean, on a log scale; {LEAST_PERCENT}% stands for that and less. "
            "The dotted line is a bound: no placement on this machine has less.",
            _chart("layers", layer_lines, report) + _table(*balance_rows(report)),
        ),
        (
            "Bytes against balance",
            f"What a re-plan reaches for what it moves: {report.trades_about}. Left and low is best.",
            _chart("trades", trade_curve, report),
        ),
    ]
    if report.spares:
        found.append(
            (
                "Redundancy",
                "What more slots for replicas would bring, and the memory that they take.",
                _chart("spares", spare_curve, report),
            )
        )
    found.append(
        (
            "When a rank or a node fails",
            "Experts that nobody else holds, and that must be read from disk before the survivors can go on.",
            _chart("lost", lost_bars, report),
        )
    )
    return found + ([_replay(report)] if report.outcomes else [])


def _replay(report: Report) -> tuple[str, str, str]:
    """The section about the simulation."""
    words = "; ".join(f"{name}: {text}" for name, text in policies_in_words(report))
    rules = report.rules
    about = f"A plan every {rules.interval} steps from the last {rules.window}; red: time that moving took. {words}."
    charts = _chart("bars", step_bars, report) + _chart("lines", step_lines, report)
    return "The trace replayed under policies", about, charts + _table(*outcome_rows(report))


def _section(heading: str, lead: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2><p>{escape(lead)}</p>{content}</section>"


def _cards(report: Report) -> str:
    inner = "".join(
        f'<div class="card"><div class="name">{escape(card.name)}</div><div class="value">'
        + (f'<span class="was">{escape(card.was)} &rarr;</span> ' if card.was else "")
        + f'{escape(card.value)}</div><div class="more">{escape(card.more)}</div></div>'
        for card in cards(report)
    )
    return f'<div class="cards">{inner}</div>'


def _chart(name: str, make: Callable[[Report], Figure], report: Report) -> str:
    """The place of a chart, as high as it will be, and its data."""
    figure = make(report)
    data = json.dumps(json.loads(figure.to_json()), separators=(",", ":")).replace("</", "<\\/")
    height = int(figure.layout.height)
    holder = f'<script type="application/json" data-chart="{name}">{data}</script>'
    return f'<div class="chart" id="{name}" style="min-height:{height}px"></div>{holder}'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], ours: Sequence[str] = ()) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f'<tr class="{"ours" if row[0] in ours else ""}">' + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _more(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
