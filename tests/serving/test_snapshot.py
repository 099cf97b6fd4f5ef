"""Snapshots, the balance of experts, and log lines."""

import re

import msgspec
import numpy as np
import pytest

from rorqual.engine.serving import wire
from rorqual.engine.serving.expert_balance import added, balance, pack, rank_loads, unpack
from rorqual.engine.serving.histogram import STEP, Histogram
from rorqual.engine.serving.log_lines import LogLines
from rorqual.engine.serving.meter import Meter
from rorqual.engine.serving.snapshot import BUSY_S, IDLE_S, Reporter


def report(steps=0, running=0, **more):
    seconds = Histogram(STEP)
    for _ in range(steps):
        seconds.add(0.02)
    found = {"running": running, "waiting": 0, "steps": steps, "idle_steps": steps // 4, "graph_steps": steps // 2, "padding_tokens": steps}
    found |= {"computed_tokens": 9 * steps, "prefix_queries": 10 * steps, "prefix_hits": 3 * steps, "kv_usage": 0.25, "preemptions": 0}
    return found | {"step_seconds": seconds.to_wire()} | more


def test_one_a_second_while_anything_happens_and_one_in_five_otherwise():
    meter = Meter(1)
    reporter = Reporter(meter, 1, log_every_s=0)
    start = reporter._next
    times = []
    for tick in range(300):  # 30 seconds, of which the first ten are busy
        now = start + tick / 10
        if tick < 100:
            meter.arrived(tick, 1, now, 0)
        if reporter.due(now) is not None:
            times.append(tick / 10)
    gaps = np.diff(times)
    assert times[0] == 0.0 and np.allclose(gaps[:10], BUSY_S, atol=0.11) and np.allclose(gaps[11:], IDLE_S, atol=0.21) and len(gaps) > 12


def test_a_snapshot_travels_and_names_what_is_old():
    reporter = Reporter(Meter(2), 2, log_every_s=0)
    counts = pack(np.array([[1, 2], [3, 4]]), (3, 4))
    reporter.take(1, report(4, 2, expert_loads=pack(np.array([[6, 2], [4, 4]]), (3, 4)), expert_counts=counts))
    reporter.extra["routing"] = {"policy": "kv"}
    snapshot = reporter.snapshot()
    again = wire.decode_down(wire.encode(snapshot))
    assert msgspec.to_builtins(again) == msgspec.to_builtins(snapshot)
    assert again.replicas[0]["leader"] == {} and again.replicas[0]["age"] is None and 0 <= again.replicas[1]["age"] < 60
    assert again.engine["experts"] == {
        "balancedness": pytest.approx((4 / 6 + 1) / 2), "worst": pytest.approx(4 / 6), "worst_layer": 3, "rank_loads": [10, 6],
    }  # fmt: skip
    assert again.engine["expert_counts"] == counts and again.engine["routing"] == {"policy": "kv"}
    assert "expert_loads" not in again.replicas[1]["leader"] and "expert_counts" not in again.replicas[1]["leader"]
    reporter.take(1, report(5, 2))
    later = reporter.snapshot().engine
    assert later["experts"] is None and later["expert_counts"] == counts  # counts of experts come less often, and stay


def test_choices_of_copied_experts_are_shared_by_their_slots():
    counts = np.array([[8, 4, 0, 2], [0, 0, 0, 0]])
    slots = np.array([[0, 1, 0, 3, 2, -1], [0, 1, 2, 3, 0, 1]])  # three ranks of two slots; expert 0 twice in the first layer
    assert rank_loads(counts, slots, 3).tolist() == [[4 + 4, 4 + 2, 0], [0, 0, 0]]


def test_balance_of_nothing_is_none_and_layers_without_tokens_do_not_count():
    assert balance([]) is None and added([]) is None
    assert balance([pack(np.zeros((2, 4), np.int64), (0, 1))]) is None
    found = balance([pack(np.array([[0, 0], [3, 1]]), (5, 6)), pack(np.array([[0, 0], [1, 3]]), (5, 6))])
    assert found["balancedness"] == found["worst"] == 1 and found["worst_layer"] == 6 and found["rank_loads"] == [4, 4]
    assert unpack(pack(np.array([[2**40, 1]]), (0,))).tolist() == [[2**31 - 1, 1]]


def test_lines_tell_rates_and_are_silent_while_nothing_happens():
    lines, meter = [], Meter(2)
    reporter = Reporter(meter, 2, log_every_s=10, say=lines.append)
    at = reporter._next
    reporter.take(0, report())
    reporter.due(at)
    meter.arrived("a", 500, at, 0)
    meter.tokens("a", 1, at + 1)
    meter.tokens("a", 249, at + 2)
    reporter.take(0, report(40, 1, tiers={"hits": 90, "misses": 10}, expert_loads=pack(np.array([[3, 1]]), (0,))))
    assert reporter.due(at + 9) is not None and lines == []
    reporter.take(0, report(80, 1, tiers={"hits": 180, "misses": 20}, expert_loads=pack(np.array([[3, 1]]), (0,))))
    reporter.due(at + 10)
    assert len(lines) == 1  # the other replica has nothing to tell
    assert lines[0] == (
        "Engine 000: Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 25.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, "
        "KV cache usage: 25.0%, Prefix cache hit rate: 30.0%, Step: 20.0 ms, Padding: 10.0%, Idle-rank steps: 25.0%, Graph steps: 50.0%, "
        "KV hot-row hit rate: 90.0%, Expert balance: 0.67"
    )
    meter.ended("a", "stop", at + 11)
    for second in range(11, 100):
        reporter.due(at + second)
    assert len(lines) == 2 and all(
        re.match(r"Engine 000: .*Running: 1 reqs", line) for line in lines
    )  # a last one for what was busy, then silence
    meter.arrived("b", 1, at + 100, 1)
    for second in range(100, 125):
        reporter.due(at + second)
    assert any(line.startswith("Engine 001") for line in lines[2:])
    assert not any(line.startswith("Engine 000") for line in lines[2:])


def test_no_lines_when_switched_off():
    lines = []
    reporter = Reporter(Meter(1), 1, log_every_s=0, say=lines.append)
    for second in range(60):
        reporter.due(reporter._next + second)
    assert lines == [] and LogLines(0)._before is None
