"""``bench comm``: dispatch and combine of every backend, their conformance, and a step projected onto a cluster."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch

from ....comm.checks import PAYLOADS
from ....comm.dispatcher import EPSpec
from ....engine.option import check_least
from ...flags import Parser
from ..kv.tables import add_output_flags, check_outputs, write
from ..results import read_results
from .cases import Case, cases
from .conformance import check_all
from .crew import Crew
from .measure import Timing, measure
from .step_model import Cluster, Link, Load, fit, project
from .tables import print_halves, print_projection, print_sms, print_table, print_traffic, projection_rows, rows_of

_MEASURED = Link(latency_us=12.0, gb_per_s=228.0)  # dispatch between two H200s on 32 multiprocessors, by graph replay


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    what = parser.add_argument_group("what to do", "without one of these: the tables")
    what.add_argument("--check", action="store_true", help="Run the conformance checks instead; the exit code is 1 if one fails.")
    what.add_argument("--brief", action="store_true", help="With --check: a shorter form of each.")
    what.add_argument("--step-model", action="store_true", help="Project a step onto clusters instead; needs no device.")
    table = parser.add_argument_group("cases")
    table.add_argument("--backend", default="", metavar="NAME,..", help="Backends; all that work here by default.")
    table.add_argument("--skip-unusable", action="store_true", help="Name backends of --backend that cannot work here, and go on.")
    table.add_argument("--virtual-ranks", type=int, default=2, metavar="N", help="Ranks in this process where there is no torchrun.")
    table.add_argument("--tokens", default="1,32,128,512,2048,4096", metavar="N,..", help="Tokens of a rank.")
    table.add_argument("--hidden", default="7168", metavar="N,..", help="Values of a token.")
    table.add_argument("--top-k", default="8", metavar="N,..", help="Choices of a token.")
    table.add_argument("--slots", type=int, default=256, metavar="N", help="Experts of all ranks.")
    table.add_argument("--payload", default="fp8,native", metavar="NAME,..", help=f"How tokens travel: {', '.join(PAYLOADS)}.")
    table.add_argument("--max-sms", type=int, default=32, metavar="N", help="Multiprocessors that a send may take.")
    table.add_argument("--sms", default="", metavar="N,..", help="Also a table of time against these numbers of multiprocessors.")
    table.add_argument("--sms-tokens", default="128,4096", metavar="N,..", help="Tokens of a rank in that table.")
    table.add_argument("--repeat", type=int, default=20, metavar="N", help="Measurements of a case.")
    model = parser.add_argument_group("step model")
    model.add_argument("--ranks", default="8,16,32,64", metavar="N,..", help="Expert-parallel ranks to project onto.")
    model.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="Ranks with a fast link between them.")
    model.add_argument("--layers", type=int, default=58, metavar="N", help="Layers with experts.")
    model.add_argument("--step-tokens", type=int, default=128, metavar="N", help="Tokens of a rank in a step.")
    model.add_argument("--attention-us", metavar="US[,US]", help="All of a layer but experts and exchanges; then of half a batch.")
    model.add_argument("--expert-us", metavar="US[,US]", help="Experts of a layer; then of half a batch.")
    model.add_argument("--inside", metavar="US,GB/S", help="Latency and bandwidth inside a node; measured ones by default.")
    model.add_argument("--between", default="20,45", metavar="US,GB/S", help="Latency and bandwidth between nodes.")
    model.add_argument("--two-level", action="store_true", help="A token crosses to a node once.")
    model.add_argument("--from", dest="source", metavar="FILE", help="Take the link inside a node from this result file.")
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code."""
    check_outputs(args)
    check_least(args, 1, "virtual_ranks", "repeat", "max_sms", "slots", "ranks_per_node", "layers", "step_tokens")
    if args.step_model:
        return _step_model(args)
    given = {
        "tokens": numbers(args.tokens, "--tokens"), "hidden": numbers(args.hidden, "--hidden"), "top_k": numbers(args.top_k, "--top-k"),
        "payloads": _payloads(args.payload), "slots": args.slots, "max_sms": args.max_sms,
    }  # fmt: skip
    crew = Crew.gather(args.virtual_ranks)
    try:
        backends = crew.backends([name for name in args.backend.split(",") if name], skip=args.skip_unusable)
        if args.check:
            return check_all(crew, backends, brief=args.brief)
        sms = numbers(args.sms, "--sms") if args.sms else []
        table = list(cases(backends=backends, **given))
        against = list(cases(backends=backends, **{**given, "tokens": []}, sms=sms, sms_tokens=numbers(args.sms_tokens, "--sms-tokens")))
        return _tables(crew, table, against, args)
    finally:
        crew.close()


def _tables(crew: Crew, table: list[Case], against: list[Case], args: argparse.Namespace) -> int:
    device = torch.cuda.get_device_name(crew.device) if crew.device.type == "cuda" else "cpu"
    if crew.speaks:
        where = f"{crew.gpus} GPU(s)" if crew.gpus else "the CPU"
        print(f"{crew.size} {'virtual ' if crew.grid is None else ''}ranks on {where} ({device}), {crew.nodes} node(s)")
    name = f"{crew.gpus or crew.size} x {device}"

    def keep(done: list[tuple[Case, Timing]]) -> None:
        """What there is so far: whatever ends the table leaves it."""
        if crew.speaks and args.output_json:
            write("comm", name, rows_of(crew, done), argparse.Namespace(output_json=args.output_json, results_dir=None))

    found = _measure(crew, table, args.repeat, keep)
    by_sms = _measure(crew, against, args.repeat, lambda done: keep(found + done))
    if not found + by_sms:
        return 1  # each case said why it was left out
    if not crew.speaks:
        return 0
    print_table(crew, found)
    print()
    print_halves(found)
    print()
    print_traffic(found)
    if by_sms:
        print()
        print_sms(by_sms)
    write("comm", name, rows_of(crew, found + by_sms), args)
    return 0


def _measure(crew: Crew, table: list[Case], repeat: int, keep: Callable[[list[tuple[Case, Timing]]], None]) -> list[tuple[Case, Timing]]:
    found: list[tuple[Case, Timing]] = []
    for case in table:
        try:
            found.append((case, measure(crew, case, repeat=repeat)))
            keep(found)
        except ValueError as error:  # a case that a backend cannot have is the same on all ranks
            if crew.speaks:
                print(f"{case.backend}, {case.tokens} tokens, {case.payload}: left out: {error}")
    return found


def _step_model(args: argparse.Namespace) -> int:
    attention, experts = _halves(args.attention_us, "--attention-us"), _halves(args.expert_us, "--expert-us")
    inside = _MEASURED if args.inside is None else _link(args.inside, "--inside")
    if args.source:
        found = read_results(Path(args.source)).rows
        inside = fit([row for row in found if (row.params.get("backend"), row.params.get("sms")) == ("symm", args.max_sms)], "dispatch")
    payloads = _payloads(args.payload)
    load = Load(
        layers=args.layers, tokens=args.step_tokens, hidden=numbers(args.hidden, "--hidden")[0], top_k=numbers(args.top_k, "--top-k")[0],
        slots=args.slots, payload=payloads[0], attention_us=attention, expert_us=experts, exchange_sms=args.max_sms,
    )  # fmt: skip
    steps = []
    for ranks in numbers(args.ranks, "--ranks"):
        cluster = Cluster(
            ranks=ranks, ranks_per_node=min(args.ranks_per_node, ranks), inside=inside, between=_link(args.between, "--between"),
            two_level=args.two_level,
        )  # fmt: skip
        steps.append((cluster, project(cluster, load)))
    print_projection(steps, load)
    write("comm-step-model", "projection", projection_rows(steps, load), args)
    return 0


def numbers(text: str, flag: str) -> list[int]:
    """Whole numbers of at least 1 with commas between. ValueError otherwise."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{flag} takes whole numbers of at least 1 with commas between, got {text!r}")
    return [int(part) for part in parts]


def _payloads(text: str) -> list[str]:
    found = text.split(",")
    for name in found:
        if name not in PAYLOADS or name == "bytes":
            known = ", ".join(p for p in PAYLOADS if p != "bytes")
            raise ValueError(f"--payload takes {known} with commas between, got {text!r}")
    return found


def _pair(text: str, flag: str, what: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 2 or not all(0.0 < value < math.inf for value in values):
        raise ValueError(f"{flag} takes {what}, got {text!r}")
    return values


def _halves(text: str | None, flag: str) -> tuple[float, float]:
    """(of the batch, of half of it); the second is 0.6 of the first where it is not given."""
    if text is None:
        raise ValueError(f"--step-model needs {flag}: microseconds of a layer, as `rorqual bench latency` measures them")
    values = _pair(text, flag, "microseconds of a layer and, after a comma, of half a batch")
    return values[0], values[1] if len(values) == 2 else 0.6 * values[0]


def _link(text: str, flag: str) -> Link:
    values = _pair(text, flag, "microseconds and GB/s with a comma between")
    if len(values) != 2:
        raise ValueError(f"{flag} takes microseconds and GB/s with a comma between, got {text!r}")
    return Link(latency_us=values[0], gb_per_s=values[1])


assert EPSpec.__dataclass_fields__["max_sms"].default == 32  # what --max-sms says
