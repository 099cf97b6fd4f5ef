"""``plan``: what fits on machines that need not be there, with and without the KV in host memory."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace

from ..engine.config import EngineConfig
from ..parallel.grid import GridSpec
from .flags import Parser, add_options, chosen
from .model_argument import add_model, model_of
from .plan import Machine, plan
from .plan_text import render
from .quantities import parse_bytes, parse_layout

#: engine settings that change the plan
SETTINGS = (
    "model",
    "revision",
    "dtype",
    "kv_cache_dtype",
    "index_cache_dtype",
    "fp8_gemm_backend",
    "page_size",
    "max_total_tokens",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_host_backing",
    "kv_prefix_directory",
    "kv_hot_slots",
    "kv_hot_slots_max",
    "kv_device_tokens",
    "ranks_per_node",
    "moe_a2a_backend",
    "moe_payload",
    "enable_two_batch_overlap",
    "two_batch_overlap_min_tokens",
    "enable_eplb",
    "num_redundant_experts",
    "eplb_config",
    "init_expert_location",
)


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_model(parser)
    parser.add_argument("--gpu-memory", required=True, metavar="SIZE", help="Memory of one GPU, for example 141GB or 131GiB.")
    parser.add_argument("--host-memory", required=True, metavar="SIZE", help="Memory of one host that its KV pools may take.")
    parser.add_argument("--context", required=True, type=int, metavar="N", help="Tokens of a request, prompt and output.")
    parser.add_argument(
        "--layout", default="tp1", metavar="TEXT", help="Degrees of parallelism, for example dp8 or pp2,tp4. (default: tp1)"
    )
    parser.add_argument(
        "--link-gbs", type=float, default=50.0, metavar="X", help="GB/s (10^9) of fetched rows from host to one GPU. (default: 50)"
    )
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_options(parser, EngineConfig, skip=[f.name for f in fields(EngineConfig) if f.name not in SETTINGS])


def run(args: argparse.Namespace) -> int:
    """Print the plan; the exit code."""
    degrees = parse_layout(args.layout)
    spread = degrees.pop("ep", None)
    settings = chosen(args, EngineConfig) | {"model": model_of(args), "expert_parallel_size": spread}
    config = replace(EngineConfig(), **settings)
    spec = GridSpec(**degrees)
    if not args.link_gbs > 0:
        raise ValueError(f"--link-gbs must be above 0, found {args.link_gbs}")
    if args.context < 2:
        raise ValueError(f"--context must be at least 2 tokens, one of prompt and one of output, found {args.context}")
    machine = Machine(
        gpu_bytes=parse_bytes(args.gpu_memory),
        host_bytes=parse_bytes(args.host_memory),
        ranks_per_host=min(config.ranks_per_node or spec.world, spec.world),
        link_bytes_per_s=args.link_gbs * 1e9,
    )
    found = plan(config, spec, machine, context=args.context, max_num_seqs=settings.get("max_num_seqs"))
    print(json.dumps(found, indent=2) if args.json else render(found))
    return 0
