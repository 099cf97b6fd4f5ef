"""``bench kv keys``: what formats of index keys find of the best keys, and what that does to the embedded model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch

from ...console import table
from ...flags import Parser
from ..results import Row
from .key_formats import SERVED, WEIGHED, KeyFormat, shares
from .key_inputs import Scored, made_up, of_tiny
from .tables import add_output_flags, check_outputs, write

_TINY_CONTEXTS = (512, 1024, 2048, 4096, 7500)
_TINY_TOPK, _TOPK = 128, 2048
#: choices by keys of the embedded model, by made-up ones, and how well the embedded model reads
_PARTS = ("tiny", "made-up", "reading")
_TEXTS = 2  # parts of 7,500 tokens of held-out text


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[16_384, 65_536, 131_072], metavar="N", help="Made-up keys (default: 16, 64 and 128 k)."
    )
    parser.add_argument("--queries", type=int, default=32, metavar="N", help="Tokens that choose, at each context (default: 32).")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seed of the made-up keys.")
    parser.add_argument("--parts", nargs="+", default=list(_PARTS), choices=_PARTS, help="What to measure (default: all).")
    parser.add_argument("--facts", type=int, default=24, metavar="N", help="Questions of each length that the model is asked (24 at most).")
    parser.add_argument(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="Where the embedded model is asked; its own keys come from the CPU.",
    )
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Weigh the formats; the exit code."""
    if args.queries < 1 or min(args.contexts) <= _TOPK:
        raise ValueError(f"--contexts must be above {_TOPK} and --queries 1 or more, found {args.contexts} and {args.queries}")
    if not 1 <= args.facts <= 24:
        raise ValueError(f"--facts must be from 1 to 24, found {args.facts}")
    check_outputs(args)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    rows = _sizes()
    if "tiny" in args.parts:
        texts = of_tiny(_TINY_CONTEXTS[-1], _TEXTS)
        for context in _TINY_CONTEXTS:
            parts = [layer.last(context, args.queries) for text in texts for layer in text]
            rows += _kept("rorqual-tiny, held-out text", context, parts, _TINY_TOPK)
    for number, context in enumerate(args.contexts if "made-up" in args.parts else ()):
        rows += _kept("made up, 64 heads x 128", context, [made_up(context, args.queries, args.seed + number)], _TOPK)
    reads = "reading" in args.parts
    if reads:
        rows += _read(args.facts, device)
    write("kv-keys", torch.cuda.get_device_name() if reads and device == "cuda" else "cpu", rows, args)
    return 0


def _sizes() -> list[Row]:
    return [
        Row(name="bytes of a key of 128 values", params={"format": form.name}, value=form.bytes, unit="B", better="lower")
        for form in (*SERVED, *WEIGHED)
    ]


def _kept(name: str, context: int, parts: Sequence[Scored], k: int) -> list[Row]:
    """How much of the choice by fp32 keys other formats keep, in the mean over ``parts``."""
    forms: tuple[KeyFormat, ...] = (*SERVED[1:], *WEIGHED)
    every = [shares(forms, part.queries, part.weights, part.keys, k) for part in parts]
    found = [mean(part[i] for part in every) for i in range(len(forms))]
    print(f"\n{name}, context {context:,}: % of the {k} best by fp32 keys")
    print(
        table(["format", "bytes of 128 values", "kept"], [[form.name, form.bytes, value] for form, value in zip(forms, found, strict=True)])
    )
    params = {"keys": name, "context": context, "k": k}
    return [
        Row(name="best keys kept", params=params | {"format": form.name}, value=value, unit="%", better="higher")
        for form, value in zip(forms, found, strict=True)
    ]


def _read(facts_asked: int, device: str) -> list[Row]:
    """Loss and facts of the embedded model with each format, served by the engine, with fp32 rows."""
    from ....engine.llm import LLM
    from .tiny_eval import facts, heldout_loss

    rows, lines = [], []
    base = {"dtype": "float32", "device": device, "enable_prefix_caching": False, "cuda_graph_capture": "lazy", "disable_log_stats": True}
    for form in SERVED:
        with LLM("tiny", index_cache_dtype=form.name, max_num_batched_tokens=2048, **base) as llm:
            loss = heldout_loss(llm, 4)
            right = facts(llm, dict.fromkeys(_TINY_CONTEXTS, facts_asked))
        params: dict[str, Any] = {"format": form.name, "rows": "float32", "device": device}
        rows.append(Row(name="held-out loss of rorqual-tiny", params=params, value=loss, unit="nats", better="lower"))
        for context, count in right.items():
            params = params | {"context": context, "asked": facts_asked}
            rows.append(Row(name="facts recalled by rorqual-tiny", params=params, value=count, unit="right", better="higher"))
        lines.append([form.name, f"{loss:.4f}", *(f"{count}/{facts_asked}" for count in right.values())])
        print(f"{form.name}: loss {loss:.4f}, facts {right}", flush=True)
    print("\n" + table(["format", "held-out loss", *(f"facts at {context:,}" for context in _TINY_CONTEXTS)], lines))
    return rows
