"""``eplb advise``: how many slots for replicas a load needs, and the memory that they take."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ..flags import Parser
from .files import load_of
from .machine import add_cost, add_coverage, add_load, cost_of


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_load(parser)
    parser.add_argument("--ranks", type=int, metavar="N", help="Ranks that experts are spread over; default: as the trace says.")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="Nodes that the ranks are on. (default: 1)")
    parser.add_argument("--target", type=float, default=1.02, metavar="X", help="Imbalance (max/mean) that is enough. (default: 1.02)")
    parser.add_argument("--slots", type=int, nargs="+", metavar="N", help="Numbers of slots to try; default: up to four more on each rank.")
    add_coverage(parser)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_cost(parser)


def run(args: argparse.Namespace) -> int:
    """Plan for each number of slots and print; the exit code."""
    from ...moe.eplb.replan.advise import advise

    trace = load_of(args.load)
    ranks = args.ranks if args.ranks is not None else trace.n_ranks
    if ranks is None:
        raise ValueError("the input does not say how many ranks there are; give --ranks N")
    found = advise(
        trace.total.astype(float),
        n_ranks=ranks,
        n_nodes=args.nodes,
        target=args.target,
        slots=args.slots,
        coverage=args.coverage,
        steps=float(trace.n_steps),
        cost=cost_of(args),
    )
    if args.json:
        print(json.dumps(asdict(found), indent=2))
        return 0
    print(f"{len(trace.layer_ids)} MoE layers of {trace.n_experts} experts on {ranks} ranks\n")
    print(found.text())
    return 0
