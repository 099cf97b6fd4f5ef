"""Part of ``bench multi-gpu``: a model of DeepSeek-V3.2's size with made-up FP8 weights: start, prefill, decode, a step by part."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

from ...errors import rank
from ..decode_step import profile_decode
from ..results import Row
from .layouts import DP
from .parts import keep_rows
from .slice import changed, make_prompts


def decode_rate(llm: Any, prompts: list[list[int]], n: int) -> tuple[float, float]:
    """(seconds until every request had its first token, tokens a second of all from then on). Collective; zeros off rank 0."""
    from ....engine.sampling_params import SamplingParams

    begun: set[int] = set()
    start, first, after = time.monotonic(), 0.0, 0
    for chunk in llm.generate_stream(prompts, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)):
        if first:
            after += len(chunk.token_ids)
        begun.add(chunk.prompt_index)
        if not first and len(begun) == len(prompts):
            first = time.monotonic()
    if rank() != 0:
        return 0.0, 0.0
    return first - start, after / (time.monotonic() - first)


def rows_of(llm: Any, args: argparse.Namespace, started_s: float) -> Iterator[Row]:
    """Start, prefill, decode, and where a decode step's time goes."""
    engine = llm.engine
    dp, vocab = engine.grid.spec.dp, engine.model_config.vocab_size
    params = {"ranks": engine.grid.spec.world, "layers": engine.model_config.n_layers, "experts": engine.model_config.moe.n_experts,
              "kv_offload": engine.config.kv_offload, "context": args.context, "requests_a_rank": args.requests}  # fmt: skip
    yield Row(name="start of the engine", params=params, value=started_s, unit="s", better="lower")
    warm = make_prompts(dp, 256, vocab, skewed=False, seed=1)
    decode_rate(llm, warm, 4)
    prompts = make_prompts(args.requests * dp, args.context, vocab, skewed=False, seed=2)
    prefill_s, rate = decode_rate(llm, prompts, args.output_len)
    if rank() == 0:
        tokens = args.context * len(prompts) / prefill_s
        yield Row(name="prefill of all requests", params=params, value=tokens, unit="tokens/s", better="higher")
        yield Row(name="decode", params=params, value=rate, unit="output tokens/s", better="higher")
    profile = profile_decode(llm, prompts[: args.requests])
    if profile is not None:
        for name, us in profile.to_dict()["parts_us"].items():
            yield Row(name=f"decode step, {name}", params=params, value=us, unit="us", better="lower")


def main() -> None:
    """Flags, an engine, its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("requests", 4), ("context", 32768), ("output-len", 48), ("ranks", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="v3.2-slice")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--dense", type=int, default=3)
    parser.add_argument("--engine", type=json.loads, default={}, help="Engine settings as JSON.")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    from ....engine.llm import LLM

    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": args.requests,
                "max_model_len": args.context + args.output_len + 64, DP: args.ranks, **args.engine}  # fmt: skip
    start = time.monotonic()
    with changed(args.model, num_hidden_layers=args.layers, first_k_dense_replace=args.dense) as model, LLM(model, **settings) as llm:
        keep_rows(rows_of(llm, args, time.monotonic() - start), args.out)


if __name__ == "__main__":
    main()
