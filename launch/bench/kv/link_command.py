"""``bench kv link``: rows fetched from host memory, by number, size, pool and order, against the link."""

from __future__ import annotations

import argparse

import torch

from ....attention.kv.host.pinned import PinnedBacking
from ....attention.kv.host.pool import HostPool
from ...flags import Parser
from ..results import Row
from .link import Link, measure, measure_link
from .link_rows import PIECE, Choice, Order, Placement
from .tables import add_output_flags, check_outputs, write

_PAGE_BYTES = 64 << 10


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--pool-gib", default="64,8", metavar="N,N", help="Sizes of the pool, the largest is allocated (default: 64,8).")
    parser.add_argument("--row-bytes", default="656,1152", metavar="N,N", help="Bytes of a row (default: 656,1152).")
    parser.add_argument(
        "--rows",
        default="1x274,1x2048,16x274,16x2048,64x274",
        metavar="RxN,..",
        help="Requests x rows of each; that many are fetched at once.",
    )
    parser.add_argument("--context", default="131072,16384", metavar="N,N", help="Positions chosen from (default: 131072,16384).")
    parser.add_argument("--quick", action="store_true", help="Only the largest pool, 2 MiB extents, in the order of positions.")
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code."""
    sizes, widths, shapes = _numbers(args.pool_gib, "--pool-gib"), _numbers(args.row_bytes, "--row-bytes"), _shapes(args.rows)
    contexts = _numbers(args.context, "--context")
    if min(contexts) < max(rows for _, rows in shapes):
        raise ValueError(f"--context must be at least the rows chosen from it, got {args.context} for {args.rows}")
    if any(width % 16 for width in widths):
        raise ValueError(f"--row-bytes must be multiples of 16, got {args.row_bytes}")
    if not torch.cuda.is_available():
        raise ValueError("bench kv link needs a CUDA device, found none")
    check_outputs(args)
    found: list[Row] = []
    with HostPool(1, max(sizes) * (1 << 30) // _PAGE_BYTES, 64, 1024, PinnedBacking(), device="cuda") as pool:
        memory = pool.layer(0).bytes.view(-1)
        for gib in sizes[:1] if args.quick else sizes:
            found += sweep(memory[: gib << 30], widths, shapes, contexts, quick=args.quick)
    write("kv-link", torch.cuda.get_device_name(), found, args)
    return 0


def sweep(memory: torch.Tensor, widths: list[int], shapes: list[tuple[int, int]], contexts: list[int], *, quick: bool) -> list[Row]:
    """Print and return the rows of one pool."""
    link, found = measure_link(memory), []
    print(
        f"{memory.numel() / 2**30:.0f} GiB: link {link.gb_per_s:.1f} GB/s, a round trip {link.round_trip_us:.1f} us, a piece of "
        f"{PIECE >> 10} KiB to translate {link.piece_ns:.1f} ns; times are of one launch in a replayed graph"
    )
    for width in widths:
        for requests, rows in shapes:
            for choice in choices(requests, rows, contexts, quick=quick):
                peers = choice == Choice(requests=requests, rows=rows, context=contexts[0])
                row, us, floor = measure(memory, width, choice, link, peers=peers)
                found.append(row)
                print(line(row, us, floor, link), flush=True)
    return found


def choices(requests: int, rows: int, contexts: list[int], *, quick: bool) -> list[Choice]:
    """Places and orders that are measured for a number of rows; all of them with the first context."""
    plain = [Choice(requests=requests, rows=rows, context=context) for context in contexts]
    if quick:
        return plain
    ways: list[tuple[Placement, Order]] = [
        ("extents", "mixed"),
        ("range", "positions"),
        ("pages", "positions"),
        ("pages", "addresses"),
        ("rows", "positions"),
        ("rows", "addresses"),
    ]
    return plain + [
        Choice(requests=requests, rows=rows, context=contexts[0], placement=placement, order=order) for placement, order in ways
    ]


def line(row: Row, us: float, floor: float, link: Link) -> str:
    """One printed row."""
    params = row.params
    what = f"{params['pool_gib']:5.0f} GiB {row.name} {params['requests']:3d} x {params['rows'] // params['requests']:<6d}"
    where = f"of {params['context']:<8d}{params['placement']:8s}{params['order']:10s}"
    took = f"{us:8.2f} us (floor {floor:7.2f}) {row.value:5.1f} GB/s {100 * row.value / link.gb_per_s:3.0f}% of the link"
    aim = "" if row.target is None else f"  target {row.target:.1f} {'met' if row.met else 'NOT met'}"
    peers = "  ".join(f"{name} {value:.2f}" for name, value in row.peers.items())
    return f"{what}{where}{took}{aim}  {peers}".rstrip()


def _numbers(text: str, flag: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} takes whole numbers with commas between, got {text!r}") from None
    if min(values) < 1:
        raise ValueError(f"{flag} takes numbers of at least 1, got {text!r}")
    return sorted(values, reverse=True) if flag == "--pool-gib" else values


def _shapes(text: str) -> list[tuple[int, int]]:
    found = []
    for part in text.split(","):
        requests, _, rows = part.partition("x")
        if not (requests.isdigit() and rows.isdigit() and 1 <= int(requests) <= 256 and 1 <= int(rows) <= 8192):
            raise ValueError(f"--rows takes requests x rows, such as 16x2048, up to 256x8192, got {part!r}")
        found.append((int(requests), int(rows)))
    return found
