"""``bench server``: output tokens per second and core through HTTP streaming, with a model that costs nothing."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....engine.option import check_least, option
from ...console import table
from ...flags import Parser, add_options, chosen
from ..datasets.config import DatasetConfig
from ..results import Results, Row, check_folder, command_line, today, write_results
from ..serve.command import need_packages, run_loop
from ..serve.config import ServeBenchConfig, TargetConfig
from ..serve.run import Measured, measure, tokenizer_folder
from ..serve.save import client_versions
from ..sweep.server import free_port, serving
from .spent import Profile, cpu_seconds, hot

#: output tokens per second of one core that the project stands by
TARGET = 3000.0


@dataclass(frozen=True, kw_only=True)
class ServerBenchConfig:
    """What is measured."""

    concurrency: int = option(64, "Streams at a time.", "--max-concurrency", group="benchmark")
    num_prompts: int = option(512, "Requests.", group="benchmark")
    input_len: int = option(32, "Prompt tokens.", group="benchmark")
    output_len: int = option(128, "Output tokens.", group="benchmark")
    runs: int = option(3, "Times to measure; the median counts.", group="benchmark")
    api_server_count: int = option(1, "HTTP processes.", group="benchmark")
    tokenizer: str = option("tiny", "Folder of the tokenizer that makes the text; 'none': ids only.", group="benchmark")
    chat: bool = option(False, "Chat completions rather than completions.", group="benchmark")
    step_seconds: float = option(0.0, "How long a step of the model takes.", group="benchmark")
    profile_dir: str | None = option(None, "Also sample where engine and HTTP process spend time, into this folder.", group="benchmark")
    output_json: str | None = option(None, "Write the figures to this file.", group="benchmark")
    results_dir: str | None = option(None, "Also write a result file into this folder.", group="benchmark")


def add_parser(parser: Parser) -> None:
    """Flags of the command."""
    add_options(parser, ServerBenchConfig)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; the exit code."""
    need_packages()
    config = ServerBenchConfig(**chosen(args, ServerBenchConfig))
    check_least(config, 1, "concurrency", "num_prompts", "input_len", "output_len", "runs", "api_server_count")
    for folder in (config.results_dir, config.profile_dir):
        check_folder(folder)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with serving(_child(config, port), port, log, 120.0):
            pids = _pids(log)
            runs = [_one(config, port, pids, warm=i == 0) for i in range(config.runs)]
            profiles = _profiles(config, port, pids) if config.profile_dir is not None else {}
    result = {**sorted(runs, key=lambda r: r["tokens_per_core_second"])[len(runs) // 2], "runs": runs, "profiles": profiles}
    _report(result, config)
    return 0


def _child(config: ServerBenchConfig, port: int) -> list[str]:
    folder = None if config.tokenizer == "none" else str(tokenizer_folder(config.tokenizer, must=True))
    pages = 4 * config.concurrency * -(-(config.input_len + config.output_len) // 64)
    settings = {
        "port": port, "api_server_count": config.api_server_count, "tokenizer": folder, "max_num_seqs": config.concurrency,
        "max_model_len": config.input_len + config.output_len + 64, "n_pages": pages, "step_seconds": config.step_seconds,
    }  # fmt: skip
    return [sys.executable, "-m", f"{__package__}.child", json.dumps(settings)]


def _pids(log: Path, patience_s: float = 60.0) -> dict[str, list[int]]:
    """Processes of the server, as it prints them."""
    deadline = time.monotonic() + patience_s
    while True:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith('{"host"'):
                found = json.loads(line)
                return {"engine": [found["engine"]], "http": found["http"]}
        if time.monotonic() > deadline:
            raise ValueError(f"the server did not name its processes within {patience_s:g} s")
        time.sleep(0.1)


def _load(config: ServerBenchConfig, port: int, count: int, seed: int) -> Measured:
    target = TargetConfig(
        backend="openai-chat" if config.chat else "rorqual", port=port, tokenizer=None if config.tokenizer == "none" else config.tokenizer
    )
    load = ServeBenchConfig(max_concurrency=config.concurrency, seed=seed, ignore_eos=True, disable_tqdm=True)
    dataset = DatasetConfig(num_prompts=count, input_len=config.input_len, output_len=config.output_len)
    measured = run_loop(measure(None, target, load, dataset))
    if measured.figures["failed"]:
        raise RuntimeError(f"{measured.figures['failed']} requests failed: {measured.errors}")
    return measured


def _one(config: ServerBenchConfig, port: int, pids: dict[str, list[int]], *, warm: bool) -> dict[str, Any]:
    """One run: tokens, seconds, and CPU seconds of each side."""
    if warm:
        _load(config, port, max(1, config.num_prompts // 8), seed=99)
    before = {name: cpu_seconds(ids) for name, ids in pids.items()}
    mine = time.process_time()
    measured = _load(config, port, config.num_prompts, seed=int(time.time()))
    spent = {name: cpu_seconds(ids) - before[name] for name, ids in pids.items()}
    tokens = measured.figures["total_output_tokens"]
    both = max(sum(spent.values()), 1e-3)
    return {
        "output_tokens": tokens,
        "duration": measured.figures["duration"],
        "output_throughput": measured.figures["output_throughput"],
        "tokens_per_core_second": tokens / both,
        "engine_us_per_token": 1e6 * spent["engine"] / tokens,
        "http_us_per_token": 1e6 * spent["http"] / tokens,
        "client_us_per_token": 1e6 * (time.process_time() - mine) / tokens,
        "median_ttft_ms": measured.figures["median_ttft_ms"],
        "p99_itl_ms": measured.figures["p99_itl_ms"],
    }


def _profiles(config: ServerBenchConfig, port: int, pids: dict[str, list[int]]) -> dict[str, Any]:
    """Where engine and HTTP process spend their time under the load."""
    found: dict[str, Any] = {}
    for name, ids in pids.items():
        path = Path(config.profile_dir or ".") / f"server-{name}.stacks"
        once = _load(config, port, config.num_prompts, seed=int(time.time()))
        seconds = max(2.0, min(20.0, once.figures["duration"]))
        profile = Profile(ids[0], seconds, path)
        end_at = time.monotonic() + seconds
        while time.monotonic() < end_at:
            _load(config, port, config.num_prompts, seed=int(time.time()))
        profile.finish(60.0)
        found[name] = hot(path)
    return found


def _report(result: dict[str, Any], config: ServerBenchConfig) -> None:
    size = f"{config.concurrency} streams, {config.input_len} in, {config.output_len} out"
    print(
        f"{size}: {result['output_throughput']:,.0f} output tokens/s, "
        f"{result['tokens_per_core_second']:,.0f} a second and core of the server\n"
        f"CPU a token: engine {result['engine_us_per_token']:.1f} us, HTTP {result['http_us_per_token']:.1f} us, "
        f"this client {result['client_us_per_token']:.1f} us (median of {config.runs} runs)"
    )
    for name, rows in result["profiles"].items():
        print(f"\n{name}: where its time goes")
        print(table(("function", "own %", "with callees %"), [(f, round(100 * a, 1), round(100 * b, 1)) for f, a, b in rows]))
    if config.output_json is not None:
        Path(config.output_json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if config.results_dir is not None:
        print(f"wrote {write_results(_results(result, config), Path(config.results_dir))}")


def _results(result: dict[str, Any], config: ServerBenchConfig) -> Results:
    params = {
        "streams": config.concurrency, "input_len": config.input_len, "output_len": config.output_len,
        "http_processes": config.api_server_count,
        "text": config.tokenizer != "none", "route": "chat" if config.chat else "completions",
    }  # fmt: skip
    rates = [run["tokens_per_core_second"] for run in result["runs"]]
    rows = [
        Row(name="server alone, through HTTP streaming", params={**params, "runs": [round(r) for r in rates]},
            value=result["tokens_per_core_second"], unit="output tokens/s a core", better="higher", target=TARGET),
        *(Row(name=f"server alone, CPU of {name}", params=params, value=result[f"{name}_us_per_token"], unit="us a token", better="lower")
          for name in ("engine", "http", "client")),
    ]  # fmt: skip
    for name, hottest in result["profiles"].items():
        rows += [
            Row(name=f"server alone, profile of {name}: {function}", params={"with_callees": round(inside, 4)}, value=round(own, 4),
                unit="share of samples", better="lower")
            for function, own, inside in hottest[:10]
        ]  # fmt: skip
    return Results(bench="server", command=command_line(), date=today(), device="cpu", versions=client_versions(), rows=tuple(rows))
