"""``bench report``: result files as markdown tables."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..flags import Parser
from .results import RESULTS, report


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="Result files or folders of them; the project's own by default.")


def run(args: argparse.Namespace) -> int:
    """Print the tables; the exit code."""
    paths: list[Path] = []
    for place in [Path(name) for name in args.files] or [RESULTS]:
        paths += sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not paths:
        raise ValueError(f"no result files in {', '.join(args.files) or RESULTS}; `rorqual bench throughput --results-dir DIR` writes one")
    print(report(paths))
    return 0
