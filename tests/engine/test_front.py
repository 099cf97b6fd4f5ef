"""Rank 0's bookkeeping: routing over DP ranks, prompts in, outputs out; memory sizing and setting checks."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.engine.call import list_prompts
from rorqual.engine.config import EngineConfig, check_config
from rorqual.engine.front import Front
from rorqual.engine.memory import pool_pages
from rorqual.engine.records import Event
from rorqual.engine.sampling_params import SamplingParams


def front(dp: int = 1) -> Front:
    return Front(tokenizer=None, dp=dp, vocab_size=10)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ([3, 10], r"token id 10; the vocabulary has ids 0 to 9"),
        ([-1], "token id -1"),
        ("text", "need a tokenizer"),
        ({"text": "x"}, r"needs 'prompt' or 'prompt_token_ids', found \['text'\]"),
        (5, "found int"),
        (None, "found NoneType"),
        ([1, None], "the token ids of a prompt must be integers, found None"),
        ([1, 2.7], "must be integers, found 2.7"),
        ([1, "2"], "must be integers, found '2'"),
    ],
)
def test_bad_prompts_are_refused_and_leave_nothing(prompt, message):
    f = front()
    with pytest.raises(ValueError, match=message):
        f.submit([[1], prompt], [SamplingParams()] * 2, [0, 0])
    assert not f.open and f.router.tokens == [0]


@pytest.mark.parametrize(
    ("params", "priority", "message"),
    [
        ([SamplingParams()], None, "sampling_params has 1 entries for 2 prompts"),
        ([SamplingParams(), None], None, "sampling_params must be SamplingParams or a list of them, found NoneType"),
        ({"temperature": 0.0}, None, "found dict"),
        (None, [1], "priority has 1 entries for 2 prompts"),
        (None, [1, "a"], "priority must be integers, found 'a'"),
        (None, 3, "priority must be a list of integers, one per prompt, found 3"),
        (None, "12", "priority must be a list of integers, one per prompt, found '12'"),
        (None, [1, 2**70], "priority must be integers from -9223372036854775807 to 9223372036854775807, found 1180591620717411303424"),
    ],
)
def test_bad_params_and_priorities_are_refused_and_leave_nothing(params, priority, message):
    f = front()
    with pytest.raises(ValueError, match=message):
        f.submit([[1], [2]], params, priority)
    assert not f.open and f.router.tokens == [0]


def test_token_ids_of_numpy_are_taken():
    assert front().submit(list_prompts(np.array([1, 2])), None, None)[0].prompt_ids == [1, 2]


def test_stop_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="stop_token_ids has 11; the vocabulary has ids 0 to 9"):
        front().submit([[1]], [SamplingParams(stop_token_ids=[11])], [0])


def test_siblings_finish_together_and_draw_their_own_noise():
    f = front(dp=2)
    adds = f.submit([[1, 2]], [SamplingParams(n=2, seed=7, logprobs=0)], [0])
    assert [a.dp_rank for a in adds] == [0, 1] and adds[0].index != adds[1].index
    assert adds[0].params["seed"] == 7 and adds[1].params["seed"] != 7
    row = [[4, -0.25, 1]]
    first = list(
        f.chunks([Event(request_id=adds[1].request_id, token_ids=[4], text="", logprobs=[row], finish_reason="length", cached_tokens=1)])
    )
    assert first[0].finished and first[0].output is None and first[0].index == 1
    last = list(f.chunks([Event(request_id=adds[0].request_id, token_ids=[4], text="", logprobs=[row], finish_reason="stop")]))
    output = last[0].output
    assert output.finished and [o.finish_reason for o in output.outputs] == ["stop", "length"]
    assert output.outputs[0].cumulative_logprob == -0.25 and output.metrics.cached_tokens == 1 and output.metrics.ttft >= 0
    assert not f.open and f.router.tokens == [0, 0]


def test_a_caller_that_stops_at_the_first_chunk_loses_no_event():
    f = front()
    adds = f.submit([[1], [2]], [SamplingParams()] * 2, [0, 0])
    events = [Event(request_id=add.request_id, token_ids=[4], text="", finish_reason="length") for add in adds]
    assert next(iter(f.chunks(events))).prompt_index == 0
    assert not f.open and f.aborts() == []


def test_events_of_unknown_requests_are_ignored():
    assert list(front().chunks([Event(request_id="gone", token_ids=[1], text="")])) == []


def test_pool_is_what_was_asked_for_or_what_fits():
    def pages(available: int, **changes) -> int:
        return pool_pages(EngineConfig(**changes), max_model_len=1000, bytes_per_token=100, available=available)

    assert pages(0, max_total_tokens=130, page_size=64) == 2
    assert pages(64 * 100 * 8 + 5, page_size=64) == 7  # and the dummy
    assert pages(10**12, page_size=64, max_num_seqs=2) == 32  # 2 requests of 16 pages use no more
    with pytest.raises(ValueError, match="no KV page fits: one page of 64 tokens takes 6400 bytes, as does one for padding, 12799 "):
        pages(12799, page_size=64)
    with pytest.raises(ValueError, match="max_total_tokens 63 is less than one page of 64 tokens"):
        pages(0, max_total_tokens=63, page_size=64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 48}, "page_size 48 is not a power of two from 1 to 256"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, found 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be above 0 and at most 1, found 1.5"),
        ({"max_clock_skew": -1.0}, "max_clock_skew must be 0 seconds or more, found -1.0"),
        ({"max_clock_skew": float("nan")}, "max_clock_skew .* found nan"),
        ({"dist_timeout": 0.0}, "dist_timeout must be above 0 seconds and at most 1000000, found 0.0"),
        ({"dist_timeout": float("nan")}, "dist_timeout .* found nan"),
        ({"dist_timeout": float("inf")}, "dist_timeout .* found inf"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"load_format": "made-up"}, "load_format must be one of auto, safetensors, dummy, found 'made-up'"),
        ({"dtype": "int8"}, "dtype must be one of auto, bfloat16, float16, float32, found 'int8'"),
        ({"moe_a2a_backend": "pigeon"}, "moe_a2a_backend must be one of auto, torch, torch_node, .*, found 'pigeon'"),
    ],
)
def test_senseless_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_config(EngineConfig(**changes))


def test_all_events_of_a_tick_are_folded_before_the_caller_sees_one():
    """A caller that stops at the first chunk must not leave the rest of the tick unseen: the call would never end."""
    f = front()
    adds = f.submit([[1], [2]], SamplingParams(), None)
    next(iter(f.chunks([Event(request_id=a.request_id, token_ids=[4], text="", finish_reason="length") for a in adds])))
    assert not f.open
