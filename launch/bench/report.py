"""``bench report``: result files as markdown tables, served runs as one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..flags import Parser
from ..generate import check_writable
from .results import RESULTS, report


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="Result files or folders of them; the project's own by default.")
    parser.add_argument("--html", metavar="FILE", help="Write a page of the runs of `bench serve` and `bench sweep` that the files hold.")
    parser.add_argument("--title", default="Served runs", metavar="TEXT", help="Heading of the page.")


def run(args: argparse.Namespace) -> int:
    """Print the tables, or write the page; the exit code."""
    if args.html is not None:
        return _page(args)
    paths: list[Path] = []
    for place in [Path(name) for name in args.files] or [RESULTS]:
        paths += sorted(place.glob("*.json")) if place.is_dir() else [place]
    if not paths:
        raise ValueError(f"no result files in {', '.join(args.files) or RESULTS}; `rorqual bench throughput --results-dir DIR` writes one")
    print(report(paths))
    return 0


def _page(args: argparse.Namespace) -> int:
    from .serve.files import read_runs
    from .serve.page import render

    if not args.files:
        raise ValueError("--html needs files of `rorqual bench serve --save-result` or `rorqual bench sweep`")
    check_writable(args.html, "--html")
    text = render(read_runs(args.files), title=args.title)
    Path(args.html).write_text(text, encoding="utf-8")
    print(f"wrote {args.html} ({len(text) / 1e6:.1f} MB): open it in any browser")
    return 0
