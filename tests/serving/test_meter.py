"""What the meter says of requests, and that it is cheap and forgets what has ended."""

import timeit

import pytest

from rorqual.engine.serving.histogram import Histogram, difference, mean, merged, quantile
from rorqual.engine.serving.meter import Meter


def sums(meter, rank=0):
    return {name: (sum(h["counts"]), pytest.approx(h["sum"])) for name, h in meter.replica(rank)["histograms"].items()}


def test_a_request_of_three_tokens():
    meter = Meter(2)
    meter.arrived("a", 7, 10.0, 1)
    meter.scheduled("a", 10.5)
    meter.tokens("a", 1, 11.0)
    meter.scheduled("a", 11.2)  # again after a preemption: the first one counts
    meter.tokens("a", 2, 11.5)
    assert meter.n_open == 1 and meter.replica(1)["open"] == 1
    meter.ended("a", "stop", 11.6, cached_tokens=4)
    assert sums(meter, 1) == {
        "time_to_first_token_seconds": (1, 1.0),
        "inter_token_latency_seconds": (1, 0.5),
        "request_time_per_output_token_seconds": (1, 0.25),
        "e2e_request_latency_seconds": (1, 1.6),
        "request_queue_time_seconds": (1, 0.5),
        "request_prefill_time_seconds": (1, 0.5),
        "request_decode_time_seconds": (1, 0.5),
        "request_inference_time_seconds": (1, 1.0),
        "request_prompt_tokens": (1, 7),
        "request_generation_tokens": (1, 3),
    }
    found = meter.replica(1)
    assert (found["prompt_tokens"], found["generation_tokens"], found["cached_prompt_tokens"]) == (7, 3, 4)
    assert found["ended"] == {"stop": 1} and found["open"] == 0 and found["routed"] == 1
    assert all(count == 0 for count, _ in sums(meter, 0).values()) and meter.replica(0)["ended"] == {}


def test_requests_that_never_ran_have_an_end_and_no_times_of_tokens():
    meter = Meter(1)
    meter.arrived("a", 7, 1.0, 0)
    meter.ended("a", "abort", 3.0)
    found = sums(meter)
    assert found["e2e_request_latency_seconds"] == (1, 2.0) and found["request_generation_tokens"] == (1, 0)
    assert found["time_to_first_token_seconds"][0] == found["request_queue_time_seconds"][0] == found["request_decode_time_seconds"][0] == 0
    assert meter.replica(0)["prompt_tokens"] == 0 and meter.replica(0)["ended"] == {"abort": 1}


def test_unknown_names_and_late_news_change_nothing():
    meter = Meter(1)
    before = meter.activity
    meter.tokens("x", 1, 1.0)
    meter.scheduled("x", 1.0)
    meter.ended("x", "stop", 1.0)
    assert meter.activity == before and meter.replica(0)["ended"] == {}
    meter.arrived("x", 1, 1.0, 0)
    assert meter.activity != before
    meter.ended("x", "stop", 2.0)
    meter.ended("x", "stop", 2.0)
    assert meter.replica(0)["ended"] == {"stop": 1} and meter.n_open == 0


def test_refusals_count_by_status():
    meter = Meter(1)
    for status in (429, 400, 429):
        meter.refused(status)
    assert meter.all_replicas() == {"refused": {"429": 2, "400": 1}}


def test_those_that_will_not_end_are_forgotten():
    meter = Meter(2)
    for name in range(6):
        meter.arrived(name, 1, 0.0, name % 2)
    meter.forget(1)
    assert meter.n_open == 3 and meter.replica(0)["open"] == 3 and meter.replica(1)["open"] == 0
    meter.forget()
    assert meter.n_open == 0 and meter.replica(0)["ended"] == {}


def test_a_token_costs_microseconds_and_nothing_is_kept():
    meter = Meter(1)
    meter.arrived("a", 3, 0.0, 0)
    best = min(timeit.repeat(lambda: meter.tokens("a", 1, 1.0), number=2000, repeat=5)) / 2000
    assert best < 50e-6  # about 0.5 on a quiet core; the bound is for a machine that does ten other things
    meter.ended("a", "stop", 1.0)
    assert not meter._open


def test_buckets_hold_their_upper_bounds():
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.1, 2.0, 5.0, 5.1, 100.0):
        histogram.add(value)
    assert histogram.counts == [2, 2, 1, 2] and histogram.total == 7 and histogram.sum == pytest.approx(114.7)


def test_quantiles_lie_in_their_buckets():
    histogram = Histogram((1.0, 2.0, 5.0))
    assert quantile(histogram.to_wire(), 0.5) is None and mean(histogram.to_wire()) is None
    for value in (0.5, 1.5, 1.6, 1.7, 4.0):
        histogram.add(value)
    wire = histogram.to_wire()
    assert quantile(wire, 0.0) == 0.0 and 1 < quantile(wire, 0.5) < 2 and quantile(wire, 1.0) == 5.0
    assert mean(wire) == pytest.approx(9.3 / 5)
    histogram.add(99.0)
    assert quantile(histogram.to_wire(), 1.0) == 5.0


def test_sums_and_differences_of_histograms():
    a, b = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    a.add(0.5)
    b.add(1.5)
    both = merged([a.to_wire(), b.to_wire()])
    assert both == {"bounds": [1.0, 2.0], "counts": [1, 1, 0], "sum": 2.0}
    assert difference(both, a.to_wire()) == b.to_wire() and difference(both, None) == both
    assert difference(a.to_wire(), b.to_wire()) == a.to_wire()  # it began anew
    with pytest.raises(ValueError, match="different bounds"):
        merged([a.to_wire(), Histogram((1.0, 3.0)).to_wire()])
    with pytest.raises(ValueError, match="no histograms"):
        merged([])
