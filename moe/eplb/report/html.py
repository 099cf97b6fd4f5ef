"""HTML of a page of charts and tables in one file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from .charts import Figure, graph_objects
from .style import CSS

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


def page(title: str, lines: Sequence[str], body: str) -> str:
    """The whole page: heading, a few lines under it, and what was made by the functions below.

    Raises:
        ValueError: plotly is not installed.
    """
    graph_objects()
    from plotly.offline import get_plotlyjs

    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    under = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{CSS}</style>\n<script>{get_plotlyjs()}</script></head>\n'
        f"<body><main><header><h1>{escape(title)}</h1>{under}</header>\n{body}</main>\n<script>{_DRAW}</script></body></html>\n"
    )


def section(heading: str, lead: str, content: str) -> str:
    """A part of the page; ``content`` is HTML."""
    return f"<section><h2>{escape(heading)}</h2><p>{escape(lead)}</p>{content}</section>"


def chart(name: str, figure: Figure) -> str:
    """The place of a chart, as high as it will be, and its data."""
    data = json.dumps(json.loads(figure.to_json()), separators=(",", ":")).replace("</", "<\\/")
    height = int(figure.layout.height)
    holder = f'<script type="application/json" data-chart="{name}">{data}</script>'
    return f'<div class="chart" id="{name}" style="min-height:{height}px"></div>{holder}'


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], ours: Sequence[str] = ()) -> str:
    """A table; rows whose first cell is in ``ours`` stand out."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f'<tr class="{"ours" if row[0] in ours else ""}">' + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def more(summary: str, content: str) -> str:
    """HTML that is folded away."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
