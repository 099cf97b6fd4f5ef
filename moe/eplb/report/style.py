"""Colours and the style sheet of the page."""

from __future__ import annotations

INK, SOFT, LINE, PAPER = "#17212b", "#5d6b79", "#dfe5ea", "#ffffff"
BLUE, ORANGE, GREEN, RED, GREY, PURPLE = "#1f6feb", "#e07b1a", "#159570", "#c93c3c", "#98a4b0", "#7a4fd0"

#: placements and policies have the same colour in every chart
COLOURS = {
    "none": GREY,
    "eplb": ORANGE,
    "EPLB": ORANGE,
    "static": PURPLE,
    "incremental": BLUE,
    "live": GREEN,
    "plan": BLUE,
    "rorqual, re-plan": BLUE,
    "rorqual, from nothing": PURPLE,
}

#: below the mean blue, at the mean white, above it red: for loads over their mean
DIVERGING = [[0.0, "#1b4f8f"], [0.25, "#7fb0de"], [0.5, "#f7f7f5"], [0.75, "#e8946a"], [1.0, "#9d1c1f"]]

CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f3f5f7; color: #17212b; font: 15px/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
header h1 { font-size: 27px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
header p { margin: 2px 0; color: #5d6b79; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(205px, 1fr)); gap: 12px; margin: 20px 0 8px; }
.card { background: #fff; border: 1px solid #dfe5ea; border-radius: 10px; padding: 14px 16px; }
.card .name { color: #5d6b79; font-size: 13px; }
.card .value { font-size: 21px; font-weight: 650; white-space: nowrap; font-variant-numeric: tabular-nums; margin: 2px 0; }
.card .value .was { color: #98a4b0; font-weight: 500; font-size: 17px; }
.card .more { color: #5d6b79; font-size: 13px; }
section { background: #fff; border: 1px solid #dfe5ea; border-radius: 10px; padding: 18px 20px 14px; margin-top: 16px; }
h2 { font-size: 18px; margin: 0 0 2px; }
section > p { margin: 0 0 10px; color: #45525f; max-width: 110ch; }
.chart { width: 100%; }
.failed { color: #c93c3c; padding: 12px 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 9px; text-align: right; border-bottom: 1px solid #edf0f3; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.text, th.text { text-align: left; }
th { color: #5d6b79; font-weight: 600; font-size: 13px; border-bottom-color: #cfd7de; vertical-align: bottom; }
tr.ours td { background: #eef4ff; }
details { margin-top: 8px; } summary { cursor: pointer; color: #1f6feb; }
.note { border-left: 3px solid #e07b1a; padding: 4px 10px; margin: 10px 0 0; background: #fff7ee; color: #6b4310; }
footer { color: #5d6b79; font-size: 13px; margin-top: 20px; }
@media print { body { background: #fff; } section, .card { break-inside: avoid; } }
"""
