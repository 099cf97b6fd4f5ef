"""Flags of ``bench serve``; names are vLLM's, SGLang's are aliases."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from ....engine.option import check_least, option
from ....parallel.json_text import parse_json

BACKENDS = ("rorqual", "vllm", "sglang", "openai", "openai-chat")
#: what ``--percentile-metrics`` and ``--goodput`` know
METRICS = ("ttft", "tpot", "itl", "e2el")
LIMITS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """Which server, and what is asked of it."""

    backend: str = option(
        "rorqual",
        "What is asked: completions (all but the last), or chat completions.",
        "--endpoint-type",
        choices=BACKENDS,
        group="target",
    )
    base_url: str | None = option(None, "URL of the server, instead of --host and --port.", group="target")
    host: str = option("127.0.0.1", "Its host.", group="target")
    port: int = option(8000, "Its port.", group="target")
    endpoint: str | None = option(None, "Path of the route; /v1/completions or /v1/chat/completions by default.", group="target")
    served_model_name: str | None = option(None, "Model named in requests; the first of /v1/models by default.", group="target")
    tokenizer: str | None = option(
        None, "Folder of a tokenizer, for datasets of text; the model's, when it is a folder or 'tiny'.", group="target"
    )
    skip_tokenizer_init: bool = option(False, "Send token ids, read no tokenizer.", "--tokenize-prompt", group="target")
    vocab_size: int | None = option(None, "Random ids are below it; as the server or the tokenizer say by default.", group="target")
    api_key: str | None = option(None, "Bearer token; the environment's OPENAI_API_KEY by default.", group="target")
    header: tuple[str, ...] = option((), "KEY=VALUE to send with each request.", group="target")
    insecure: bool = option(False, "Take any certificate of an https server.", group="target")
    ready_check_timeout_sec: int = option(
        600, "How long to wait for the server to answer a first request; 0: no such request.", group="target"
    )
    request_timeout_s: float = option(3600.0, "A request that takes longer has failed.", group="target")


@dataclass(frozen=True, kw_only=True)
class ServeBenchConfig:
    """How the load arrives, and what is written of it."""

    request_rate: float = option(math.inf, "Requests per second; inf: all at once.", group="load")
    burstiness: float = option(1.0, "1: Poisson arrivals; smaller: more bursty, larger: more even (gamma).", group="load")
    max_concurrency: int | None = option(None, "Requests that run at a time; the others wait in the client.", group="load")
    ramp_up_strategy: str | None = option(None, "The rate grows from start to end.", choices=("linear", "exponential"), group="load")
    ramp_up_start_rps: float | None = option(None, "Requests per second at the start.", group="load")
    ramp_up_end_rps: float | None = option(None, "Requests per second at the end.", group="load")
    probe_request_rate: float = option(
        0.0, "Also send requests of one token at this rate, past --max-concurrency, reported apart.", group="load"
    )
    seed: int = option(0, "Of prompts and arrivals.", group="load")
    num_warmups: int = option(0, "Requests with other prompts before the clock starts.", "--warmup-requests", group="load")
    flush_cache: bool = option(True, "Ask the server to forget cached prefixes before the clock starts, where it can.", group="load")
    profile: bool = option(False, "Let the server profile the run (/start_profile, /stop_profile).", group="load")

    ignore_eos: bool | None = option(
        None, "Ask for all tokens, end tokens ignored; by default on for all backends but openai's.", group="sampling"
    )
    temperature: float = option(0.0, "Of the sampling.", group="sampling")
    top_p: float | None = option(None, "Of the sampling.", group="sampling")
    top_k: int | None = option(None, "Of the sampling.", group="sampling")
    min_p: float | None = option(None, "Of the sampling.", group="sampling")
    logprobs: int | None = option(None, "Log probabilities of so many tokens a place.", group="sampling")
    return_token_ids: bool = option(False, "Ask for token ids, and compare their number with usage.", group="sampling")
    extra_body: str | None = option(None, "JSON object to add to each request.", "--extra-request-body", group="sampling")

    goodput: tuple[str, ...] = option((), "Limits in ms, such as ttft:500 tpot:50 e2el:10000: requests within all of them.", group="result")
    percentile_metrics: str = option("ttft,tpot,itl,e2el", "Of which to give percentiles.", group="result")
    metric_percentiles: str = option("50,90,95,99", "Which percentiles.", group="result")
    save_result: bool = option(False, "Write a JSON file with vLLM's keys.", group="result")
    save_detailed: bool = option(False, "With every request's times, text and errors.", "--output-details", group="result")
    append_result: bool = option(False, "Add to the file as a line, rather than make a new one.", group="result")
    result_dir: str = option(".", "Folder of the file.", group="result")
    result_filename: str | None = option(None, "Its name.", "--output-file", group="result")
    results_dir: str | None = option(None, "Also write a result file of the project's kind into this folder.", group="result")
    label: str | None = option(None, "Name of the run; the backend by default.", "--tag", group="result")
    metadata: tuple[str, ...] = option((), "KEY=VALUE for the file, such as layout=tp8.", group="result")
    disable_tqdm: bool = option(False, "No progress bar.", group="result")

    def __post_init__(self) -> None:
        check_load(self)
        _ = self.limits, self.percentiles, self.metrics, self.body, self.notes  # a wrong one is told before the load

    @property
    def limits(self) -> dict[str, float]:
        """Limit in ms of each metric of ``--goodput``."""
        found = {}
        for item in self.goodput:
            name, _, value = item.partition(":")
            if name not in LIMITS or not _is_number(value):
                raise ValueError(f"--goodput takes NAME:MS with a name of {', '.join(LIMITS)}, found {item!r}")
            found[name] = float(value)
        return found

    @property
    def percentiles(self) -> tuple[float, ...]:
        """Percentiles to give, 0 to 100."""
        words = [word.strip() for word in self.metric_percentiles.split(",")]
        if not all(_is_number(word) and float(word) <= 100 for word in words):
            raise ValueError(f"--metric-percentiles takes numbers from 0 to 100 with commas between, found {self.metric_percentiles!r}")
        return tuple(float(word) for word in words)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of which percentiles are given."""
        words = tuple(word.strip() for word in self.percentile_metrics.split(","))
        if not set(words) <= set(METRICS):
            raise ValueError(f"--percentile-metrics takes {', '.join(METRICS)} with commas between, found {self.percentile_metrics!r}")
        return words

    @property
    def body(self) -> dict[str, Any]:
        """What to add to the body of each request."""
        try:
            value = parse_json(self.extra_body) if self.extra_body else {}
        except json.JSONDecodeError as error:
            raise ValueError(f"--extra-body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"--extra-body must be a JSON object, found {type(value).__name__}")
        return value

    @property
    def notes(self) -> dict[str, str]:
        """``--metadata`` by key."""
        return pairs(self.metadata, "--metadata")


def check_load(config: ServeBenchConfig) -> None:
    """Refuse arrivals that make no sense; ValueError names the flag."""
    for name, value in (
        ("request-rate", config.request_rate),
        ("burstiness", config.burstiness),
        ("max-concurrency", config.max_concurrency),
    ):
        if value is not None and not value > 0:
            raise ValueError(f"--{name} must be above 0, found {value:g}")
    check_least(config, 0, "probe_request_rate", "num_warmups")
    rates = (config.ramp_up_start_rps, config.ramp_up_end_rps)
    if config.ramp_up_strategy is None and rates != (None, None):
        raise ValueError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
    if config.ramp_up_strategy is not None and not all(rate is not None and 0 < rate < math.inf for rate in rates):
        raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps above 0")


def pairs(words: tuple[str, ...], flag: str) -> dict[str, str]:
    """KEY=VALUE words as a dict; ValueError names the flag."""
    for word in words:
        if not word.partition("=")[0] or "=" not in word:
            raise ValueError(f"{flag} takes KEY=VALUE, found {word!r}")
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def _is_number(text: str) -> bool:
    """A plain number of 0 or more."""
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None
