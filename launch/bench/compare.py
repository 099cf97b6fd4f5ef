"""``bench compare``: two results, figure by figure."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from ...parallel.json_text import parse_json
from ..console import table
from ..flags import Parser
from ..generate import check_writable
from .results import Row, read_results
from .serve.compare import Ratio, differences, pair_runs, ratio_of, request_ratios, run_ratios
from .serve.files import read_runs


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "a", metavar="A", help="What to compare with: a file or folder of `bench serve` or `bench sweep`, or a result file."
    )
    parser.add_argument("b", metavar="B", help="What is compared.")
    parser.add_argument(
        "--max-regression", type=float, metavar="X", help="Exit with 1 when B is worse by more than this share at a figure of whole runs."
    )
    parser.add_argument("--output-json", metavar="FILE", help="Write the ratios to this file.")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; the exit code."""
    if args.max_regression is not None and not 0 <= args.max_regression < 1:
        raise ValueError(f"--max-regression is a share from 0 to below 1, found {args.max_regression}")
    check_writable(args.output_json, "--output-json")
    notes, whole, single = _result_files(args.a, args.b) if _is_result_file(args.a) else _served(args.a, args.b)
    print(f"A: {args.a}\nB: {args.b}\n")
    print(_shown(whole + single))
    for note in notes:
        print(f"note: {note}")
    if args.output_json is not None:
        rows = [{**vars(ratio), "verdict": ratio.verdict} for ratio in whole + single]
        Path(args.output_json).write_text(json.dumps({"ratios": rows, "notes": notes}, indent=2) + "\n", encoding="utf-8")
    worse = [] if args.max_regression is None else [ratio for ratio in whole if ratio.worse_than(args.max_regression)]
    for ratio in worse:
        print(f"worse by more than {args.max_regression:.0%}: {ratio.name}")
    return 1 if worse else 0


def _is_result_file(name: str) -> bool:
    path = Path(name)
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = parse_json(text)
    except json.JSONDecodeError:
        return False
    return isinstance(value, dict) and "rows" in value and "bench" in value


def _served(a: str, b: str) -> tuple[list[str], list[Ratio], list[Ratio]]:
    pairs = pair_runs(read_runs([a]), read_runs([b]))
    return differences(pairs), run_ratios(pairs), request_ratios(pairs)


def _result_files(a: str, b: str) -> tuple[list[str], list[Ratio], list[Ratio]]:
    """Rows of the same name and settings."""
    one, two = read_results(Path(a)), read_results(Path(b))
    notes = [] if one.device == two.device else [f"A ran on {one.device}, B on {two.device}"]
    mates = {_key(row): row for row in two.rows}
    found = []
    for row in one.rows:
        mate = mates.get(_key(row))
        if mate is not None:
            ratio = ratio_of(", ".join([row.name, *(f"{k} {v}" for k, v in row.params.items())]), row.better, [(row.value, mate.value)])
            found += [ratio] if ratio is not None else []
    if not found:
        raise ValueError(f"{a} and {b} have no row of the same name and settings")
    lost = sum(_key(row) not in mates for row in one.rows)
    return notes + ([f"{lost} rows of A are not in B"] if lost else []), found, []


def _key(row: Row) -> str:
    return json.dumps([row.name, row.unit, row.params], sort_keys=True, default=str)


def _shown(ratios: Sequence[Ratio]) -> str:
    def interval(ratio: Ratio) -> str:
        return "-" if ratio.low is None or ratio.high is None else f"{ratio.low:.3f} to {ratio.high:.3f}"

    rows = [(r.name, f"{r.a:,.4g}", f"{r.b:,.4g}", f"{r.ratio:.3f}", interval(r), r.pairs, r.verdict) for r in ratios]
    return table(("figure", "A", "B", "B / A", "95% interval", "pairs", "B is"), rows)
