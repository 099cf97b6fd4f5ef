"""Result files and printed lines that the benchmarks of this package share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ...doctor import versions
from ...flags import Parser
from ...generate import check_writable
from ..results import Results, Row, check_folder, command_line, today, write_results


def add_output_flags(parser: Parser) -> None:
    """Where the figures go."""
    parser.add_argument("--output-json", metavar="FILE", help="Write the rows to this file.")
    parser.add_argument("--results-dir", metavar="DIR", help="Also write a result file into this folder.")


def check_outputs(args: argparse.Namespace) -> None:
    """Refuse places that cannot be written, before anything is measured.

    Raises:
        ValueError: what cannot be written, and why.
    """
    check_writable(args.output_json, "--output-json")
    check_folder(args.results_dir)


def write(bench: str, device: str, rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Write what ``args`` asks for."""
    results = Results(bench=bench, command=command_line(), date=today(), device=device, versions=versions(), rows=tuple(rows))
    if args.output_json:
        Path(args.output_json).write_text(results.to_text(), encoding="utf-8")
    if args.results_dir:
        print(f"wrote {write_results(results, Path(args.results_dir))}")


def show(row: Row) -> str:
    """One printed line: the figure, its settings, its target."""
    params = " ".join(f"{name}={value}" for name, value in row.params.items())
    aim = "" if row.target is None else f"  target {row.target:g} {'met' if row.met else 'NOT met'}"
    peers = "  ".join(f"{name} {value:.4g}" for name, value in row.peers.items())
    return f"{row.name:52s} {row.value:10.4g} {row.unit:8s}{aim}  {peers}  {params}".rstrip()
