"""The command: every part in turn within a budget of time; one result file, one log."""

from __future__ import annotations

import argparse
import fnmatch
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from ...flags import Parser
from ...generate import check_writable
from ..kv.tables import add_output_flags, check_outputs, show
from ..results import today
from .parts import ENDING_S, Outcome, Part, command, read_rows, run_part
from .program import GROUPS, LARGE, SHARED, program, share
from .record import Record

_LEAST_S = 5.0  # a part is not begun with less
_USUAL_S = 470.0  # for the usual parts
_WITH_LARGE_S = 570.0


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--ranks", type=int, metavar="N", help="GPUs; all of this host by default.")
    parser.add_argument(
        "--share-of", type=int, metavar="N",
        help=f"One GPU with the experts that one of N has, and nothing to exchange: parts of {' and '.join(SHARED)}.",
    )  # fmt: skip
    parser.add_argument("--only", metavar="NAME,..", help=f"Parts of {', '.join((*GROUPS, *LARGE))}; all but the last by default.")
    parser.add_argument("--match", metavar="TEXT;..", default="*", help="Of these only parts whose name fits, such as 'full*host'.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, over CPU ranks, to see that it works.")
    parser.add_argument(
        "--budget-seconds", type=float, metavar="S",
        help=f"All of it ends within that; by default {_USUAL_S:.0f}, or {_WITH_LARGE_S:.0f} with {' or '.join(LARGE)}.",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="Print the parts, their commands and limits, and run none.")
    parser.add_argument("--log", default="multi_gpu.log", metavar="FILE", help="What the parts print is added there.")
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code is 1 if a part failed or had no time."""
    check_outputs(args)
    check_writable(args.log, "--log")
    end = time.monotonic() + _budget(args.budget_seconds, _groups(args))
    ranks = _ranks(args)
    with tempfile.TemporaryDirectory(prefix="rorqual-multi-gpu-") as folder:
        parts = chosen(args, ranks, Path(folder))
        if args.list:
            for part in parts:
                print(f"{part.name} ({part.ranks} rank(s), at most {part.limit_s:.0f} s): {part.left_out or _shown(part)}")
            return 0
        record = Record(args, ranks, _device(args, ranks), parts)
        with open(args.log, "ab") as log, _signals_end_it():
            log.write(f"\n\n######## bench multi-gpu, {ranks} ranks, {today()}\n".encode())
            try:
                _run_all(parts, record, Path(folder), log, end)
            except KeyboardInterrupt:
                print("ended by a signal: the parts that are left are not run", flush=True)
    record.write()
    print(record.told(), end="")
    return 0 if len(record.outcomes) == len(parts) and all(o.good for o in record.outcomes) else 1


def _budget(given: float | None, groups: Sequence[str]) -> float:
    """Seconds in which everything must end."""
    return given if given is not None else _WITH_LARGE_S if any(group in LARGE for group in groups) else _USUAL_S


def _run_all(parts: Sequence[Part], record: Record, folder: Path, log: IO[bytes], end: float) -> None:
    """Every part in turn, as long as there is time to end it too."""
    for number, part in enumerate(parts):
        left = end - time.monotonic() - ENDING_S
        limit = min(part.limit_s, left) if left >= _LEAST_S else 0.0
        out, start = folder / f"{number}.json", time.monotonic()
        try:
            outcome = run_part(part, out, log, env={}, limit_s=limit)
        except KeyboardInterrupt:
            seconds, rows = time.monotonic() - start, tuple(read_rows(out))
            record.add(Outcome(part=part, code=None, seconds=seconds, rows=rows, reason="a signal ended the run"))
            raise
        record.add(outcome)
        _tell(outcome)


def _tell(outcome: Outcome) -> None:
    print(f"{outcome.part.name}: {outcome.note} after {outcome.seconds:.0f} s", flush=True)
    for row in outcome.rows:
        print("  " + show(row), flush=True)


def chosen(args: argparse.Namespace, ranks: int, folder: Path) -> list[Part]:
    """The parts that were asked for. ValueError: an unknown name, or none that fits."""
    if args.share_of is not None:
        parts = share(args.share_of, device=args.device, only=_groups(args))
    else:
        parts = program(ranks, device=args.device, only=_groups(args), right=folder / "right.json")
    fits = [p for p in parts if any(fnmatch.fnmatch(p.name, text) for text in args.match.split(";"))]
    needed = {p.module for p in fits if p.module.endswith(".parity")}  # what layouts are compared with comes from the part of one rank
    found = [p for p in parts if p in fits or (p.module in needed and p.ranks == 1)]
    if not found:
        raise ValueError(f"--match {args.match!r} fits none of the parts {'; '.join(p.name for p in parts)}")
    return found


def _groups(args: argparse.Namespace) -> tuple[str, ...]:
    """Names that ``--only`` gives, or those of every run. ValueError: unknown ones."""
    known, usual = ((*GROUPS, *LARGE), GROUPS) if args.share_of is None else (SHARED, SHARED)
    only = usual if args.only is None else tuple(name for name in args.only.split(",") if name)
    if not only or set(only) - set(known):
        of_it = "" if args.share_of is None else " with --share-of"
        raise ValueError(f"--only{of_it} takes names of {', '.join(known)} with commas between, got {args.only!r}")
    return only


@contextmanager
def _signals_end_it() -> Iterator[None]:
    """SIGTERM and SIGHUP end the run as Ctrl-C does: the part under way with all its processes; what was measured is on file then."""
    kinds = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def stop(number: int, frame: Any) -> None:
        for kind in kinds:
            signal.signal(kind, signal.SIG_IGN)  # ending takes seconds, and must not be ended itself
        raise KeyboardInterrupt

    before = [signal.signal(kind, stop) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def _shown(part: Part) -> str:
    return shlex.join(("python", *command(part, Path("{out}"), part.limit_s)[1:]))


def _device(args: argparse.Namespace, ranks: int) -> str:
    return f"{ranks} x {torch.cuda.get_device_name() if args.device == 'cuda' else 'cpu'}"


def _ranks(args: argparse.Namespace) -> int:
    """How many GPUs take part. ValueError: fewer than two, more than there are, or not one for a share."""
    if args.share_of is not None:
        return _one_rank(args)
    there = torch.cuda.device_count() if args.device == "cuda" else (args.ranks or 2)
    ranks = there if args.ranks is None else args.ranks
    if ranks < 2 or ranks > there:
        raise ValueError(
            f"bench multi-gpu takes two GPUs or more, asked for {ranks}, found {there}; --device cpu rehearses it on CPU ranks, "
            "--share-of N measures a rank of N on one GPU"
        )
    return ranks


def _one_rank(args: argparse.Namespace) -> int:
    """1. ValueError: it is to be a share of less than two, other ranks are asked for, or there is no GPU."""
    if args.share_of < 2:
        raise ValueError(f"--share-of takes the number of ranks that share the experts, 2 or more, got {args.share_of}")
    if args.ranks not in (None, 1):
        raise ValueError(f"--share-of {args.share_of} is measured on one GPU, got --ranks {args.ranks}; leave --ranks out")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--share-of takes a GPU, found none; --device cpu rehearses it")
    return 1
