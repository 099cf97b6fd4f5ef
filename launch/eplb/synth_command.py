"""``eplb synth``: a made load with the skew, drift and noise of published ones."""

from __future__ import annotations

import argparse
from typing import Any

from ..flags import Parser
from .files import check_out, check_steps, save_load

#: flag -> (field of SynthConfig, type, words)
_FLAGS: dict[str, tuple[str, Any, str]] = {
    "--layers": ("n_layers", int, "MoE layers (default: 58)."),
    "--experts": ("n_experts", int, "Experts of a layer (default: 256)."),
    "--top-k": ("top_k", int, "Experts of a token (default: 8)."),
    "--first-layer": ("first_layer", int, "Number of the first MoE layer in the model (default: 3)."),
    "--steps": ("n_steps", int, "Steps (default: 64)."),
    "--tokens": ("tokens", int, "Tokens of a step over all ranks (default: 4096)."),
    "--decode-tokens": ("decode_tokens", int, "Tokens of a decode step; without it no step has a phase."),
    "--decode-share": ("decode_share", float, "Part of the steps that are decode, with --decode-tokens (default: 0.9)."),
    "--domain-share": ("domain_share", float, "Part of the skew that a domain has for itself (default: 0.5)."),
    "--dwell": ("dwell", float, "Steps that a domain lasts on average (default: 32)."),
    "--noise": ("noise", float, "Noise from step to step, standard deviation of the log (default: 0.2)."),
    "--memory": ("memory", float, "Correlation of that noise between steps (default: 0.7)."),
    "--drift": ("drift", float, "Standard deviation of the log that popularity wanders in 1,000 steps (default: 0)."),
    "--seed": ("seed", int, "Seed (default: 0)."),
}


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="Where to write the load: .parquet, .jsonl, .json (vLLM) or .pt (SGLang)."
    )
    for flag, (field, kind, words) in _FLAGS.items():
        parser.add_argument(flag, dest=field, type=kind, default=argparse.SUPPRESS, metavar="N" if kind is int else "X", help=words)
    parser.add_argument(
        "--sigma", type=float, nargs=2, metavar=("LOW", "HIGH"), default=argparse.SUPPRESS,
        help="Skew of the layers: standard deviation of the log of popularity, even between two numbers (default: 0.9 1.2).",
    )  # fmt: skip
    parser.add_argument("--domains", nargs="+", metavar="NAME", default=argparse.SUPPRESS, help="Names of workloads (default: general).")


def run(args: argparse.Namespace) -> int:
    """Make and write the load; the exit code."""
    from ...moe.eplb.load.synth import synth
    from ...moe.eplb.load.synth_config import SynthConfig

    fields = {field for field, _, _ in _FLAGS.values()} | {"sigma", "domains"}
    typed = {name: value for name, value in vars(args).items() if name in fields}
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in typed.items()}
    config = SynthConfig(**given)
    check_out(args.out, what="load")
    if config.n_steps > 1:
        check_steps(args.out)
    trace = synth(config)
    save_load(trace, args.out)
    steps, layers, experts = trace.counts.shape
    print(f"wrote {args.out}: {steps:,} steps, {layers} layers of {experts} experts, {int(trace.counts[:, 0].sum()):,} choices a layer")
    return 0
