"""The command: every part in turn within a budget of time; one result file, one log."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from ...flags import Parser
from ..kv.tables import add_output_flags, check_outputs, show, write
from ..results import Row
from .parts import Outcome, run_part
from .program import GROUPS, LARGE, program


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--ranks", type=int, metavar="N", help="GPUs; all of this host by default.")
    parser.add_argument(
        "--only", metavar="NAME,..", default=",".join(GROUPS), help=f"Parts of {', '.join((*GROUPS, *LARGE))}; all but the last by default."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, over CPU ranks, to see that it works.")
    parser.add_argument("--budget-seconds", type=float, default=470.0, metavar="S", help="Parts that no time is left for are named.")
    parser.add_argument("--log", default="multi_gpu.log", metavar="FILE", help="What the parts print.")
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code is 1 if a part failed or had no time."""
    check_outputs(args)
    only = tuple(name for name in args.only.split(",") if name)
    unknown = sorted(set(only) - {*GROUPS, *LARGE})
    if unknown or not only:
        raise ValueError(f"--only takes names of {', '.join((*GROUPS, *LARGE))} with commas between, got {args.only!r}")
    ranks = _ranks(args)
    end = time.monotonic() + args.budget_seconds
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="rorqual-multi-gpu-") as folder, open(args.log, "wb") as log:
        parts = program(ranks, device=args.device, only=only, right=Path(folder) / "right.json")
        for number, part in enumerate(parts):
            left = end - time.monotonic()
            outcome = run_part(part, Path(folder) / f"{number}.json", log, env={}, limit_s=min(part.limit_s, left))
            outcomes.append(outcome)
            print(f"{part.name}: {outcome.note} after {outcome.seconds:.0f} s", flush=True)
            for row in outcome.rows:
                print("  " + show(row), flush=True)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    write(
        "multi-gpu",
        f"{ranks} x {device}",
        [*_parts_row(outcomes), *_scaling(outcomes, ranks), *(r for o in outcomes for r in o.rows)],
        args,
    )
    return 0 if all(o.code == 0 for o in outcomes) else 1


def _ranks(args: argparse.Namespace) -> int:
    """How many GPUs take part. ValueError: fewer than two, or more than there are."""
    there = torch.cuda.device_count() if args.device == "cuda" else (args.ranks or 2)
    ranks = args.ranks or there
    if ranks < 2 or ranks > there:
        raise ValueError(
            f"bench multi-gpu takes two GPUs or more, asked for {ranks}, found {there}; --device cpu rehearses it on CPU ranks"
        )
    return ranks


def _parts_row(outcomes: list[Outcome]) -> list[Row]:
    """Every part with its seconds, and how it ended."""
    return [
        Row(
            name=f"part: {o.part.name}",
            params={"ended": o.note, "ranks": o.part.ranks},
            value=round(o.seconds, 1),
            unit="s",
            better="lower",
        )
        for o in outcomes
    ]


def _scaling(outcomes: list[Outcome], ranks: int) -> list[Row]:
    """Throughput of all GPUs over that of so many alone, each with its share of the experts, which has nothing to exchange."""
    found = {o.part.name: o.rows[0].value for o in outcomes if o.part.module.endswith(".slice") and o.rows}
    alone, together = found.get("one GPU with its share of the experts"), found.get("experts over all GPUs")
    if alone is None or together is None:
        return []
    params = {"ranks": ranks}
    return [
        Row(
            name="throughput over that of as many GPUs alone",
            params=params,
            value=together / (ranks * alone),
            unit="times",
            better="higher",
        )
    ]
