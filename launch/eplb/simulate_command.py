"""``eplb simulate``: a trace replayed under policies, with what moving experts costs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..console import table
from ..flags import Parser
from ..inspect_text import human_bytes
from ..quantities import parse_bytes
from .files import load_of, slots_of
from .machine import add_cost, add_load, add_machine, cost_of, machine_of, machine_text
from .progress import progress

if TYPE_CHECKING:
    from ...moe.eplb.simulation.outcome import Outcome
    from ...moe.eplb.simulation.rules import Rules
    from ...moe.eplb.topology import Topology
    from ...moe.eplb.trace import LoadTrace

POLICIES = ("none", "eplb", "static", "incremental", "live")


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_load(parser, "Recorded or made load with several steps")
    parser.add_argument(
        "--policies", nargs="+", metavar="NAME",
        help=f"Of {', '.join(POLICIES)}; default: all. eplb is the published algorithm.",
    )  # fmt: skip
    parser.add_argument("--start", metavar="MAP", help="Placement at the first step; default: experts in order, spare slots empty.")
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_machine(parser)
    add_rules(parser)
    add_cost(parser)


def add_rules(parser: Parser) -> None:
    """Flags of ``rules_of``."""
    group = parser.add_argument_group("policies")
    group.add_argument("--interval", type=int, metavar="N", help="Steps between plans; default: 100, or a fifth of a shorter trace.")
    group.add_argument("--window", type=int, metavar="N", help="Last steps that a plan sees; default: as the interval.")
    group.add_argument("--budget", metavar="SIZE", help="Bytes that one re-plan may move in all (incremental, live); default: no limit.")
    group.add_argument(
        "--bytes-per-step", default="256MiB", metavar="SIZE", help="Bytes that a rank receives beside a step (live). (default: 256MiB)"
    )
    group.add_argument(
        "--drag", type=float, default=0.1, metavar="X", help="Part of a live transfer's time by which it delays steps. (default: 0.1)"
    )
    group.add_argument(
        "--rest-ms", type=float, default=0.0, metavar="X", help="Milliseconds of a step outside of the experts. (default: 0)"
    )
    group.add_argument(
        "--plan-ms",
        type=float,
        default=0.0,
        metavar="X",
        help="Milliseconds that steps wait for a plan where they wait for moves. (default: 0)",
    )
    group.add_argument("--target", type=float, default=1.02, metavar="X", help="Imbalance at which a re-plan is content. (default: 1.02)")
    group.add_argument(
        "--objective", choices=("tokens", "activated", "seconds", "slack"), default="tokens", help="Of plans. (default: tokens)"
    )
    group.add_argument("--groups", type=int, default=1, metavar="N", help="Groups of experts, for eplb's mode by nodes. (default: 1)")
    group.add_argument("--water", action="store_true", help="Choose replicas by the load of the step (water filling) instead of evenly.")


def rules_of(args: argparse.Namespace, n_steps: int) -> Rules:
    """The rules of the flags, for a trace of so many steps."""
    from ...moe.eplb.simulation.rules import Rules

    interval = args.interval if args.interval is not None else max(1, min(100, n_steps // 5))
    return Rules(
        interval=interval,
        window=args.window if args.window is not None else interval,
        budget_bytes=None if args.budget is None else parse_bytes(args.budget),
        bytes_per_step=parse_bytes(args.bytes_per_step),
        drag=args.drag,
        rest_seconds=args.rest_ms * 1e-3,
        plan_seconds=args.plan_ms * 1e-3,
        target=args.target,
        objective=args.objective,
        n_groups=args.groups,
        water=args.water,
        cost=cost_of(args),
    )


def run(args: argparse.Namespace) -> int:
    """Replay and print; the exit code."""
    from ...moe.eplb.simulation.replay import floor, simulate

    trace = load_of(args.load)
    machine = machine_of(args, trace, args.start)
    rules = rules_of(args, trace.n_steps)
    policies = args.policies or _policies(trace, machine, rules)
    start = None if args.start is None else slots_of(args.start, trace, machine)
    with progress(len(policies) * trace.n_steps, "steps", quiet=args.json) as moved_on:
        outcomes = simulate(trace, machine, policies, rules=rules, start=start, progress=moved_on)
    least = floor(trace, machine, rules)
    if args.json:
        print(json.dumps({"floor_step_ms": 1e3 * least, "policies": [found.summary() for found in outcomes]}, indent=2))
        return 0
    print(machine_text(machine, trace.n_experts))
    print(f"{trace.n_steps:,} steps, a plan every {rules.interval} steps from the last {rules.window}\n")
    print(outcome_table(outcomes))
    print("\nTimes are of the experts" + (" and --rest-ms" if rules.rest_seconds else " alone (--rest-ms adds the rest of a step)"), end="")
    print(f", as the cost model predicts them. With perfect balance a step takes {1e3 * least:.2f} ms.")
    return 0


def _policies(trace: LoadTrace, machine: Topology, rules: Rules) -> list[str]:
    """All policies; without the published algorithm where it cannot plan for the machine, which is said on stderr."""
    from ...moe.eplb.simulation.published import published_plan

    try:
        published_plan(trace.total[:1].astype(float), machine, n_groups=rules.n_groups)
    except ValueError as error:
        print(f"note: without policy eplb: {error}", file=sys.stderr)
        return [name for name in POLICIES if name != "eplb"]
    return list(POLICIES)


def outcome_table(outcomes: Sequence[Outcome]) -> str:
    """What policies made of a trace, one a row."""
    rows: list[list[object]] = []
    phases = sorted({phase for found in outcomes for phase in found.by_phase()} - {"mixed"})
    for found in outcomes:
        s: dict[str, Any] = found.summary()
        rate = s["tokens_per_second"]
        rows.append(
            [
                found.policy,
                s["step_ms"],
                *(s["step_ms_by_phase"].get(phase) for phase in phases),
                s["step_ms_second_half"],
                s["step_ms_p99"],
                None if rate is None else round(rate),
                f"{s['imbalance_second_half']:.3f}",
                f"{s['moving_share']:.1%}",
                f"{s['plans_that_moved']}/{s['plans']}",
                human_bytes(s["moved_bytes"]),
                s["plan_ms_measured"],
            ]
        )
    header = [
        "policy",
        "step ms",
        *(f"{p} ms" for p in phases),
        "2nd half",
        "p99",
        "tokens/s",
        "max/mean",
        "moving",
        "moves",
        "moved",
        "plan ms",
    ]
    return table(header, rows)
