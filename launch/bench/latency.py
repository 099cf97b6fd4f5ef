"""``bench latency``: one batch from its prompts to its last tokens, over and over. Flags and JSON keys are vLLM's."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...engine.config import EngineConfig
from ...engine.option import check_least, option
from ...engine.sampling_params import SamplingParams
from ..doctor import versions
from ..errors import rank
from ..flags import Parser, add_options, add_spellings, chosen
from ..generate import check_writable
from ..model_argument import add_model, model_of
from ..session import open_llm
from .datasets.random_ids import random_requests
from .decode_step import profile_decode
from .results import Results, Row, check_folder, command_line, today, write_results

if TYPE_CHECKING:
    from ...engine.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    """What is measured."""

    input_len: int = option(32, "Prompt tokens, random ids.", group="benchmark")
    output_len: int = option(128, "Tokens every request generates; end tokens are ignored.", group="benchmark")
    batch_size: int = option(8, "Requests of the batch.", group="benchmark")
    n: int = option(1, "Completions of each request.", group="benchmark")
    num_iters_warmup: int = option(10, "Iterations before the clock starts.", group="benchmark")
    num_iters: int = option(30, "Timed iterations, each with an empty prefix cache; 0 for the breakdown alone.", group="benchmark")
    disable_detokenize: bool = option(False, "Leave the tokens as ids.", group="benchmark")
    step_breakdown: bool = option(True, "On CUDA also trace a decode step and say where its time goes.", group="benchmark")
    output_json: str | None = option(None, "Write the figures to this file.", group="benchmark")
    results_dir: str | None = option(None, "Also write a result file into this folder.", group="benchmark")


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_model(parser, "tiny")
    add_options(parser, LatencyConfig)
    add_options(parser, EngineConfig)
    add_spellings(parser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code."""
    config = LatencyConfig(**chosen(args, LatencyConfig))
    model = model_of(args, "tiny")
    check_least(config, 1, "batch_size", "n")
    check_least(config, 0, "num_iters", "num_iters_warmup")
    if rank() == 0:
        check_writable(config.output_json, "--output-json")
        check_folder(config.results_dir)
    settings = {"disable_log_stats": True, **chosen(args, EngineConfig, skip=("model",))}
    if config.disable_detokenize:
        settings["skip_tokenizer_init"] = True
    with open_llm(model, settings) as llm:
        result = _measure(llm, config)
        facts = _facts(llm, model)
    if rank() == 0:
        _report(result, config, facts)
    return 0


def _measure(llm: LLM, config: LatencyConfig) -> dict[str, Any]:
    """vLLM's keys, and the breakdown of a decode step where there is one."""
    if config.num_iters == 0 and not (config.step_breakdown and llm.engine.grid.device.type == "cuda"):
        raise ValueError("nothing to measure: --num-iters 0 leaves the breakdown of a decode step, which needs a CUDA device")
    requests = random_requests(
        count=config.batch_size, input_len=config.input_len, output_len=config.output_len, range_ratio=0.0,
        vocab_size=llm.engine.model_config.vocab_size, seed=llm.engine.config.seed,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": r.token_ids} for r in requests]
    params = SamplingParams(temperature=0.0 if config.n == 1 else 1.0, n=config.n, max_tokens=config.output_len, ignore_eos=True)
    latencies: list[float] = []
    for _ in range(config.num_iters_warmup + config.num_iters):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        latencies.append(time.perf_counter() - start)
    latencies = latencies[config.num_iters_warmup :]
    result: dict[str, Any] = {}
    if latencies:
        percentiles = {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}
        result |= {"avg_latency": float(np.mean(latencies)), "latencies": latencies, "percentiles": percentiles}
    profile = profile_decode(llm, [r.token_ids for r in requests]) if config.step_breakdown else None
    if profile is not None:
        result["decode_step"] = profile.to_dict()
        result["decode_step_table"] = profile.table()
    return result


def _facts(llm: LLM, model: str) -> dict[str, Any]:
    """Settings that a result file names."""
    engine = llm.engine
    spec = engine.grid.spec
    return {
        "model": model,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "kv": engine.config.kv_cache_dtype,
        "layout": f"pp{spec.pp} dp{spec.dp} tp{spec.tp}",
        "eager": engine.runner.graphs is None,
        "overlap": not engine.config.disable_overlap_schedule,
        "a2a": engine.config.moe_a2a_backend,
        "two_batch_overlap": engine.config.enable_two_batch_overlap,
    }


def _results(result: dict[str, Any], config: LatencyConfig, facts: dict[str, Any]) -> Results:
    """The figures as rows of a result file."""
    import torch

    params = facts | {"batch_size": config.batch_size, "input_len": config.input_len, "output_len": config.output_len}
    rows: list[Row] = []
    if "avg_latency" in result:
        rows.append(Row(name="latency of a batch", params=params, value=result["avg_latency"], unit="s", better="lower"))
    step = result.get("decode_step")
    if step is not None:
        rows.append(Row(name="decode step", params=params, value=step["step_us"], unit="us", better="lower"))
        rows.append(Row(name="host gap of a decode step", params=params, value=step["host_gap"], unit="share", better="lower", target=0.03))
        for part, us in step["parts_us"].items():
            rows.append(Row(name=f"decode step, {part}", params=params, value=us, unit="us", better="lower"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Results(bench="latency", command=command_line(), date=today(), device=device, versions=versions(), rows=tuple(rows))


def _report(result: dict[str, Any], config: LatencyConfig, facts: dict[str, Any]) -> None:
    table = result.pop("decode_step_table", None)
    batch = f"{config.batch_size} x {config.input_len} in, {config.output_len} out"
    if "avg_latency" in result:
        print(f"{batch}: avg latency {result['avg_latency']:.4f} s over {config.num_iters} iterations")
        for percent, seconds in result["percentiles"].items():
            print(f"{percent}% percentile latency: {seconds:.4f} s")
    if table is not None:
        print(table)
    if config.output_json is not None:
        Path(config.output_json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if config.results_dir is not None:
        print(f"wrote {write_results(_results(result, config, facts), Path(config.results_dir))}")
