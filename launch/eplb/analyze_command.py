"""``eplb analyze``: is a load uneven, does it stay so, and would a plan help?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from ..console import table
from ..flags import Parser
from .balance_text import balance_table
from .files import load_of
from .machine import add_cost, add_load, add_machine, cost_of, machine_of, machine_text

if TYPE_CHECKING:
    from ...moe.eplb.analysis import Analysis
    from ...moe.eplb.topology import Topology
    from ...moe.eplb.trace import LoadTrace

_SHOWN = 5  # layers in the table of the most uneven ones


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_load(parser)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_machine(parser)
    add_cost(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    from ...moe.eplb.analysis import analyze

    trace = load_of(args.load)
    asked = args.ranks is not None or trace.n_ranks is not None
    machine = machine_of(args, trace) if asked else None
    found = analyze(trace, machine, cost=cost_of(args))
    if args.json:
        print(json.dumps(_as_dict(trace, found), indent=2))
        return 0
    print(trace_text(trace))
    print("\n" + balance_table(found.experts, "experts"))
    if machine is not None:
        print(f"\nranks, experts in order: {machine_text(machine, trace.n_experts)}")
        print(balance_table(found.ranks, "ranks"))
    print("\n" + _hot_table(trace, found) + "\n")
    print("\n".join([*_diagnosis(trace, machine), *verdict(found)]))
    return 0


def _diagnosis(trace: LoadTrace, machine: Topology | None) -> tuple[str, ...]:
    """Whether the imbalance of experts in order is real, lasts and can be cured, in sentences."""
    from ...moe.eplb.load.diagnosis import diagnose
    from ...moe.eplb.simulation.step import in_order

    if machine is None:
        return ()
    return diagnose(trace, machine, in_order(len(trace.layer_ids), trace.n_experts, machine)).verdict


def trace_text(trace: LoadTrace) -> str:
    """What a load covers, in a line or two."""
    steps, layers, experts = trace.counts.shape
    top_k = "" if trace.top_k is None else f", top-{trace.top_k}"
    tokens = "" if trace.tokens is None else f", {int(trace.tokens.sum()):,} tokens"
    meta = f" ({', '.join(f'{k} {v}' for k, v in trace.meta.items())})" if trace.meta else ""
    return f"{steps:,} steps, {layers} MoE layers ({_ids(trace.layer_ids)}) of {experts} experts{top_k}{tokens}{meta}"


def _ids(ids: tuple[int, ...]) -> str:
    together = ids == tuple(range(ids[0], ids[0] + len(ids)))
    return f"{ids[0]}-{ids[-1]}" if together and len(ids) > 1 else ", ".join(map(str, ids))


def _hot_table(trace: LoadTrace, found: Analysis) -> str:
    """The most uneven layers and their hottest experts."""
    worst = (-found.layer_imbalance).argsort(kind="stable")[:_SHOWN]
    rows: list[list[object]] = []
    for layer in worst:
        kept = "-" if found.persistence is None else f"{found.persistence[layer]:.0%}"
        experts = " ".join(map(str, found.hottest[layer].tolist()))
        rows.append([trace.layer_ids[layer], float(found.layer_imbalance[layer]), f"{found.hot_share[layer]:.0%}", kept, experts])
    many = found.hottest.shape[1]
    return table(["layer", "max/mean", f"share of {many} hottest", "still hottest later", "hottest experts"], rows)


def verdict(found: Analysis) -> list[str]:
    """What it means, in sentences."""
    lines = []
    if found.persistence is not None and found.foresight is None:
        mean = float(found.persistence.mean())
        lines.append(
            f"Of the hottest experts of the first half, {mean:.0%} are the hottest of the second half ({found.chance:.0%} by chance): "
            + ("what is hot stays hot." if mean > 0.5 else "what is hot changes within the trace; plan often, or record longer.")
        )
    ahead = found.foresight
    if ahead is not None:
        gain = ahead.seconds_in_order / ahead.seconds_planned - 1.0
        lines.append(
            f"A plan from the first half brings the second half from max/mean {ahead.in_order:.3f} to {ahead.planned:.3f} "
            f"({ahead.promised:.3f} in the half it saw); predicted time of the experts of a step {1e3 * ahead.seconds_in_order:.2f} -> "
            f"{1e3 * ahead.seconds_planned:.2f} ms."
        )
        lines.append(f"{'Worth it' if gain > 0.02 else 'Not worth it'}: {gain:+.1%} speed of the experts.")
    elif found.persistence is not None:
        lines.append("Give --ranks N to see what it means for ranks, and whether a plan would help.")
    else:
        lines.append("One step only: nothing can be said about whether it lasts; record several windows.")
    return lines


def _as_dict(trace: LoadTrace, found: Analysis) -> dict[str, Any]:
    steps, layers, experts = trace.counts.shape
    return {
        "steps": steps,
        "layers": list(trace.layer_ids),
        "experts": experts,
        "expert_balance": {name: one.as_dict() for name, one in found.experts.items()},
        "rank_balance": {name: one.as_dict() for name, one in found.ranks.items()},
        "layer_imbalance": found.layer_imbalance.tolist(),
        "hottest": found.hottest.tolist(),
        "persistence": None if found.persistence is None else found.persistence.tolist(),
        "foresight": None if found.foresight is None else vars(found.foresight),
    }
