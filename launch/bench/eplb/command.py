"""``bench eplb``: planners of expert placement against EPLB and against bounds, on made loads; needs no GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ....moe.eplb.plan import Floats
from ....moe.eplb.planner.static import plan_static
from ....moe.eplb.topology import Topology
from ...flags import Parser
from ...generate import check_writable
from ..kv.tables import add_output_flags, check_outputs, show, write
from ..results import Row
from . import choice_rows, locality_rows, replan_rows, static_rows
from .cases import MACHINES, skewed_load
from .partner_lp import partner_bound

#: bounds of each layer that linear programming has proven for ``skewed_load()``, by machine; ``--save-lp-bounds`` finds them
LP_BOUNDS = Path(__file__).with_name("lp_bounds.json")

#: what the command measures, in order: each takes the number of timed tries and the proven bounds, and returns rows
MAKERS: dict[str, Callable[..., list[Row]]] = {
    "static": static_rows.rows,
    "replan": replan_rows.rows,
    "locality": locality_rows.rows,
    "choice": choice_rows.rows,
}


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--only", choices=tuple(MAKERS), help="One part only.")
    parser.add_argument("--tries", type=int, default=20, metavar="N", help="Timed runs of each planner; the best one counts (default: 20).")
    parser.add_argument(
        "--save-lp-bounds",
        metavar="FILE",
        help="Find the bounds by linear programming again (half an hour; needs scipy), into this JSON file.",
    )
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    if args.tries < 1:
        raise ValueError(f"--tries {args.tries}: give 1 or more")
    check_outputs(args)
    check_writable(args.save_lp_bounds, "--save-lp-bounds")
    proven = _proven(args)
    rows = []
    for name, maker in MAKERS.items():
        if args.only in (None, name):
            for row in maker(tries=args.tries, proven=proven):
                print(show(row), flush=True)
                rows.append(row)
    write("eplb", "cpu", rows, args)
    return 0


def _proven(args: argparse.Namespace) -> Mapping[str, Floats]:
    """[layers] bounds of the machines that have few slots a rank, by their names: as stored here, or found again."""
    if not args.save_lp_bounds:
        stored = json.loads(LP_BOUNDS.read_text(encoding="utf-8"))
        return {name: np.array(values) for name, values in stored.items()}
    found = {static_rows.key(machine): _bounds_of(machine.n_slots, machine.n_ranks) for machine in MACHINES if machine.gap is not None}
    rounded = {name: (np.floor(values * 1e5) / 1e5).tolist() for name, values in found.items()}
    Path(args.save_lp_bounds).write_text(json.dumps(rounded) + "\n", encoding="utf-8")
    return found


def _bounds_of(n_slots: int, n_ranks: int) -> Floats:
    load = skewed_load()
    plan = plan_static(load, Topology.even(n_slots=n_slots, n_ranks=n_ranks))
    width = n_slots // n_ranks
    return np.array(
        [
            partner_bound(row, n_ranks=n_ranks, width=width, low=float(low), high=float(high))
            for row, low, high in zip(load, plan.bound, plan.imbalance, strict=True)
        ]
    )
