"""``bench throughput``: all requests at once, offline. Flags and JSON keys are vLLM's."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...engine.config import EngineConfig
from ...engine.option import check_least, option
from ...engine.sampling_params import SamplingParams
from ..doctor import versions
from ..errors import rank
from ..flags import Parser, add_options, add_spellings, chosen
from ..generate import check_writable
from ..model_argument import add_model, model_of
from ..prompts import PromptItem, engine_prompts
from ..session import open_llm
from .datasets.config import DatasetConfig
from .datasets.make import Words, dataset_of, make_requests
from .datasets.request import Request, flat
from .decode_step import profile_decode
from .hf_peer import run_peer_apart as run_peer
from .results import Results, Row, check_folder, command_line, today, write_results

#: tokens of a random prompt when no flag says
INPUT_LEN = 128


@dataclass(frozen=True, kw_only=True)
class ThroughputConfig:
    """What is measured."""

    backend: str = option(
        "rorqual", "What runs the requests; 'hf' is transformers generate().", choices=("rorqual", "hf"), group="benchmark"
    )
    compare: str | None = option(None, "Run this peer too, on the same requests, in the same run.", choices=("hf",), group="benchmark")
    runs: int = option(1, "Timed runs of all requests, each with an empty prefix cache; the fastest counts.", group="benchmark")
    warmup_requests: int = option(
        64, "Requests (other prompts, two tokens each) before the clock starts.", "--num-warmups", group="benchmark"
    )
    threads: int | None = option(None, "Torch threads of a rank; the peer tries 1 and all cores.", group="benchmark")
    peer_finalists: int = option(2, "Modes of the peer, best in trials, that are run in full.", group="benchmark")
    step_breakdown: bool = option(True, "On CUDA also trace a decode step and say where its time goes.", group="benchmark")
    output_json: str | None = option(None, "Write the figures to this file.", group="benchmark")
    results_dir: str | None = option(None, "Also write a result file into this folder.", group="benchmark")
    target_ratio: float | None = option(None, "Times the peer's rate that the result file states as the target.", group="benchmark")


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_model(parser, "tiny")
    add_options(parser, ThroughputConfig)
    add_options(parser, DatasetConfig)
    add_options(parser, EngineConfig)
    add_spellings(parser)


def figures(requests: Sequence[Request], seconds: float, output_tokens: int) -> dict[str, Any]:
    """vLLM's keys, and the counts they are made of."""
    prompt = sum(len(r.token_ids) for r in requests)
    return {
        "elapsed_time": seconds,
        "num_requests": len(requests),
        "total_num_tokens": prompt + output_tokens,
        "requests_per_second": len(requests) / seconds,
        "tokens_per_second": (prompt + output_tokens) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "num_prompt_tokens": prompt,
        "num_output_tokens": output_tokens,
    }


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code."""
    config = ThroughputConfig(**chosen(args, ThroughputConfig))
    dataset = DatasetConfig(**chosen(args, DatasetConfig))
    dataset_of(dataset)  # a wrong one is told before a model is loaded
    model = model_of(args, "tiny")
    if rank() == 0:
        check_writable(config.output_json, "--output-json")
        check_folder(config.results_dir)
    check_least(config, 1, "runs", "peer_finalists", *(["threads"] if config.threads is not None else []))
    check_least(config, 0, "warmup_requests")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    settings = {"disable_log_stats": True, **chosen(args, EngineConfig, skip=("model",))}
    ours, requests, facts = _run_rorqual(model, config, dataset, settings)
    if rank() != 0:
        return 0
    result: dict[str, Any] = {"backend": config.backend}
    peer = None
    if "hf" in (config.backend, config.compare):
        peer = _run_hf(requests, config, facts)
    result |= peer if config.backend == "hf" and peer is not None else ours or {}
    if config.backend == "rorqual" and ours is not None and peer is not None:
        result["peer"] = peer
        result["ratio"] = ours["output_tokens_per_second"] / peer["output_tokens_per_second"]
    _report(result, facts, config)
    return 0


def _run_rorqual(
    model: str, config: ThroughputConfig, dataset: DatasetConfig, settings: dict[str, Any]
) -> tuple[dict[str, Any] | None, list[Request], dict[str, Any]]:
    """Figures (None where only the requests and facts are wanted, and off rank 0), requests, and facts of the run."""
    with open_llm(model, settings) as llm:
        engine = llm.engine
        requests = _requests(llm, dataset)
        facts = {
            "model": model,
            "folder": engine.folder,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": engine.grid.device.type,
            "dataset": dataset_of(dataset),
        }
        spec = engine.grid.spec
        facts["layout"] = f"pp{spec.pp} dp{spec.dp} tp{spec.tp}"
        facts["threads"] = torch.get_num_threads()
        if config.backend == "hf":
            return None, requests, facts
        prompts = [{"prompt_token_ids": r.token_ids} for r in requests]
        if config.warmup_requests > 0:
            # Turned round, so that the measured prompts find nothing of theirs in the prefix cache.
            others = [{"prompt_token_ids": r.token_ids[::-1]} for r in requests[: config.warmup_requests]]
            llm.generate(others, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True), use_tqdm=False)
        params = [SamplingParams(temperature=0.0, max_tokens=r.output_len, ignore_eos=True) for r in requests]
        seconds = float("inf")
        for _ in range(config.runs):
            llm.reset_prefix_cache()
            start = time.monotonic()
            outputs = llm.generate(prompts, params, use_tqdm=True)
            seconds = min(seconds, time.monotonic() - start)
        profile = profile_decode(llm, [r.token_ids for r in requests]) if config.step_breakdown else None
        if not llm.is_rank0:
            return None, requests, facts
        made = [len(o.outputs[0].token_ids) for o in outputs]
        wanted = [r.output_len for r in requests]
        if made != wanted:
            raise RuntimeError(f"{sum(a != b for a, b in zip(made, wanted, strict=True))} requests did not generate the tokens asked for")
        result = figures(requests, seconds, sum(made))
        if profile is not None:
            result |= {"decode_step": profile.to_dict(), "decode_step_table": profile.table()}
        return result, requests, facts


def _requests(llm: Any, dataset: DatasetConfig) -> list[Request]:
    """The dataset as prompts of ids; conversations turn by turn, and traces all at once."""
    tokenizer = llm.engine.tokenizer
    words = Words(llm.engine.model_config.vocab_size, None if tokenizer is None else tokenizer.encode)

    def ids(item: PromptItem) -> list[int]:
        (prompt,) = engine_prompts(llm, [item])
        return words.encode(prompt) if isinstance(prompt, str) else list(prompt)

    return flat(make_requests(dataset, words, seed=llm.engine.config.seed, input_len=INPUT_LEN, item_ids=ids))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _run_hf(requests: Sequence[Request], config: ThroughputConfig, facts: dict[str, Any]) -> dict[str, Any]:
    found = run_peer(
        Path(facts["folder"]),
        requests,
        dtype=facts["dtype"],
        device=facts["device"],
        threads=len(os.sched_getaffinity(0)),
        finalists=max(1, config.peer_finalists),
        say=_say,
    )
    made = sum(r.output_len for r in requests)
    return {**figures(requests, found["seconds"], made), **{k: v for k, v in found.items() if k != "seconds"}}


def _report(result: dict[str, Any], facts: dict[str, Any], config: ThroughputConfig) -> None:
    table = result.pop("decode_step_table", None)
    print(_sentence(result["backend"], result))
    if table is not None:
        print(table)
    peer = result.get("peer")
    if peer is not None:
        mode = ", ".join(f"{k} {v}" for k, v in peer["mode"].items())
        print(_sentence(f"transformers {peer['version']}", peer) + f" ({mode}; best of {peer['modes_tried']} modes)")
        print(f"rorqual makes {result['ratio']:.2f} times the output tokens/s of transformers")
    if config.output_json is not None:
        Path(config.output_json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if config.results_dir is not None:
        print(f"wrote {write_results(_results(result, facts, config), Path(config.results_dir))}")


def _sentence(name: str, figures: dict[str, Any]) -> str:
    return (
        f"{name}: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.1f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.1f} output tokens/s"
    )


_WAYS = (("input", "prompt"), ("output", "output"))


def _results(result: dict[str, Any], facts: dict[str, Any], config: ThroughputConfig) -> Results:
    peer = result.get("peer")
    peers = {} if peer is None else {f"transformers generate(), {_mode(peer)}": float(peer["output_tokens_per_second"])}
    target = config.target_ratio * max(peers.values()) if peers and config.target_ratio is not None else None
    params = {k: facts[k] for k in ("model", "dtype", "layout", "threads")}
    count = result["num_requests"]
    params |= {"num_prompts": count, **{f"{way}_len": round(result[f"num_{key}_tokens"] / count) for way, key in _WAYS}}
    if facts["dataset"] != "random":
        params["dataset"] = facts["dataset"]
    device = "cpu" if facts["device"] == "cpu" else torch.cuda.get_device_name()
    row = Row(
        name=f"offline throughput, {result['backend']}",
        params=params,
        value=result["output_tokens_per_second"],
        unit="output tokens/s",
        better="higher",
        peers=peers,
        target=target,
    )
    return Results(bench="throughput", command=command_line(), date=today(), device=device, versions=versions(), rows=(row,))


def _mode(peer: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in peer["mode"].items())
