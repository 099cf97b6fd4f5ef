from __future__ import annotations

import json

from rorqual.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput


def test_round_trip_through_json() -> None:
    first = {7: Logprob(logprob=-0.25, rank=2, decoded_token="a"), 3: Logprob(logprob=-0.1, rank=1)}
    ended = {"finish_reason": "stop", "stop_reason": 9}
    output = RequestOutput(
        request_id="r",
        prompt="hé",
        prompt_token_ids=[1, 2, 3],
        outputs=[
            CompletionOutput(index=0, text="ab", token_ids=[7, 9], logprobs=[first], cumulative_logprob=-0.25, **ended),
            CompletionOutput(index=1, token_ids=[4], stop_reason="x"),
        ],
        finished=False,
        prompt_logprobs=[None, first],
        metrics=RequestMetrics(arrival=1.0, first_token_time=1.5, cached_tokens=2, preemptions=1),
    )
    back = RequestOutput.from_dict(json.loads(json.dumps(output.to_dict())))
    assert back == output
    assert list(back.outputs[0].logprobs[0]) == [7, 3]  # type: ignore[index]
    assert back.usage == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, "cached_tokens": 2}
    assert back.outputs[0].finished and not back.outputs[1].finished


def test_metrics() -> None:
    metrics = RequestMetrics(arrival=2.0)
    assert metrics.ttft is None and metrics.latency is None
    metrics.first_token_time, metrics.finish_time = 2.5, 4.0
    assert metrics.ttft == 0.5 and metrics.latency == 2.0


def test_empty_output_round_trip() -> None:
    output = RequestOutput(request_id="x")
    assert RequestOutput.from_dict(output.to_dict()) == output
    assert output.usage["total_tokens"] == 0
