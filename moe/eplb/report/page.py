"""The page: text, tables and charts in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from .charts import LEAST_PERCENT, Figure, expert_map, layer_lines, lost_bars, rank_maps
from .gather import Report
from .html import chart, more, page, section, table
from .time_charts import policies_in_words, spare_curve, step_bars, step_lines, trade_curve
from .words import balance_rows, cards, hot_rows, outcome_rows, source_lines


def render(report: Report, *, title: str = "Balance of experts") -> str:
    """The page as HTML.

    Raises:
        ValueError: plotly is not installed.
    """
    parts = "\n".join(section(*part) for part in _sections(report))
    return page(title, source_lines(report), f"{_cards(report)}\n{parts}\n{_FOOT}")


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
            _chart("experts", expert_map, report) + more("The most uneven layers", table(*hot_rows(report))),
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
            _chart("layers", layer_lines, report) + table(*balance_rows(report)),
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
    return "The trace replayed under policies", about, charts + table(*outcome_rows(report))


def _cards(report: Report) -> str:
    inner = "".join(
        f'<div class="card"><div class="name">{escape(card.name)}</div><div class="value">'
        + (f'<span class="was">{escape(card.was)} &rarr;</span> ' if card.was else "")
        + f'{escape(card.value)}</div><div class="more">{escape(card.more)}</div></div>'
        for card in cards(report)
    )
    return f'<div class="cards">{inner}</div>'


def _chart(name: str, make: Callable[[Report], Figure], report: Report) -> str:
    return chart(name, make(report))
