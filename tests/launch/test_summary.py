"""Figures of a run, from given clocks and counters."""

import math

from rorqual.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from rorqual.launch.summary import json_row, percentile, rank_rows, timings, totals_line


def output(prompt: int, new: int, arrival: float, first: float, end: float) -> RequestOutput:
    completion = CompletionOutput(index=0, text="t", token_ids=list(range(new)), finish_reason="stop")
    metrics = RequestMetrics(arrival=arrival, first_token_time=first, finish_time=end, cached_tokens=1)
    return RequestOutput(request_id="r", prompt_token_ids=[0] * prompt, outputs=[completion], finished=True, metrics=metrics)


def test_percentile_is_nearest_rank():
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(map(float, range(1, 101))), 0.99) == 99.0
    assert percentile([5.0], 0.0) == 5.0
    assert math.isnan(percentile([], 0.5))


def test_timings_follow_the_usual_definitions():
    assert timings(output(3, 5, 10.0, 11.0, 13.0)) == {"ttft_s": 1.0, "tpot_s": 0.5, "latency_s": 3.0}
    assert timings(output(3, 1, 10.0, 11.0, 11.0))["tpot_s"] is None
    unborn = RequestOutput(request_id="r")
    assert timings(unborn) == {"ttft_s": None, "tpot_s": None, "latency_s": None}


def test_totals():
    line = totals_line([output(3, 5, 0.0, 0.1, 1.0), output(7, 15, 0.0, 0.3, 1.0)], 2.0)
    assert line == "2 requests, 10 prompt tokens, 20 output tokens in 2.00 s: 10.0 output tokens/s; TTFT mean 200 ms, p99 300 ms"


def test_json_row_carries_logprobs_when_they_were_asked_for():
    out = output(2, 1, 0.0, 1.0, 1.0)
    assert "logprobs" not in json_row(0, "shown", out, out.outputs[0])
    out.outputs[0].logprobs = [{4: Logprob(logprob=-0.5, rank=1, decoded_token="x")}]
    out.outputs[0].cumulative_logprob = -0.5
    row = json_row(0, "shown", out, out.outputs[0])
    assert row["prompt"] == "shown" and row["logprobs"] == [[[4, -0.5, 1, "x"]]] and row["cumulative_logprob"] == -0.5


def test_expert_load_of_a_rank_is_that_of_its_experts_and_layers():
    def rank(r, pp, dp, tp, layers, experts):
        return {"rank": r, "pp": pp, "dp": dp, "tp": tp, "layers": layers, "tokens": 9, "busy_seconds": 1.0, "experts": experts}

    total = [[0, 0, 0, 0], [4, 0, 1, 1], [1, 1, 1, 1]]
    spread = [rank(r, 0, r // 2, r % 2, [0, 3], 1) for r in range(4)]
    assert [row[7:9] for row in rank_rows({"ranks": spread, "expert_load": total})] == [[5, 1.0], [1, 1.0], [2, 1.0], [2, 1.0]]
    staged = [rank(0, 0, 0, 0, [0, 2], 4), rank(1, 1, 0, 0, [2, 3], 4)]
    rows = rank_rows({"ranks": staged, "expert_load": total})
    assert [row[4] for row in rows] == ["0-1", "2-2"]
    assert rows[0][7] == 6 and rows[0][8] == 4 * 4 / 6 and rows[1][7:9] == [4, 1.0]


def test_replicas_that_hold_all_experts_show_their_own_load():
    def rank(r, dp, tp, load):
        row = {"rank": r, "pp": 0, "dp": dp, "tp": tp, "layers": [0, 1], "tokens": 9, "busy_seconds": 1.0, "experts": 2}
        return row | {"expert_load": [load]}

    ranks = [rank(0, 0, 0, [3, 1]), rank(1, 0, 1, [0, 0]), rank(2, 1, 0, [1, 1]), rank(3, 1, 1, [0, 0])]
    rows = rank_rows({"ranks": ranks, "expert_load": [[4, 2]]})
    assert [row[7:9] for row in rows] == [[4, 1.5], [4, 1.5], [2, 1.0], [2, 1.0]]


def test_a_model_without_experts_has_no_load():
    row = {"rank": 0, "pp": 0, "dp": 0, "tp": 0, "layers": [0, 2], "tokens": 9, "busy_seconds": 1.0}
    assert rank_rows({"ranks": [row], "expert_load": []})[0][5:9] == [None, 9, None, None]
