"""``eplb plan``: which expert each slot shall hold, and what is won by it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import table
from ..flags import Parser
from ..inspect_text import human_bytes
from ..quantities import parse_bytes
from .files import check_out, load_of, save_map, slots_of
from .machine import add_cost, add_coverage, add_load, add_machine, cost_of, machine_of, machine_text

if TYPE_CHECKING:
    from ...moe.eplb.plan import Floats, Plan
    from ...moe.eplb.topology import Ints, Topology
    from ...moe.eplb.trace import LoadTrace


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_load(parser)
    parser.add_argument("--out", metavar="FILE", help="Where to write the map; the name's end chooses the format, --to another.")
    parser.add_argument("--to", metavar="FORMAT", help="Format of the map (`rorqual eplb convert --help` lists them).")
    parser.add_argument("--previous", metavar="MAP", help="What is placed now: the plan moves as little as it can.")
    parser.add_argument(
        "--objective", choices=("tokens", "activated", "seconds", "slack"), default="tokens",
        help="What is made small: the most tokens of a rank, its activated experts, or predicted time. slack: tokens, with replicas where "
        "choosing them by the load of a step (water filling) has most to choose. (default: tokens)",
    )  # fmt: skip
    parser.add_argument("--target", type=float, default=1.02, metavar="X", help="Imbalance at which a re-plan is content. (default: 1.02)")
    parser.add_argument("--budget", metavar="SIZE", help="Bytes that may be moved in all, with --previous; default: no limit.")
    parser.add_argument("--horizon", type=int, metavar="N", help="Steps within which a move must pay, with --previous; default: need not.")
    add_coverage(parser)
    parser.add_argument("--explain", metavar="LAYER:EXPERT", help="Say why this expert has the replicas it has (numbers of the model).")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_machine(parser)
    add_cost(parser)


def run(args: argparse.Namespace) -> int:
    """Plan, write and print; the exit code."""
    trace = load_of(args.load)
    machine = machine_of(args, trace, args.previous)
    asked = _expert_of(args.explain, trace)
    if args.previous is None and (args.budget is not None or args.horizon is not None):
        raise ValueError("--budget and --horizon weigh moves from what is placed now: give --previous MAP, or leave them out")
    check_out(args.out, args.to, "map")
    old, new = _planned(args, trace, machine)
    if args.out is not None:
        save_map(new.slot_to_expert, trace, machine, args.out, args.to)
    if args.json:
        print(json.dumps({"before": plan_dict(old), "after": plan_dict(new), "reason": new.reason, "out": args.out}, indent=2))
        return 0
    print(machine_text(machine, trace.n_experts))
    print(f"{new.reason}\n")
    print(plan_table({_placed_now(args.previous, old, new): old, "plan": new}))
    if asked is not None:
        print("\n" + _explained(new, trace, *asked))
    if args.out is not None:
        print(f"\nwrote {args.out}")
    return 0


def _placed_now(previous: str | None, old: Plan, new: Plan) -> str:
    """What the table calls the placement that is there."""
    name = "experts in order" if previous is None else previous
    return name if old.topology.failed == new.topology.failed else f"{name} before the failure"


def _planned(args: argparse.Namespace, trace: LoadTrace, machine: Topology) -> tuple[Plan, Plan]:
    """What is placed, and the plan; both for the load."""
    from ...moe.eplb.api import make_plan
    from ...moe.eplb.assess import assess
    from ...moe.eplb.simulation.step import in_order

    cost, load, steps = cost_of(args), trace.total.astype(float), float(trace.n_steps)
    held = None if args.previous is None else slots_of(args.previous, trace, machine)
    made = make_plan(
        load,
        machine,
        previous=held,
        objective=args.objective,
        steps=steps,
        budget_bytes=None if args.budget is None else parse_bytes(args.budget),
        horizon_steps=args.horizon,
        target=args.target,
        coverage=args.coverage,
        cost=cost,
    )
    before = in_order(len(load), trace.n_experts, machine) if held is None else held
    made = _filled(args, made, load, steps, before)
    now = machine
    if (before[:, ~machine.usable] >= 0).any():  # what failed ranks held counts: it is how things were before they failed
        now = replace(machine, failed=frozenset())
    old = assess(before, load, now, cost=cost, steps=steps)
    if held is None:  # what experts in order must move to get there
        made = assess(made.slot_to_expert, load, machine, cost=cost, steps=steps, previous=before, reason=made.reason)
    return old, made


def _filled(args: argparse.Namespace, made: Plan, load: Floats, steps: float, before: Ints) -> Plan:
    """The plan without empty slots, if the format of the map knows none."""
    ours = args.out is None or (args.to or Path(args.out).suffix).lstrip(".").startswith(("parquet", "jsonl"))
    machine = made.topology
    empty = int(((made.slot_to_expert < 0) & machine.usable).sum())
    if ours or not empty:
        return made
    from ...moe.eplb.assess import assess
    from ...moe.eplb.planner.fill import fill

    cost = cost_of(args)
    left = None if args.budget is None else max(0, parse_bytes(args.budget) // cost.expert_bytes - int(made.moved.sum()))
    return assess(
        fill(made.slot_to_expert, load, machine, previous=before, most_moves=left),
        load,
        machine,
        cost=cost,
        steps=steps,
        previous=before,
        kept=made.kept,
        reason=f"{made.reason}; {empty} slots that it left empty have replicas, as {args.to or Path(args.out).suffix} knows no empty ones",
    )


def _explained(plan: Plan, trace: LoadTrace, layer: int, expert: int) -> str:
    """Why an expert has its replicas, with the model's number of the layer instead of the row ``layer``."""
    from ...moe.eplb.explain import explain

    text = explain(plan, trace.total.astype(float), expert, layer=layer)
    return text.replace(f"layer {layer}, expert", f"layer {trace.layer_ids[layer]}, expert", 1)


def plan_dict(found: Plan) -> dict[str, Any]:
    """Figures of a plan, for JSON."""
    return {
        "imbalance": float(found.imbalance.mean()),
        "imbalance_worst_layer": float(found.imbalance.max()),
        "bound": float(found.bound.mean()),
        "gap": float(found.gap.mean()),
        "step_ms": 1e3 * found.seconds,
        "moved_experts": int(found.moved.sum()),
        "moved_share": float(found.moved.sum() / max(1, (found.slot_to_expert >= 0).sum())),
        "bytes_to_move": found.bytes_to_move,
        "layers_kept": int(found.kept.sum()),
    }


def plan_table(plans: dict[str, Plan]) -> str:
    """Plans side by side."""
    rows: list[list[object]] = []
    for name, found in plans.items():
        s = plan_dict(found)
        rows.append(
            [
                name,
                f"{s['imbalance']:.4f}",
                f"{s['imbalance_worst_layer']:.4f}",
                f"{s['bound']:.4f}",
                f"{s['gap']:.2%}",
                s["step_ms"],
                s["moved_experts"],
                f"{s['moved_share']:.1%}",
                human_bytes(s["bytes_to_move"]),
            ]
        )
    return table(["placement", "max/mean", "worst layer", "bound", "above it", "step ms", "moved", "of slots", "bytes"], rows)


def _expert_of(text: str | None, trace: LoadTrace) -> tuple[int, int] | None:
    """``LAYER:EXPERT`` -> (row of the layer, expert)."""
    if text is None:
        return None
    layer, _, expert = text.partition(":")
    if not (layer.isdecimal() and expert.isdecimal()):
        raise ValueError(f"--explain needs LAYER:EXPERT, for example {trace.layer_ids[0]}:0, found {text!r}")
    if int(layer) not in trace.layer_ids or int(expert) >= trace.n_experts:
        raise ValueError(f"--explain {text}: layers are {trace.layer_ids[0]} to {trace.layer_ids[-1]}, experts 0 to {trace.n_experts - 1}")
    return trace.layer_ids.index(int(layer)), int(expert)
