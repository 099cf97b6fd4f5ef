"""``eplb report``: a load, a plan and what they cost on one HTML page that needs no network."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..flags import Parser
from .files import check_out, load_of, slots_of
from .machine import add_cost, add_machine, machine_of
from .progress import progress
from .simulate_command import add_rules, rules_of


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("load", nargs="+", metavar="LOAD", help="Recorded or made load (several files: of several ranks).")
    parser.add_argument("--out", default="eplb.html", metavar="FILE", help="Where to write the page. (default: eplb.html)")
    parser.add_argument("--previous", metavar="MAP", help="What is placed now; default: experts in order, spare slots empty.")
    parser.add_argument("--plan", metavar="MAP", help="The plan to show; default: one is made.")
    parser.add_argument("--title", default="Balance of experts", metavar="TEXT", help="Heading of the page.")
    add_machine(parser)
    add_rules(parser)
    add_cost(parser)


def run(args: argparse.Namespace) -> int:
    """Compute and write the page; the exit code."""
    from ...moe.eplb.report.charts import graph_objects
    from ...moe.eplb.report.gather import WORK, gather
    from ...moe.eplb.report.page import write_report
    from ...moe.eplb.simulation.rules import POLICIES

    graph_objects()  # a missing package is told before the work
    trace = load_of(args.load)
    machine = machine_of(args, trace, args.plan or args.previous)
    rules = rules_of(args, trace.n_steps)
    maps = {path: slots_of(path, trace, machine) for path in (args.previous, args.plan) if path is not None}
    check_out(args.out)
    with progress(WORK + len(POLICIES) * trace.n_steps, "report") as moved_on:
        found = gather(
            trace,
            machine,
            before=maps.get(args.previous),
            before_name=args.previous or "experts in order",
            after=maps.get(args.plan),
            rules=rules,
            progress=moved_on,
        )
    write_report(found, args.out, title=args.title)
    print(f"wrote {args.out} ({Path(args.out).stat().st_size / 1e6:.1f} MB): open it in any browser")
    return 0
