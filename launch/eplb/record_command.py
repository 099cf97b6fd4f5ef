"""``eplb record``: run a model on prompts and write what its router chose, step by step. Every rank runs it; rank 0 writes."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ...engine.config import EngineConfig
from ..errors import rank
from ..flags import Parser, add_options, add_spellings, chosen
from ..model_argument import add_model, model_of
from ..prompts import add_prompts, engine_prompts, gather_prompts
from ..sampling_flags import add_sampling, sampling_params
from ..session import open_llm
from .analyze_command import trace_text
from .files import check_out, check_steps, load_of

#: settings that this command makes itself
_OURS = ("expert_distribution_dump",)
_MANY = 1_000_000  # steps that are kept unless the buffer is set


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_model(parser, "tiny")
    group = parser.add_argument_group("prompts and output")
    group.add_argument("--out", required=True, metavar="FILE", help="Where to write: .parquet, .jsonl, or .pt as SGLang dumps.")
    add_prompts(group)
    group.add_argument("--repeat", type=int, default=1, metavar="N", help="Run the prompts so many times. (default: 1)")
    add_sampling(parser)
    add_options(parser, EngineConfig, skip=_OURS)
    add_spellings(parser)


def run(args: argparse.Namespace) -> int:
    """Run the model and write the load; the exit code."""
    model = model_of(args, "tiny")
    if args.repeat < 1:
        raise ValueError(f"--repeat must be 1 or more, found {args.repeat}")
    params = sampling_params(args)
    if rank() == 0:
        check_out(args.out, what="load")
        check_steps(args.out)
    items = gather_prompts(args.prompt, args.prompts_file, chat=args.chat, model=model) * args.repeat
    with open_llm(model, _settings(args)) as llm:
        start = time.monotonic()
        outputs = llm.generate(engine_prompts(llm, items), params)
        seconds = time.monotonic() - start
        speaks = llm.is_rank0
    if speaks:  # the dump is written when the engine closes
        trace = load_of([args.out])
        print(f"{len(outputs)} requests in {seconds:.1f} s; wrote {args.out}: {trace_text(trace)}")
    return 0


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the engine: those of the flags, and that it records."""
    given = chosen(args, EngineConfig, skip=("model",))
    recording = {"expert_distribution_recorder_mode": "stat", "expert_distribution_recorder_buffer_size": _MANY}
    return {"disable_log_stats": True} | recording | given | {"expert_distribution_dump": args.out}
