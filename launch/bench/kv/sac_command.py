"""``bench kv sac``: answers from cached prefixes in host memory, rows on demand against whole prefixes copied first."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ....attention.ops import AttentionOps
from ...flags import Parser
from ..results import Row, read_results
from .memory import SharedHost
from .plot import plot
from .products import Products
from .rig_command import TOY
from .sac import Plan, measure_context
from .sac_rows import rows_of
from .shape import TRACE_HELP, RigShape
from .tables import add_output_flags, check_outputs, show, write


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "--contexts", type=int, nargs="+", metavar="N", help="Tokens of a cached prefix (default: 16384 32768 65536 131072)."
    )
    parser.add_argument("--output", type=int, default=1000, metavar="N", help="Tokens of an answer (default: 1000).")
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[16, 64], metavar="N", help="Requests in the system at all times (default: 16 64)."
    )
    parser.add_argument("--heads", type=int, default=128, metavar="N", help="Query heads of this rank (default: 128).")
    parser.add_argument("--budget-gib", type=float, default=40.0, metavar="X", help="Device memory for keys and rows (default: 40).")
    parser.add_argument("--rest-us", type=float, nargs="+", default=[0.0, 200.0], metavar="X",
                        help="Microseconds assumed for the rest of a layer, experts above all (default: 0 200).")  # fmt: skip
    parser.add_argument("--sharing", type=int, nargs="+", default=[1, 8], metavar="N",
                        help="GPUs with one network adapter of 12.5 GB/s between them (default: 1 8).")  # fmt: skip
    parser.add_argument("--index-cache-dtype", default="fp8", choices=("fp8", "fp4"), help="Format of index keys (default: fp8).")
    parser.add_argument("--trace", default="published", metavar="NAME", help=TRACE_HELP)
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="Steps timed of each batch, after 8 (default: 8).")
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 16, 48], metavar="N",
                        help="Batches that are measured besides 1 and the largest (default: 4 16 48).")  # fmt: skip
    parser.add_argument("--host-gib", type=float, default=48.0, metavar="X", help="Host pool, GiB (default: 48).")
    parser.add_argument("--device-gib", type=float, default=48.0, metavar="X", help="Latent pools on the device, GiB (default: 48).")
    parser.add_argument("--plot", metavar="FILE", help="Draw the comparison (PNG, SVG, PDF).")
    parser.add_argument("--from", dest="source", metavar="FILE", help="Measure nothing: take the rows of this result file, for --plot.")
    parser.add_argument("--toy", action="store_true", help="A small shape on the CPU, by the plain twins: for a look, not for figures.")
    add_output_flags(parser)


def make_plan(args: argparse.Namespace) -> Plan:
    """What is compared.

    Raises:
        ValueError: sizes that do not fit each other.
    """
    if min(args.clients) < 1 or args.output < 2 or min(args.sharing) < 1:
        raise ValueError(
            f"--clients and --sharing must be at least 1 and --output at least 2, found {args.clients}, {args.sharing} and {args.output}"
        )
    if args.toy:
        base = replace(TOY, trace=args.trace, index_format=args.index_cache_dtype, index_dim=32)
        return Plan(base=base, contexts=tuple(args.contexts or (256, 512)), output=args.output, budget=2 << 20, steps=2)
    base = RigShape(
        requests=1, heads=args.heads, trace=args.trace, index_format=args.index_cache_dtype,
        host_bytes=int(args.host_gib * 2**30), device_bytes=int(args.device_gib * 2**30),
    )  # fmt: skip
    contexts = tuple(args.contexts or (16_384, 32_768, 65_536, 131_072))
    return Plan(
        base=base, contexts=contexts, output=args.output, budget=int(args.budget_gib * 2**30), steps=args.steps, batches=tuple(args.batches)
    )


def run(args: argparse.Namespace) -> int:
    """Run the comparison; the exit code."""
    check_outputs(args)
    if args.source:
        if not args.plot:
            raise ValueError("--from needs --plot FILE: there is nothing else to do with rows that are measured already")
        plot(read_results(Path(args.source)).rows, Path(args.plot))
        return 0
    if not args.toy and not torch.cuda.is_available():
        raise ValueError("bench kv sac needs a CUDA device, found none; `--toy` runs a small shape on the CPU")
    rows = compare(make_plan(args), args)
    write("kv-sac", "cpu" if args.toy else torch.cuda.get_device_name(), rows, args)
    if args.plot:
        plot(rows, Path(args.plot))
    return 0


def compare(plan: Plan, args: argparse.Namespace) -> list[Row]:
    """Print and return the rows of all contexts."""
    device = torch.device("cpu" if args.toy else "cuda")
    ops = AttentionOps.load("torch" if args.toy else "triton")
    products = Products(plan.base, device)
    rows: list[Row] = []
    with SharedHost(device) as host:
        for context in plan.contexts:
            pool = host.pool(replace(plan.base, context=context))
            found = measure_context(plan, context, device, ops, pool, products)
            mine = rows_of(plan, found, clients=args.clients, rest_us=args.rest_us, sharing=args.sharing)
            _print(context, plan, mine)
            rows += mine
    return rows


def _print(context: int, plan: Plan, rows: list[Row]) -> None:
    print(f"\n{context:,} tokens cached, {plan.output} out")
    for row in rows:
        kept: dict[str, Any] = {
            key: row.params[key] for key in ("batch", "clients", "rest_of_a_layer_us_assumed", "gpus_on_the_network") if key in row.params
        }
        print(show(replace(row, params=kept)), flush=True)
