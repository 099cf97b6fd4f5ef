"""Part of ``bench multi-gpu``: a model of DeepSeek-V3.2's size with made-up FP8 weights: start, prefill, decode, a step by part.

One engine for all contexts. Prompts are computed once, with one token each, and stay in the prefix cache: the call that is timed for
decoding finds them there, so that all its requests decode side by side from its first steps on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from ..decode_step import profile_decode
from ..results import Row
from .fit import fitting_layers, requests_in_time
from .layouts import DP
from .parts import keep_rows
from .shapes import changed
from .slice import make_prompts
from .start_times import start_times
from .steady import Steady, run_steady

_WARM = 2  # prompts of one step each that a replica computes before anything counts
_AFTER_S = 15.0  # of a context, beside its prefill: decoding, the trace, and what else comes
_LONGER = 1.5  # times as long as in the first steps of a prompt a token takes in a long one, at most
_ROOM = 64  # tokens beside prompt and output that a request may take, for the trace


def rows_of(llm: Any, args: argparse.Namespace, start: float, parts: dict[str, float]) -> Iterator[Row]:
    """Start; then for every context prefill, decode, and where a decode step's time goes."""
    params = _params(llm)
    yield Row(name="start of the engine", params={**params, "of_it_s": {k: round(v, 2) for k, v in parts.items()}},
              value=time.monotonic() - start, unit="s", better="lower")  # fmt: skip
    yield Row(name="steps on padding, which compile kernels", params=params, value=llm.engine.warm_up(), unit="s", better="lower")
    config, dp = llm.engine.config, llm.engine.grid.spec.dp
    length = min(config.max_num_batched_tokens, args.contexts[0][0])
    _warm(llm, length, turn=0)  # sampling and the head
    rate = _warm(llm, length, turn=1)
    for context, wanted in args.contexts:
        left = args.seconds - (time.monotonic() - start) - _AFTER_S
        n = _agreed(llm, requests_in_time(wanted, context, tokens_per_s=rate / dp / _LONGER, seconds=left))
        told = {**params, "context": context, "requests_a_rank": n}
        if n == 0:
            needed = context * dp / rate if rate else 0.0  # ranks other than the first do not know, nor does anybody ask them
            yield Row(name="not run: seconds of prefill that a request needs, more than there were", value=needed, unit="s",
                      params={**told, "seconds_left": round(left, 1)}, better="lower")  # fmt: skip
            continue
        yield from _context_rows(llm, make_prompts(n * dp, context, _vocab(llm), skewed=False, seed=context), args.output_len, told)
        llm.reset_prefix_cache()


def _params(llm: Any) -> dict[str, Any]:
    engine = llm.engine
    experts, layers = engine.model_config.moe.n_experts, engine.model_config.n_layers
    return {"ranks": engine.grid.spec.world, "layers": layers, "experts": experts, "kv_offload": engine.config.kv_offload}


def _vocab(llm: Any) -> int:
    return int(llm.engine.model_config.vocab_size)


def _warm(llm: Any, length: int, turn: int) -> float:
    """Prompt tokens a second of all replicas, on rank 0."""
    dp = llm.engine.grid.spec.dp
    found = run_steady(llm, make_prompts(_WARM * dp, length, _vocab(llm), skewed=False, seed=turn), 4)
    llm.reset_prefix_cache()
    return 0.0 if found is None else _WARM * dp * length / found.all_begun_s


def _agreed(llm: Any, n: int) -> int:
    """Rank 0's number, on every rank."""
    return int(llm.engine.grid.world.gather_ints([n])[0, 0])


def _context_rows(llm: Any, prompts: list[list[int]], n: int, params: dict[str, Any]) -> Iterator[Row]:
    filled, steady = run_steady(llm, prompts, 1), run_steady(llm, prompts, n)
    yield from _figures(prompts, filled, steady, params)
    profile = profile_decode(llm, prompts, cached=True)
    if profile is not None:
        for name, us in profile.to_dict()["parts_us"].items():
            yield Row(name=f"decode step, {name}", params=params, value=us, unit="us", better="lower")
    for name, gib in _memory(llm).items():
        yield Row(name=name, params=params, value=gib, unit="GiB", better="lower")


def _figures(prompts: list[list[int]], filled: Steady | None, steady: Steady | None, params: dict[str, Any]) -> Iterator[Row]:
    """Rates; the ranks that have none give zeros, which nobody keeps."""
    if filled is None or steady is None:
        return
    rate = sum(map(len, prompts)) / filled.seconds
    yield Row(name="prefill of all requests", params=params, value=rate, unit="tokens/s", better="higher")
    told = {**params, "prompt_cached": round(steady.cached, 4)}
    yield Row(name="first tokens from cached prompts", params=told, value=steady.all_begun_s, unit="s", better="lower")
    if steady.tokens_per_s:
        yield Row(name="decode", params=told, value=steady.tokens_per_s, unit="output tokens/s", better="higher")
        step = 1e3 * len(prompts) / steady.tokens_per_s
        yield Row(name="decode step, by the clock", params=told, value=step, unit="ms", better="lower")
    else:
        print("no decode rate: requests ended before all had begun; give a larger --output-len", flush=True)


def _memory(llm: Any) -> dict[str, float]:
    """The most that any rank used of its GPU, by torch's count and by the driver's. Collective."""
    device = llm.engine.grid.device
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    table = llm.engine.grid.world.gather_ints([torch.cuda.max_memory_allocated(device), total - free]).max(axis=0) / 2**30
    return {"peak of tensors on a GPU": float(table[0]), "used of a GPU": float(table[1])}


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=json.loads, default=[[32768, 4]], help="[[tokens, requests of a rank], ..] as JSON.")
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--model", default="v3.2-slice")
    parser.add_argument("--shape", type=json.loads, default={}, help="Values of the configuration as JSON.")
    parser.add_argument("--layers", type=int, default=61, help="As many as fit, at most these.")
    parser.add_argument("--engine", type=json.loads, default={}, help="Engine settings as JSON.")
    parser.add_argument("--seconds", type=float, default=280.0, help="Contexts that no time is left for get fewer requests, or none.")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's."""
    most = [(context + args.output_len + _ROOM, n) for context, n in args.contexts]
    page = 64
    tokens = max(n * (-(-length // page) + 2) * page for length, n in most)
    return {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": max(n for _, n in most),
        "max_model_len": max(length for length, _ in most), "max_total_tokens": tokens, "cuda_graph_bs": sorted({n for _, n in most}),
        "dist_timeout": 150.0, DP: args.ranks, **args.engine,
    }  # fmt: skip


def main() -> None:
    """Flags, an engine, its rows."""
    start = time.monotonic()
    args = parse()
    from ....engine.llm import LLM

    settings, layers = settings_of(args), args.layers
    if settings.get("device") == "cuda":
        host = _host_bytes()
        gpu = torch.cuda.get_device_properties(0).total_memory
        layers = fitting_layers(args.model, layers, ranks=args.ranks, settings=settings, gpu_bytes=gpu, host_bytes=host, shape=args.shape)
    with changed(args.model, **{**args.shape, "num_hidden_layers": layers}) as model, start_times() as parts, LLM(model, **settings) as llm:
        keep_rows(rows_of(llm, args, start, parts), args.out)


def _host_bytes() -> int:
    """What pools of this host may take, as all its ranks see it."""
    return int(0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


if __name__ == "__main__":
    main()
