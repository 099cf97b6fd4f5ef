"""The command: slot permutation, and straggler replay of prefill and decode steps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch

from ....engine.option import check_least
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

#: size -> on a GPU, on a CPU, what it is
_SIZES = {
    "hidden": (7168, 128, "Values of a token, a multiple of 128"),
    "inner": (2048, 128, "Width of an expert, a multiple of 128"),
    "experts": (256, 32, "Logical experts, in 8 groups"),
    "slots": (288, 40, "Slots of all ranks"),
    "ranks": (32, 4, "Expert-parallel ranks"),
    "nodes": (4, 2, "Nodes that they are on"),
    "layers": (3, 1, "Layers, of little to much skew"),
    "prefill_tokens": (4096, 64, "Tokens of a rank in a prefill step; 0: none"),
    "decode_tokens": (128, 8, "Tokens of a rank in a decode step; 0: none"),
}
_MAY_BE_NONE = ("prefill_tokens", "decode_tokens")


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument("--only", choices=("slots", "replay"), help="One part; both by default.")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the replay alone, by the plain torch versions, small."
    )
    shape = parser.add_argument_group("shapes", "Left out: DeepSeek-V3's on a GPU, small ones on a CPU, which end within a minute.")
    for name, (_, _, what) in _SIZES.items():
        shape.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"{what} ({_defaults(name)}).")
    shape.add_argument("--permuted", default="9,36", metavar="N,..", help="Slots of a rank that change places.")
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code is 1 if a target was missed."""
    check_outputs(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench eplb-gpu needs a CUDA device, found none; --device cpu runs the replay by the plain torch versions")
    if args.device == "cpu" and args.only == "slots":
        raise ValueError("--only slots needs a CUDA device: slots are permuted on a GPU; leave --only out, or give --only replay")
    _complete(args)
    rows = []
    for row in _rows(args):
        rows.append(row)
        print(show(row), flush=True)
    write("eplb-gpu", torch.cuda.get_device_name() if args.device == "cuda" else "cpu", rows, args)
    return 0 if all(row.met is not False for row in rows) else 1


def _defaults(name: str) -> str:
    on_gpu, on_cpu, _ = _SIZES[name]
    return f"default: {on_gpu}, on a CPU {on_cpu}"


def _complete(args: argparse.Namespace) -> None:
    """Fill in the sizes that were left out, for the device.

    Raises:
        ValueError: a size that makes no sense, or nothing to replay.
    """
    for name, (on_gpu, on_cpu, _) in _SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, on_gpu if args.device == "cuda" else on_cpu)
        check_least(args, 0 if name in _MAY_BE_NONE else 1, name)
    if args.hidden % 128 or args.inner % 128:
        raise ValueError(f"--hidden {args.hidden} and --inner {args.inner} must be multiples of 128, the blocks of FP8 experts")
    if args.only != "slots" and not args.prefill_tokens and not args.decode_tokens:
        raise ValueError("--prefill-tokens 0 and --decode-tokens 0 leave nothing to replay; give one of them, or --only slots")


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    if args.only != "replay" and args.device == "cuda":
        yield from slot_rows(_numbers(args.permuted), args.hidden, args.inner)
    if args.only != "slots":
        for name, tokens in (("prefill", args.prefill_tokens), ("decode", args.decode_tokens)):
            if tokens:
                yield from _replayed(args, name, tokens)


def _numbers(text: str) -> list[int]:
    """Numbers of slots. ValueError: something else."""
    found = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(found) < 2:
        raise ValueError(f"--permuted must be numbers of slots, 2 or more each, with commas between them; found {text!r}")
    return found


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
