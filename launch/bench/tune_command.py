"""``bench tune``: times the launch settings of every kernel and stores the fastest for this GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ...parallel.kernels.tuned import FOLDER, table, this_device
from ..flags import Parser
from .kernels.case import Case
from .kernels.measure import release, time_call
from .kernels.suite import all_cases

Rows = dict[str, list[dict[str, Any]]]


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--only", metavar="PART", help="Comma-separated parts of operation or row names.")
    parser.add_argument("--output", metavar="FILE", help="Where to write; the package's own file of this device by default.")


def tune(case: Case) -> tuple[dict[str, Any], float, dict[str, float]] | None:
    """The fastest config of a case, its microseconds, and the times of all; None when no variant runs."""
    runs = case.build()
    times: dict[str, float] = {}
    expected = _tensors(runs.ours())
    for config, call in runs.variants.items():
        try:
            result = call()
            if not _alike(_tensors(runs.written if result is None else result), expected):
                print(f"  {case.op} {case.name} {config}: another result, left out")
                continue
            times[config] = time_call(call, case)
        except Exception as error:  # a config may need more shared memory or registers than there are
            print(f"  {case.op} {case.name} {config}: {type(error).__name__}")
    del runs
    release()
    if not times:
        return None
    best = min(times, key=times.__getitem__)
    return json.loads(best), times[best], times


def _tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, copied: the next call may write to the same place."""
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part.clone() for part in parts if isinstance(part, torch.Tensor)]


def _alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether two results are equal, up to rounding where they are floats; what is not finite in both does not count."""
    if len(found) != len(expected):
        return False
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            return False
        if not a.dtype.is_floating_point:
            if not torch.equal(a, b):
                return False
            continue
        a, b = a.float(), b.float()
        both = a.isfinite() & b.isfinite()
        a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
        if float((a - b).norm()) > 0.02 * float(b.norm()):
            return False
    return True


def run(args: argparse.Namespace) -> int:
    """Tune and store; the exit code."""
    if not torch.cuda.is_available():
        raise ValueError("bench tune needs a CUDA device, found none")
    rows: Rows = {op: list(entries) for op, entries in table(this_device()).items()}
    for case in all_cases(args.only):
        found = tune(case) if case.tune_shape is not None else None
        if found is None or case.tune_shape is None:
            continue
        config, us, others = found
        shape = dict(case.tune_shape)
        kept = [row for row in rows.get(case.op, []) if row["shape"] != shape]
        if case.op == "sparse_attention":  # the best without FlashMLA, for where it is not installed
            mine = {k: v for k, v in others.items() if json.loads(k)["kernel"] != "flash_mla"}
            config["triton"] = json.loads(min(mine, key=mine.__getitem__))["kernel"] if mine else None
        rows[case.op] = [*kept, {"shape": shape, "config": config, "us": round(us, 2)}]
        print(f"{case.op} {case.name}: {us:.1f} us with {config}", flush=True)
    path = Path(args.output) if args.output else FOLDER / f"{this_device()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(rows), encoding="utf-8")
    print(f"wrote {path}")
    return 0


def render(rows: Rows) -> str:
    """One line a row, so that a difference shows what changed."""
    parts = []
    for op in sorted(rows):
        entries = sorted(rows[op], key=lambda row: json.dumps(row["shape"], sort_keys=True))
        parts.append(f"{json.dumps(op)}: [\n" + ",\n".join("  " + json.dumps(entry, sort_keys=True) for entry in entries) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"
