"""``bench kv policy``: what replacement policies miss, on traces of the published locality and of the embedded model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ...console import table
from ...flags import Parser
from ..results import Row
from .budgets import layer_profiles, miss_curve, share_out
from .buffer import Outcome, simulate
from .policies import all_policies, best, lru
from .record import load, record, save
from .tables import add_output_flags, check_outputs, show, write
from .traces import HARD, PUBLISHED, PUBLISHED_FIXED, PUBLISHED_MISSES, Selection, overlap, scaled, steps
from .warm_start import first_misses

Trace = Sequence[Selection]
SIZES = (1, 2, 4)  # rows of the buffer, in selections
PREFETCH = (32, 16, 8, 4)  # the next k / n ranks are fetched too
WINDOWS = (0, 1, 2, 8, 32)  # last prefill tokens whose choices seed the buffer
_TARGET = 11.0  # percent missed at 2k, where LRU misses 13.4
_FIRST_TARGET = 25.0  # percent of k missed in the first step
_BUDGET_TARGET = 0.8  # of the misses with equal buffers


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--k", type=int, default=2048, metavar="N", help="Positions a step chooses (default: 2048).")
    parser.add_argument("--context", type=int, metavar="N", help="Positions at the first step; 32 k by default.")
    parser.add_argument(
        "--steps", type=int, default=240, metavar="N", help="Steps of a trace; the first 100 are not counted (default: 240)."
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of the traces.")
    parser.add_argument("--no-tiny", action="store_true", help="Leave out the embedded model's own traces, which take minutes to record.")
    parser.add_argument("--recorded", metavar="FILE", help="Take the embedded model's traces from this file instead.")
    parser.add_argument("--save-recorded", metavar="FILE", help="Write the recorded traces to this npz file.")
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the simulations; the exit code."""
    if args.steps <= 132:
        raise ValueError(f"--steps {args.steps} leaves too few steps after the warm-up of 100; give 133 or more")
    check_outputs(args)
    context = args.context or 32 * args.k
    rows: list[Row] = []
    for config in (PUBLISHED, PUBLISHED_FIXED, HARD):
        trace = list(steps(scaled(config, context=context, k=args.k, seed=args.seed), args.steps))
        rows += trace_rows(config.name, trace, warm_up=100, aim=config is PUBLISHED)
    recorded = _recorded(args)
    for number, trace in enumerate(recorded):
        rows += trace_rows(f"rorqual-tiny, layer {number}", trace, warm_up=len(trace) // 4, aim=False)
    print()
    rows += budget_rows("made-up layers", [list(steps(c, 140)) for c in layer_profiles(16 * args.k, args.k)])
    if recorded:
        rows += budget_rows("rorqual-tiny", recorded)
    write("kv-policy", "cpu", rows, args)
    return 0


def _recorded(args: argparse.Namespace) -> list[list[Selection]]:
    if args.recorded:
        return load(Path(args.recorded))
    if args.no_tiny:
        return []
    traces = record()
    if args.save_recorded:
        save(traces, Path(args.save_recorded))
    return traces


def trace_rows(name: str, trace: Trace, *, warm_up: int, aim: bool) -> list[Row]:
    """Print and return the misses of every policy, with prefetch, and of first steps; ``aim``: hold them against targets."""
    k, context = len(trace[0].chosen), len(trace[0].scores)
    same, moved = overlap(trace[warm_up:]), overlap(trace[warm_up:], shift=1)
    print(f"\n{name}: k {k}, context {context:,}, overlap of steps {100 * same:.0f}%, moved on by one {100 * moved:.0f}%")
    params = {"trace": name, "k": k, "context": context}
    found: dict[str, dict[int, Outcome]] = {}
    for number, policy in enumerate(all_policies()):
        found[policy.name] = {size: simulate(trace, size * k, all_policies()[number], warm_up=warm_up) for size in SIZES}
    for part in PREFETCH:
        label = f"score, next k/{part} too"
        found[label] = {size: simulate(trace, size * k, best(), warm_up=warm_up, prefetch=k // part) for size in SIZES}
    lines, rows = [], []
    for label, outcomes in found.items():
        lines.append([label, *(outcomes[size].missed for size in SIZES), outcomes[2].prefetched])
        for size in SIZES:
            peers = {other: found[other][size].missed for other in ("lru", "belady") if other != label}
            extra = {"prefetched_percent": round(outcomes[size].prefetched, 2)} if outcomes[size].prefetched else {}
            target = _TARGET if aim and size == 2 and label.startswith("score") and label in ("score", "score, next k/16 too") else None
            settings = params | {"rows": f"{size}k"} | extra
            rows.append(
                Row(
                    name=f"misses, {label}",
                    params=settings,
                    value=outcomes[size].missed,
                    unit="% of k",
                    better="lower",
                    peers=peers,
                    target=target,
                )
            )
    print(table(["misses, % of k", *(f"{size}k rows" for size in SIZES), "prefetched at 2k"], lines))
    if aim:
        print("published: " + ", ".join(f"{policy} {size}k {value}" for (policy, size), value in PUBLISHED_MISSES.items()))
    return rows + _first_rows(trace, params, aim)


def _first_rows(trace: Trace, params: dict[str, object], aim: bool) -> list[Row]:
    rows = []
    for window in WINDOWS:
        value = first_misses(trace, window, 2 * len(trace[0].chosen))
        seeded = "oldest positions" if window == 0 else f"last {window} tokens' choices"
        target = _FIRST_TARGET if aim and window == 8 else None
        row = Row(
            name="misses of the first step", params=params | {"rows": "2k", "seeded": seeded}, value=value, unit="% of k", better="lower",
            target=target,
        )  # fmt: skip
        rows.append(row)
    print("first step, 2k rows: " + ", ".join(f"{row.params['seeded']} {row.value:.1f}" for row in rows))
    return rows


def budget_rows(name: str, traces: Sequence[Trace]) -> list[Row]:
    """Print and return what sharing rows out among layers saves at equal bytes."""
    rows = []
    for policy in (lru, best):
        split = share_out([miss_curve(trace, policy, warm_up=len(trace) // 3) for trace in traces], mean_size=2.0)
        params = {"layers": name, "policy": policy().name, "rows": "2k a layer in the mean", "sizes_k": [round(s, 2) for s in split.sizes]}
        rows.append(
            Row(
                name="misses, rows shared out among layers", params=params, value=split.shared_out, unit="% of k", better="lower",
                peers={"equal": split.equal}, target=_BUDGET_TARGET * split.equal,
            )
        )  # fmt: skip
        print(show(rows[-1]))
    return rows
