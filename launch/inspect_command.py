"""``inspect``: what a checkpoint is made of and what it takes under a layout."""

from __future__ import annotations

import argparse
from dataclasses import fields

from ..engine.config import EngineConfig
from .flags import Parser, add_options
from .inspect import run_inspect
from .model_argument import add_model, model_of

#: engine settings that change what inspect says -> the name that run_inspect gives them
SETTINGS = {
    "tensor_parallel_size": "tp",
    "data_parallel_size": "dp",
    "pipeline_parallel_size": "pp",
    "expert_parallel_size": "ep",
    "page_size": "page_size",
    "kv_cache_dtype": "kv_cache_dtype",
    "index_cache_dtype": "index_cache_dtype",
    "num_redundant_experts": "num_redundant_experts",
    "enable_eplb": "enable_eplb",
}


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    add_options(parser, EngineConfig, skip=[f.name for f in fields(EngineConfig) if f.name not in SETTINGS and f.name != "model"])


def run(args: argparse.Namespace) -> int:
    """Print the description; the exit code."""
    given = {short: getattr(args, name) for name, short in SETTINGS.items() if hasattr(args, name)}
    print(run_inspect(model_of(args), as_json=args.json, **given))
    return 0
