"""``generate``: complete prompts and show the text as it comes, or write JSON lines. Every rank runs it; rank 0 prints."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..engine.config import EngineConfig
from ..engine.outputs import RequestOutput
from ..engine.sampling_params import SamplingParams
from .console import StreamPrinter, shorten
from .errors import rank
from .flags import Parser, add_options, add_spellings, chosen
from .model_argument import add_model, model_of
from .prompts import PromptItem, add_prompts, engine_prompts, gather_prompts
from .sampling_flags import add_sampling, sampling_params
from .session import open_llm
from .summary import json_row, rank_table, totals_line


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_model(parser)
    group = parser.add_argument_group("prompts and output")
    add_prompts(group)
    group.add_argument("--json", action="store_true", help="Print JSON lines instead of text and tables.")
    group.add_argument("--output", metavar="FILE", help="Also write the JSON lines to this file.")
    group.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="Show the text as it comes.")
    add_sampling(parser)
    add_options(parser, EngineConfig)
    add_spellings(parser)


def check_writable(path: str | None, flag: str = "--output") -> None:
    """Refuse an output file that cannot be written, before a model is loaded for nothing.

    Raises:
        ValueError: naming the file and why.
    """
    if path is None:
        return
    existed = Path(path).exists()
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {error.strerror}") from None
    if not existed:
        Path(path).unlink()


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    model = model_of(args)
    params = sampling_params(args)
    if rank() == 0:
        check_writable(args.output)
    items = gather_prompts(args.prompt, args.prompts_file, chat=args.chat, model=model)
    settings = {"disable_log_stats": args.json, **chosen(args, EngineConfig, skip=("model",))}
    with open_llm(model, settings) as llm:
        prompts = engine_prompts(llm, items)
        start = time.monotonic()
        outputs = _generate(llm, args, items, prompts, params)
        seconds = time.monotonic() - start
        stats = llm.stats()
        if llm.is_rank0:
            _report(args, items, outputs, stats, seconds)
    return 0


def _generate(
    llm: Any, args: argparse.Namespace, items: Sequence[PromptItem], prompts: Sequence[Any], params: SamplingParams
) -> list[RequestOutput]:
    if args.json or not args.stream:
        outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=not args.json)
        if llm.is_rank0 and not args.json:
            _show_prompts(items)
            printer, n = _printer(len(items), params.n)
            for place, output in enumerate(outputs):
                for completion in output.outputs:
                    printer.add(place * n + completion.index, completion.text, True)
        return outputs
    if llm.is_rank0:
        _show_prompts(items)
    printer, n = _printer(len(items), params.n)
    done: dict[int, RequestOutput] = {}
    for chunk in llm.generate_stream(prompts, params):
        printer.add(chunk.prompt_index * n + chunk.index, chunk.text, chunk.finished)
        if chunk.output is not None:
            done[chunk.prompt_index] = chunk.output
    return [done[place] for place in sorted(done)]


def _printer(prompts: int, n: int) -> tuple[StreamPrinter, int]:
    """A printer with a label for each completion: [prompt], or [prompt.completion] when each has several."""
    labels = [f"[{p}]" if n == 1 else f"[{p}.{i}]" for p in range(prompts) for i in range(n)]
    return StreamPrinter(labels), n


def _show_prompts(items: Sequence[PromptItem]) -> None:
    for place, item in enumerate(items):
        head, *rest = shorten(item.shown).strip("\n").split("\n")
        print("\n    ".join([f"<{place}> {head}", *rest]))
    print(flush=True)


def _report(
    args: argparse.Namespace, items: Sequence[PromptItem], outputs: Sequence[RequestOutput], stats: dict[str, Any], seconds: float
) -> None:
    lines = [
        json.dumps(json_row(place, items[place].shown, output, completion), ensure_ascii=False)
        for place, output in enumerate(outputs)
        for completion in output.outputs
    ]
    if args.output is not None:
        Path(args.output).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    if args.json:
        sys.stdout.write("".join(line + "\n" for line in lines))
        sys.stdout.flush()
        return
    print(f"\n{totals_line(outputs, seconds)}\n\n{rank_table(stats)}", flush=True)
    if args.output is not None:
        print(f"\nwrote {args.output}")
