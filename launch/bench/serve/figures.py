"""From outcomes to figures, with vLLM's keys.

TTFT: sending to the first token. E2EL: sending to the last. TPOT: (E2EL - TTFT) / (output tokens - 1) of a request, none where there is
one token. ITL: gaps between chunks, which are not tokens. Throughputs: counts over the wall time of the whole run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .config import ServeBenchConfig
from .outcome import Outcome


def figures(outcomes: Sequence[Outcome], seconds: float, config: ServeBenchConfig) -> dict[str, Any]:
    """The figures of a run; failed requests count as failed and for nothing else."""
    good = [o for o in outcomes if o.success]
    made, read = sum(o.output_tokens for o in good), sum(o.prompt_tokens for o in good)
    result: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "total_cached_tokens": sum(o.cached_tokens for o in good),
        "request_throughput": len(good) / seconds,
        "request_goodput": sum(_within(o, config.limits) for o in good) / seconds if config.limits else None,
        "output_throughput": made / seconds,
        "total_token_throughput": (read + made) / seconds,
        "max_output_tokens_per_s": _busiest_second(good),
        "max_concurrent_requests": _most_at_once(outcomes),
        "concurrency": sum(o.latency for o in good) / seconds,
        "short_outputs": sum(o.output_tokens < o.wanted for o in good),
    }
    for name, values in samples(good).items():
        result |= _spread(name, values, config.percentiles if name in (*config.metrics, "client_queue_time", "client_lag") else ())
    return result


def samples(good: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds of each metric; requests without tokens have none of the first three."""
    return {
        "ttft": [o.ttft for o in good if o.arrivals],
        "tpot": [t for o in good if (t := o.tpot) is not None],
        "itl": [gap for o in good for gap in o.itl],
        "e2el": [o.latency for o in good],
        "client_queue_time": [o.queue_time for o in good],
        "e2el_including_client_queue": [o.ended - o.planned for o in good],
        "client_lag": [o.started - o.planned for o in good],
    }


def _spread(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles in ms; None where there are no values: 0 would look like a good one."""
    values = 1000.0 * np.asarray(seconds, dtype=np.float64)
    some = len(values) > 0
    result = {
        f"mean_{name}_ms": float(values.mean()) if some else None,
        f"median_{name}_ms": float(np.median(values)) if some else None,
        f"std_{name}_ms": float(values.std()) if some else None,
    }
    return result | {f"p{p:g}_{name}_ms": float(np.percentile(values, p)) if some else None for p in percentiles}


def _within(outcome: Outcome, limits: dict[str, float]) -> bool:
    """Whether a request kept all limits (ms); one token has no time between tokens to be too long."""
    found = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(1000.0 * found[name] <= limit for name, limit in limits.items())


def _busiest_second(good: Sequence[Outcome]) -> float:
    """Most output tokens in one second of the run."""
    points = [point for o in good for point in o.spread()]
    if not points:
        return 0.0
    times, tokens = np.array(points).T
    return float(np.bincount((times - times.min()).astype(np.int64), weights=tokens).max())


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    """Most requests that were open at one moment."""
    edges = sorted([(o.sent, 1) for o in outcomes] + [(o.ended, -1) for o in outcomes])  # an end before a start at the same time
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def detailed(outcomes: Sequence[Outcome], start: float) -> dict[str, Any]:
    """Each request's own figures, in the order of the dataset; times in seconds, starts from the first send (``start_unix``)."""
    return {
        "start_unix": time.time() - (time.perf_counter() - start),
        "input_lens": [o.prompt_tokens for o in outcomes],
        "output_lens": [o.output_tokens for o in outcomes],
        "cached_tokens": [o.cached_tokens for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.itl for o in outcomes],
        "latencies": [o.latency for o in outcomes],
        "start_times": [o.sent - start for o in outcomes],
        "queue_times": [o.queue_time for o in outcomes],
        "generated_texts": [o.generated_text for o in outcomes],
        "finish_reasons": [o.finish_reason for o in outcomes],
        "errors": [o.error or "" for o in outcomes],
    }
