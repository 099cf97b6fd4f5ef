"""``bench kernels``: time, bytes, FLOPs, share of the measured roof, and every peer that is installed."""

from __future__ import annotations

import argparse
import sys

import torch

from ..flags import Parser
from .kernels.case import Case
from .kernels.measure import measure
from .kernels.roof import Roof, measure_roof
from .kernels.suite import all_cases
from .kv.tables import add_output_flags, check_outputs, write
from .results import Row


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--only", metavar="PART", help="Comma-separated parts of operation or row names.")
    parser.add_argument("--list", action="store_true", help="Name the rows and leave.")
    parser.add_argument("--no-peers", action="store_true", help="Do not run other libraries.")
    add_output_flags(parser)


def line(row: Row, case: Case, floor: float) -> str:
    """One printed row."""
    peers = "  ".join(f"{name} {us:.1f} ({us / row.value:.2f}x)" for name, us in row.peers.items())
    aim = "" if row.target is None else f"  target {row.target:.1f} {'met' if row.met else 'NOT met'}"
    work = f"{case.n_bytes / 1e6:9.1f} MB {case.flops / 1e9:9.1f} GFLOP  floor {floor:8.1f}"
    roof = "     " if row.roof is None else f"{100 * row.roof:4.0f}%"
    return f"{row.name:44s} {row.value:9.1f} us {roof}  {work}{aim}  {peers}"


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code is 1 when a row failed."""
    cases = [case for case in all_cases(args.only) if not case.tune_only]
    if args.list:
        print("\n".join(f"{case.op}: {case.name}" for case in cases))
        return 0
    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs a CUDA device, found none; `--list` names the rows without one")
    check_outputs(args)
    roof = measure_roof()
    print(f"roof: {roof.bytes_per_s / 1e12:.2f} TB/s, bf16 {roof.bf16_flops / 1e12:.0f} TFLOP/s, fp8 {roof.fp8_flops / 1e12:.0f} TFLOP/s")
    rows, failed = _measure_all(cases, roof, with_peers=not args.no_peers)
    write("kernels", torch.cuda.get_device_name(), rows, args)
    for name, reason in failed:
        print(f"failed: {name}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _measure_all(cases: list[Case], roof: Roof, *, with_peers: bool) -> tuple[list[Row], list[tuple[str, str]]]:
    rows, failed = [], []
    for case in cases:
        try:
            row = measure(case, roof, with_peers=with_peers)
        except Exception as error:  # one kernel that fails must not hide the others' figures
            failed.append((f"{case.op} {case.name}", f"{type(error).__name__}: {error}"))
            continue
        rows.append(row)
        print(line(row, case, roof.floor_us(case.n_bytes, case.flops, case.unit)), flush=True)
    return rows, failed
