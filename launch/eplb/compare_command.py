"""``eplb compare``: placements side by side on one load."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ..flags import Parser
from .balance_text import balance_table
from .files import load_of, slots_of
from .machine import add_cost, add_machine, cost_of, machine_of, machine_text
from .plan_command import plan_dict, plan_table

if TYPE_CHECKING:
    from ...moe.eplb.plan import Plan
    from ...moe.eplb.topology import Topology
    from ...moe.eplb.trace import LoadTrace


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("load", metavar="LOAD", help="Recorded or made load.")
    parser.add_argument("maps", nargs="+", metavar="MAP", help="Placements; moves are counted from the first one.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_machine(parser)
    add_cost(parser)


def run(args: argparse.Namespace) -> int:
    """Compare and print; the exit code."""
    from ...moe.eplb.metrics import balance
    from ...moe.eplb.plan import rank_loads
    from ...moe.eplb.replan.coverage import losses
    from ...moe.eplb.validate import validate

    trace = load_of([args.load])
    found, machine = _assessed(args, trace)
    balances = {name: balance(rank_loads(plan.slot_to_expert, trace.total.astype(float), machine), machine) for name, plan in found.items()}
    problems = {name: validate(plan.slot_to_expert, trace.n_experts, machine) for name, plan in found.items()}
    lost = {name: losses(plan.slot_to_expert, trace.n_experts, machine) for name, plan in found.items()}
    if args.json:
        rows = {
            name: plan_dict(plan)
            | {"balance": balances[name].as_dict(), "problems": problems[name]}
            | {"lost_by_rank": int(lost[name].by_rank.sum(0).max()), "lost_by_node": int(lost[name].by_node.sum(0).max())}
            for name, plan in found.items()
        }
        print(json.dumps(rows, indent=2))
        return 0
    print(machine_text(machine, trace.n_experts) + "\n")
    print(plan_table(found))
    print("\n" + balance_table(balances, "placement"))
    print()
    for name in found:
        layers = len(trace.layer_ids)
        print(
            f"{name}: the loss of a rank loses up to {lost[name].by_rank.sum(0).max() / layers:.1f} experts a layer, "
            f"of a node {lost[name].by_node.sum(0).max() / layers:.1f}"
        )
    for name, texts in problems.items():
        for text in texts:
            print(f"note: {name}: {text}")
    return 0


def _assessed(args: argparse.Namespace, trace: LoadTrace) -> tuple[dict[str, Plan], Topology]:
    """The placements by file, each with what it moves from the first, and the machine that they are on.

    Raises:
        ValueError: placements of different sizes, or that do not fit the load; named by file.
    """
    from ...moe.eplb.assess import assess
    from ...moe.eplb.validate import validate

    machine = machine_of(args, trace, args.maps[0])
    first = slots_of(args.maps[0], trace, machine)
    cost, load, steps = cost_of(args), trace.total.astype(float), float(trace.n_steps)
    found: dict[str, Plan] = {}
    for path in args.maps:
        slots = slots_of(path, trace, machine)
        wrong = validate(slots, trace.n_experts, machine, duplicates=False)
        if wrong:
            raise ValueError(f"{path}: {wrong[0]}")
        found[path] = assess(slots, load, machine, cost=cost, steps=steps, previous=first)
    return found, machine
