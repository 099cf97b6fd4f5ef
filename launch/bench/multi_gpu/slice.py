"""Part of ``bench multi-gpu``: throughput of a model of true widths on one engine: even and skewed work, one row each."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from typing import Any

from ..results import Row
from .layouts import DP
from .parts import keep_rows
from .shapes import changed

#: token ids that skewed prompts are made of: few inputs choose few experts
_SKEWED_IDS = 4


def make_prompts(count: int, length: int, vocab: int, *, skewed: bool, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` random ids; skewed ones use few ids, begun apart so that no prefix is shared."""
    draw = random.Random(seed)
    few = [draw.randrange(3, vocab) for _ in range(_SKEWED_IDS)]
    if skewed:
        return [[draw.randrange(3, vocab), *(draw.choice(few) for _ in range(length - 1))] for _ in range(count)]
    return [[draw.randrange(3, vocab) for _ in range(length)] for _ in range(count)]


def measure(llm: Any, args: argparse.Namespace, *, skewed: bool, seed: int) -> float:
    """Output tokens a second of one call with ``args.requests`` for each replica. Collective."""
    from ....engine.sampling_params import SamplingParams

    count = args.requests * llm.engine.grid.spec.dp
    vocab = llm.engine.model_config.vocab_size
    prompts = make_prompts(count, args.input_len, vocab, skewed=skewed, seed=seed)
    start = time.monotonic()
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True), use_tqdm=False)
    made: int = sum(len(o.outputs[0].token_ids) for o in outputs)
    return made / (time.monotonic() - start)


def rows_of(llm: Any, args: argparse.Namespace) -> Iterator[Row]:
    """A row for each kind of work; the first call of a kind, which compiles and, with balancing, moves experts, does not count."""
    for skewed in (False, True) if args.skewed else (False,):
        for again in range(args.settle if skewed else 1):
            measure(llm, args, skewed=skewed, seed=again)
        llm.reset_prefix_cache()
        value = measure(llm, args, skewed=skewed, seed=100)
        spec, stats = llm.engine.grid.spec, llm.stats()
        params = {"ranks": spec.world, "requests_a_rank": args.requests, "input_len": args.input_len, "setting": args.name,
                  "experts": llm.engine.model_config.moe.n_experts, "imbalance_in_order": in_order(stats, spec.world)}  # fmt: skip
        yield Row(
            name=f"throughput, {'skewed' if skewed else 'even'} work", params=params, value=value, unit="output tokens/s", better="higher"
        )


def in_order(stats: dict[str, Any], ranks: int) -> float:
    """Mean over layers of the busiest rank's load over the mean, all since the start, if experts lay in order; 0 off rank 0."""
    found: list[float] = []
    for layer in stats.get("expert_load", ()):
        size = len(layer) // ranks
        loads = [sum(layer[r * size : (r + 1) * size]) for r in range(ranks)]
        if sum(loads):
            found.append(max(loads) * ranks / sum(loads))
    return round(sum(found) / max(1, len(found)), 4)


def main() -> None:
    """Flags, an engine, its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("requests", 128), ("input-len", 256), ("output-len", 64), ("settle", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="v3.2-slice")
    parser.add_argument("--shape", type=json.loads, default={}, help="Values of the configuration as JSON.")
    parser.add_argument("--skewed", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--name", default="plain")
    parser.add_argument("--engine", type=json.loads, default={}, help="Engine settings as JSON.")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    from ....engine.llm import LLM

    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "disable_log_stats": True, "max_num_seqs": args.requests,
                "max_model_len": args.input_len + args.output_len, "dist_timeout": 90.0, DP: args.ranks, **args.engine}  # fmt: skip
    with changed(args.model, **args.shape) as model, LLM(model, **settings) as llm:
        keep_rows(rows_of(llm, args), args.out, f"{args.name}: ")


if __name__ == "__main__":
    main()
