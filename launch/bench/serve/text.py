"""The figures of a run for a person."""

from __future__ import annotations

from typing import Any

from .config import ServeBenchConfig
from .run import Measured

_WIDTH = 58
_TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Gap between chunks (inter-token latency)",
    "e2el": "End-to-end latency",
}


def shown(measured: Measured, config: ServeBenchConfig) -> str:
    """The figures as a table in vLLM's order, with warnings and errors below."""
    f = measured.figures
    lines = ["{s:{c}^{n}}".format(s=" Serving benchmark ", c="=", n=_WIDTH)]
    lines += [_line(name, f[key], form) for name, key, form in _COUNTS if f.get(key) is not None]
    for name in config.metrics:
        lines.append("{s:{c}^{n}}".format(s=f" {_TITLES[name]} ", c="-", n=_WIDTH))
        lines += _metric(f, name, config)
    if config.max_concurrency is not None:
        lines.append("{s:{c}^{n}}".format(s=" Wait in this client (--max-concurrency) ", c="-", n=_WIDTH))
        lines += _metric(f, "client_queue_time", config)
    if "probe_completed" in f:
        lines.append("{s:{c}^{n}}".format(s=" Probes of one token ", c="-", n=_WIDTH))
        lines += [_line(key.removeprefix("probe_").replace("_", " "), value, ".2f") for key, value in f.items() if key.startswith("probe_")]
    lines.append("=" * _WIDTH)
    lines += [f"warning: {text}" for text in measured.warnings]
    lines += [f"failed, {count} x: {text}" for text, count in list(measured.errors.items())[:5]]
    return "\n".join(lines)


_COUNTS = (
    ("Successful requests", "completed", "d"),
    ("Failed requests", "failed", "d"),
    ("Duration (s)", "duration", ".2f"),
    ("Input tokens", "total_input_tokens", "d"),
    ("  of them cached by the server", "total_cached_tokens", "d"),
    ("Output tokens", "total_output_tokens", "d"),
    ("Requests/s", "request_throughput", ".2f"),
    ("Requests/s within the limits (goodput)", "request_goodput", ".2f"),
    ("Output tokens/s", "output_throughput", ".2f"),
    ("Output tokens in the busiest second", "max_output_tokens_per_s", ".0f"),
    ("Total tokens/s", "total_token_throughput", ".2f"),
    ("Most requests at once", "max_concurrent_requests", "d"),
    ("Mean requests at once", "concurrency", ".2f"),
)


def _metric(f: dict[str, Any], name: str, config: ServeBenchConfig) -> list[str]:
    keys = [("Mean", f"mean_{name}_ms"), ("Median", f"median_{name}_ms"), *((f"P{p:g}", f"p{p:g}_{name}_ms") for p in config.percentiles)]
    return [_line(f"{word} (ms)", f.get(key), ".2f") for word, key in keys if word != "P50"]


def _line(name: str, value: Any, form: str) -> str:
    number = "-" if value is None else format(value, form if form != "d" or isinstance(value, int) else ".0f")
    return f"{name + ':':<40} {number:>{_WIDTH - 41}}"
