"""``bench kv rig``: what fetching rows from host memory costs the attention of a decode step."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from ....attention.kv.host.pool import HostPool
from ....attention.ops import AttentionOps
from ...flags import Parser
from ..results import Row
from .clock import check, measure
from .memory import SharedHost
from .rig import Rig
from .rig_rows import OVERLAPPED, rows_of
from .shape import TRACE_HELP, RigShape
from .tables import add_output_flags, check_outputs, show, write
from .ways import WAYS, Timing, Way

_CHECKED: tuple[Way, ...] = ("serial", "beside", "parts", "waves", "halves", "hits")
#: small enough for a CPU and the plain twins
TOY = RigShape(
    requests=1, context=512, layers=2, heads=4, latent=32, rope=8, nope=8, value=8, query_latent=16, hidden=32, k=32, page_size=8,
    hot_rows=64, index_heads=2, index_dim=16, steps=16, trace_kinds=2, host_bytes=1 << 20, device_bytes=1 << 20,
)  # fmt: skip


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64], metavar="N", help="Requests (default: 1 16 64).")
    parser.add_argument("--contexts", type=int, nargs="+", metavar="N", help="Tokens of a request (default: 65536).")
    parser.add_argument(
        "--heads", type=int, nargs="+", metavar="N", help="Query heads of this rank (default: 128; 16 is one rank of eight)."
    )
    parser.add_argument("--hot-rows", type=int, metavar="N", help="Rows of a hot buffer (default: 4096).")
    parser.add_argument("--trace", default="published", metavar="NAME", help=TRACE_HELP)
    parser.add_argument("--policies", nargs="+", choices=("score", "lru"), default=["score"], help="What gives way in a hot buffer.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="Ways to run a step.")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="Steps that are timed, once hot buffers are full (default: 24).")
    parser.add_argument("--host-gib", type=float, default=48.0, metavar="X", help="Host pool, GiB (default: 48).")
    parser.add_argument("--device-gib", type=float, default=48.0, metavar="X", help="Latent pools on the device, GiB (default: 48).")
    parser.add_argument("--no-products", action="store_true", help="Attention alone, without the products around it.")
    parser.add_argument("--no-choice", action="store_true", help="Leave the indexer out.")
    parser.add_argument(
        "--fetch", nargs="+", default=["usual"], metavar="PxRxW", help="Programs, rows at once and warps of a fetch beside other work."
    )
    parser.add_argument("--no-check", action="store_true", help="Do not compare results with those of all-resident first.")
    parser.add_argument("--toy", action="store_true", help="A small shape on the CPU, by the plain twins: for a look, not for figures.")
    add_output_flags(parser)


def shapes(args: argparse.Namespace) -> list[RigShape]:
    """What is measured, in order.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    base = TOY if args.toy else RigShape(requests=1, host_bytes=int(args.host_gib * 2**30), device_bytes=int(args.device_gib * 2**30))
    base = replace(
        base, trace=args.trace, hot_rows=args.hot_rows or base.hot_rows, with_products=not args.no_products, with_choice=not args.no_choice
    )
    return [
        replace(base, context=context, heads=heads, requests=batch, policy=policy)
        for context in args.contexts or [base.context]
        for heads in args.heads or [base.heads]
        for batch in args.batches
        for policy in args.policies
    ]


def run(args: argparse.Namespace) -> int:
    """Run the rig; the exit code."""
    if not args.toy and not torch.cuda.is_available():
        raise ValueError("bench kv rig needs a CUDA device, found none; `--toy` runs a small shape on the CPU")
    check_outputs(args)
    device = torch.device("cpu" if args.toy else "cuda")
    ops = AttentionOps.load("torch" if args.toy else "triton")
    rows: list[Row] = []
    with SharedHost(device) as host:
        for shape in shapes(args):
            rows += run_shape(shape, device, ops, host.pool(shape), args)
    write("kv-rig", "cpu" if args.toy else torch.cuda.get_device_name(), rows, args)
    return 0


def run_shape(shape: RigShape, device: torch.device, ops: AttentionOps, host: HostPool, args: argparse.Namespace) -> list[Row]:
    """Print and return the rows of one shape."""
    print(f"\nbatch {shape.requests}, context {shape.context:,}, {shape.heads} heads, {shape.trace_name} trace, {shape.policy}")
    rig = Rig(shape, device, ops, host=host)
    try:
        if not args.no_check:
            for way in _CHECKED:
                check(rig, way)
        timings: dict[Way, Timing] = {way: measure(rig, way, warm_up=shape.warm_up, steps=args.steps) for way in args.ways}
        rows = _shown(rows_of(shape, timings))
        for text in args.fetch:
            if text != "usual":
                rig.use_fetch(_fetch_config(text))
                timings |= {way: measure(rig, way, warm_up=shape.warm_up, steps=args.steps) for way in OVERLAPPED if way in args.ways}
                rows += _shown([_named(row, text) for row in rows_of(shape, timings) if row.name.endswith(OVERLAPPED)])
    finally:
        rig.close()
        del rig
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _fetch_config(text: str) -> Any:
    """A ``FetchConfig`` of ``PxRxW``.

    Raises:
        ValueError: not of that form.
    """
    from ....attention.kernels.fetch_rows import FetchConfig

    try:
        programs, rows, warps = map(int, text.split("x"))
    except ValueError:
        raise ValueError(f"--fetch takes 'usual' or PROGRAMSxROWSxWARPS, such as 16x32x32, found {text!r}") from None
    return FetchConfig(programs=programs, rows=rows, warps=warps)


def _named(row: Row, fetch: str) -> Row:
    return replace(row, params=row.params | {"fetch_beside": fetch})


def _shown(rows: list[Row]) -> list[Row]:
    for row in rows:
        kept: dict[str, Any] = {key: row.params[key] for key in ("missed_percent", "fetch_beside") if key in row.params}
        print(show(replace(row, params=kept)), flush=True)
    return rows
