"""The command: slot permutation, and straggler replay of prefill and decode steps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch

from ....moe.eplb.locality.routing import Gate, make_router
from ....moe.eplb.topology import Topology
from ....moe.kernels.fused_experts_torch import ExpertWeights
from ....moe.ops import MoEOps
from ...flags import Parser
from ..kernels.timing import event_us, graph_us
from ..kv.tables import add_output_flags, check_outputs, show, write
from ..results import Row
from .replay import POLICIES, Timer, fitted_rows, host_timer, replay, rows_of, runner
from .slots import expert_state, slot_rows


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--only", choices=("slots", "replay"), help="One part; both by default.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the replay alone, by the plain torch versions.")
    shape = parser.add_argument_group("shapes", "DeepSeek-V3's by default")
    shape.add_argument("--hidden", type=int, default=7168, metavar="N", help="Values of a token.")
    shape.add_argument("--inner", type=int, default=2048, metavar="N", help="Width of an expert, a multiple of 128.")
    shape.add_argument("--experts", type=int, default=256, metavar="N", help="Logical experts, in 8 groups.")
    shape.add_argument("--slots", type=int, default=288, metavar="N", help="Slots of all ranks.")
    shape.add_argument("--ranks", type=int, default=32, metavar="N", help="Expert-parallel ranks.")
    shape.add_argument("--nodes", type=int, default=4, metavar="N", help="Nodes that they are on.")
    shape.add_argument("--layers", type=int, default=3, metavar="N", help="Layers, of little to much skew.")
    shape.add_argument("--prefill-tokens", type=int, default=4096, metavar="N", help="Tokens of a rank in a prefill step; 0: none.")
    shape.add_argument("--decode-tokens", type=int, default=128, metavar="N", help="Tokens of a rank in a decode step; 0: none.")
    shape.add_argument("--permuted", default="9,36", metavar="N,..", help="Slots of a rank that change places.")
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code is 1 if a target was missed."""
    check_outputs(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench eplb-gpu needs a CUDA device, found none; --device cpu runs the replay by the plain torch versions")
    for name in ("hidden", "inner", "experts", "slots", "ranks", "nodes", "layers"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, found {getattr(args, name)}")
    if args.hidden % 128 or args.inner % 128:
        raise ValueError(f"--hidden {args.hidden} and --inner {args.inner} must be multiples of 128, the blocks of FP8 experts")
    rows = []
    for row in _rows(args):
        rows.append(row)
        print(show(row), flush=True)
    write("eplb-gpu", torch.cuda.get_device_name() if args.device == "cuda" else "cpu", rows, args)
    return 0 if all(row.met is not False for row in rows) else 1


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    if args.only != "replay" and args.device == "cuda":
        yield from slot_rows([int(n) for n in args.permuted.split(",")], args.hidden, args.inner)
    if args.only != "slots":
        for name, tokens in (("prefill", args.prefill_tokens), ("decode", args.decode_tokens)):
            if tokens:
                yield from _replayed(args, name, tokens)


def _replayed(args: argparse.Namespace, name: str, tokens: int) -> Iterator[Row]:
    """Rows of one kind of step: every policy, planned for the load of other tokens than those that are computed."""
    topology = Topology.even(n_slots=args.slots, n_ranks=args.ranks, n_nodes=args.nodes)
    router = make_router(n_layers=args.layers, gate=Gate(n_experts=args.experts), sigma=(0.6, 1.35), seed=0)
    planned = router.sample(max(8192, tokens), seed=1).load
    routing = router.sample(tokens * args.ranks, seed=2)
    call = runner(MoEOps.load("triton" if args.device == "cuda" else "torch"), _experts(args), _tokens(args, routing.n_tokens))
    timer = host_timer if args.device == "cpu" else _device_timer(name)
    params = {"tokens": tokens, "ranks": args.ranks, "slots": args.slots}
    found = []
    for policy in POLICIES:
        some = replay(policy, planned, routing, topology, call, timer)
        found += some
        yield from rows_of(name, some, params)
    yield from fitted_rows(name, found, params)


def _device_timer(name: str) -> Timer:
    """Decode steps run from graphs, prefill steps by launches."""
    return (lambda call: graph_us(call, repeat=4, replays=10)) if name == "decode" else (lambda call: event_us(call, repeat=7))


def _experts(args: argparse.Namespace) -> ExpertWeights:
    """FP8 experts of one rank; on all ranks the same, which takes the same time."""
    most = -(-max(args.slots, args.experts) // args.ranks)
    gate_up, down, up_scales, down_scales = expert_state(most, args.hidden, args.inner, torch.device(args.device))
    return ExpertWeights(
        gate_up=gate_up.flatten(1, 2), down=down, gate_up_scales=0.01 * up_scales.flatten(1, 2), down_scales=0.01 * down_scales
    )  # fmt: skip


def _tokens(args: argparse.Namespace, most: int) -> torch.Tensor:
    """bf16 rows: as many as a rank can get."""
    generator = np.random.default_rng(0)
    block = torch.from_numpy(generator.standard_normal((min(most, 1024), args.hidden), dtype=np.float32)).to(args.device, torch.bfloat16)
    return block.repeat(-(-most // len(block)), 1)[:most]
