"""``eplb convert``: loads and maps from one engine's files to another's."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..flags import Parser
from .analyze_command import trace_text
from .files import check_out, exist, map_of, save_load

if TYPE_CHECKING:
    from ...moe.eplb.formats import ExpertMap


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="A map, or a load (several, or a folder: dumps of several ranks).")
    parser.add_argument("--out", required=True, metavar="FILE", help="Where to write; the name's end chooses the format, --to another.")
    parser.add_argument("--to", metavar="FORMAT", help="Format to write; a wrong one lists those there are.")
    parser.add_argument("--from", dest="source", metavar="FORMAT", help="Format to read; default: told by the contents.")
    parser.add_argument("--experts", type=int, metavar="N", help="Experts of a layer, where the file does not say.")
    parser.add_argument("--layers", type=int, nargs="+", metavar="N", help="Numbers of the layers, where the file does not say.")
    group = parser.add_argument_group("loads")
    group.add_argument("--scale", type=float, metavar="X", help="Multiplies shares or means to make counts of them.")
    group.add_argument("--slots-map", metavar="MAP", help="Placement under which counts of physical slots were recorded.")
    group.add_argument("--drop-zero-layers", action="store_true", help="Leave out layers without load: dense ones, in dumps of all layers.")


def run(args: argparse.Namespace) -> int:
    """Read, check and write; the exit code."""
    from ...moe.eplb.formats import read_map, sniff, write_map

    exist(args.files)
    kind = args.source or _kind(args.files[0], sniff)
    if not kind.endswith("map"):
        return _convert_load(args, kind)
    if len(args.files) > 1:
        raise ValueError(f"{args.files[0]} is a map, and one map is converted at a time; found {len(args.files)} files")
    check_out(args.out, args.to, "map")
    found = read_map(args.files[0], format=args.source, n_experts=args.experts, layer_ids=args.layers)
    write_map(found, args.out, format=args.to)
    print(f"{args.files[0]}: {kind}; {map_text(found)}\nwrote {args.out}")
    return 0


def _convert_load(args: argparse.Namespace, kind: str) -> int:
    from ...moe.eplb.formats import drop_zero_layers, problems, read_load

    check_out(args.out, args.to, "load")
    under = None if args.slots_map is None else map_of(args.slots_map, args.experts).slot_to_expert
    trace = read_load(
        args.files if len(args.files) > 1 else args.files[0],
        format=args.source,
        n_experts=args.experts,
        layer_ids=args.layers,
        scale=args.scale,
        slot_to_expert=under,
    )
    if args.drop_zero_layers:
        trace = drop_zero_layers(trace)
    save_load(trace, args.out, args.to)
    print(f"{', '.join(args.files)}: {kind}; {trace_text(trace)}")
    for problem in problems(trace, n_experts=args.experts):
        print(f"note: {problem.text}")
    print(f"wrote {args.out}")
    return 0


def _kind(path: str, sniff: Callable[[str], str]) -> str:
    """Format of a file; a folder holds a load."""
    return "folder of loads" if Path(path).is_dir() else sniff(path)


def map_text(found: ExpertMap) -> str:
    """What a map covers, in a line."""
    ranks = "" if found.topology is None else f" on {found.topology.n_ranks} ranks"
    layers, slots = found.slot_to_expert.shape
    return f"{layers} layers of {slots} slots{ranks}, {found.n_experts} experts"
