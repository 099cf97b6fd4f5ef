"""When requests arrive."""

from __future__ import annotations

import math

import numpy as np

from .config import ServeBenchConfig


def arrival_times(config: ServeBenchConfig, count: int) -> list[float]:
    """Seconds after the start at which each of ``count`` requests shall be sent, in order.

    Gaps follow a gamma distribution (Poisson arrivals with burstiness 1), and are rescaled so that the last request comes at
    ``count / rate``: the rate of a run is the one asked for, whatever was drawn. A ramp has its own rate at each request.
    """
    if config.ramp_up_strategy is None and math.isinf(config.request_rate):
        return [0.0] * count
    rates = _rates(config, count)
    rng = np.random.default_rng((config.seed, 7))
    gaps = rng.gamma(config.burstiness, 1.0 / (rates * config.burstiness))
    times = np.cumsum(gaps)
    if config.ramp_up_strategy is None and times[-1] > 0:
        times *= count / config.request_rate / times[-1]
    return [float(t) for t in times]


def _rates(config: ServeBenchConfig, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Requests per second at each request."""
    if config.ramp_up_strategy is None:
        return np.full(count, config.request_rate)
    start, end = config.ramp_up_start_rps or 1.0, config.ramp_up_end_rps or 1.0
    if config.ramp_up_strategy == "linear":
        return np.linspace(start, end, count)
    return np.geomspace(start, end, count)
