"""Figures from outcomes whose values are known, and arrivals."""

import numpy as np
import pytest

from rorqual.launch.bench.serve.arrivals import arrival_times
from rorqual.launch.bench.serve.config import ServeBenchConfig
from rorqual.launch.bench.serve.figures import figures
from rorqual.launch.bench.serve.outcome import Outcome


def outcome(sent, arrivals, tokens, **more):
    base = {"planned": sent, "started": sent, "prompt_tokens": 10, "wanted": tokens, "ended": arrivals[-1] if arrivals else sent}
    return Outcome(sent=sent, arrivals=arrivals, output_tokens=tokens, **{**base, **more})


def test_definitions():
    one = outcome(0.0, [0.2, 0.3, 0.7], 5)  # five tokens in three chunks
    two = outcome(0.1, [0.5], 1, cached_tokens=4)
    lost = outcome(0.0, [0.1], 9, error="gone", ended=3.0)
    got = figures([one, two, lost], 2.0, ServeBenchConfig(goodput=("ttft:300", "tpot:200")))
    assert (got["completed"], got["failed"], got["total_output_tokens"], got["total_input_tokens"]) == (2, 1, 6, 20)
    assert (got["request_throughput"], got["output_throughput"], got["total_token_throughput"]) == (1.0, 3.0, 13.0)
    assert got["mean_ttft_ms"] == pytest.approx(300) and got["total_cached_tokens"] == 4
    assert got["mean_tpot_ms"] == pytest.approx(125), "one request has a time per token: (700 - 200) / 4"
    assert got["mean_itl_ms"] == pytest.approx(250), "two gaps: of chunks, not of tokens"
    assert got["mean_e2el_ms"] == pytest.approx((700 + 400) / 2)
    assert got["request_goodput"] == 0.5, "the second is late at its first token; the lost one is none"
    assert got["concurrency"] == pytest.approx((0.7 + 0.4) / 2) and got["max_concurrent_requests"] == 3


def test_one_token_is_within_any_time_between_tokens():
    got = figures([outcome(0.0, [0.1], 1)], 1.0, ServeBenchConfig(goodput=("tpot:1",)))
    assert got["request_goodput"] == 1.0 and got["mean_tpot_ms"] is None and got["p99_itl_ms"] is None


def test_the_busiest_second_counts_tokens():
    a = outcome(0.0, [0.1, 0.2, 1.5], 30, chunk_tokens=[10, 15, 5])
    b = outcome(0.0, [0.3, 2.2], 8)  # not told: four each
    assert figures([a, b], 3.0, ServeBenchConfig())["max_output_tokens_per_s"] == 29


def test_percentiles_are_those_asked_for():
    got = figures(
        [outcome(0.0, [i / 10], 1) for i in range(1, 11)], 1.0, ServeBenchConfig(metric_percentiles="25,99.9", percentile_metrics="ttft")
    )
    assert got["p25_ttft_ms"] == pytest.approx(325) and "p99.9_ttft_ms" in got and "p25_e2el_ms" not in got and "mean_e2el_ms" in got


def test_arrivals_keep_the_rate_asked_for():
    assert arrival_times(ServeBenchConfig(), 3) == [0.0, 0.0, 0.0]
    spread = {}
    for burst in (0.2, 1.0, 20.0):
        times = np.array(arrival_times(ServeBenchConfig(request_rate=10.0, burstiness=burst, seed=4), 4000))
        assert times[-1] == pytest.approx(400.0) and (np.diff(times) >= 0).all()
        gaps = np.diff(times)
        spread[burst] = gaps.std() / gaps.mean()
    assert spread[0.2] == pytest.approx(0.2**-0.5, rel=0.15) and spread[1.0] == pytest.approx(1.0, rel=0.1)
    assert spread[20.0] == pytest.approx(20**-0.5, rel=0.1)
    assert arrival_times(ServeBenchConfig(request_rate=5.0), 9) == arrival_times(ServeBenchConfig(request_rate=5.0), 9)
    assert arrival_times(ServeBenchConfig(request_rate=5.0), 9) != arrival_times(ServeBenchConfig(request_rate=5.0, seed=1), 9)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_grows(strategy):
    config = ServeBenchConfig(ramp_up_strategy=strategy, ramp_up_start_rps=1.0, ramp_up_end_rps=50.0, burstiness=1000.0)
    gaps = np.diff(arrival_times(config, 500))
    assert gaps[:5].mean() > 20 * gaps[-5:].mean() and gaps[-5:].mean() == pytest.approx(1 / 50, rel=0.1)
