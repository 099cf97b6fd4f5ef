"""A streamed response becomes counts and times: what is a token and what is not, whatever way the bytes are split."""

import json
import random

import pytest

from rorqual.launch.bench.serve.events import EventSplitter
from rorqual.launch.bench.serve.outcome import Outcome
from rorqual.launch.bench.serve.stream import StreamSink
from tests.launch.serve.fake_server import DONE, event


def text(words, reason=None, **more):
    return event({"choices": [{"index": 0, "text": words, "finish_reason": reason, **more}]})


def delta(reason=None, **more):
    return event({"choices": [{"index": 0, "delta": more, "finish_reason": reason}]})


def usage(made, prompt=7, **more):
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": made, **more}})


def take(*parts, wanted=3, status=200):
    """The outcome of parts that come at 1, 2, 3, ..., sent at 0."""
    outcome = Outcome(wanted=wanted)
    sink = StreamSink(outcome)
    sink.status = status
    for now, part in enumerate(parts, 1):
        sink.body(part, float(now))
    sink.finish()
    return outcome


def test_tokens_are_those_of_usage_whatever_chunks_hold():
    got = take(text("a b c"), text(" d", "length"), usage(9), DONE)
    assert got.success and (got.output_tokens, got.prompt_tokens) == (9, 7)
    assert got.arrivals == [1, 2] and got.itl == [1] and got.tpot == pytest.approx(1 / 8)
    assert got.chunk_tokens is None and got.spread() == [(1, 4.5), (2, 4.5)]


def test_a_closing_chunk_and_the_start_are_no_tokens():
    got = take(delta(role="assistant", content=""), delta(content="x"), delta(content="y"), delta("stop"), usage(2), DONE)
    assert (got.ttft, got.arrivals, got.itl, got.latency) == (2, [2, 3], [1], 4)
    assert got.tpot == 2 and got.generated_text == "xy"


def test_half_characters_of_the_completions_route_are_tokens_and_the_end_is_none():
    got = take(text(""), text("é"), text("", "stop"), usage(3), DONE)
    assert got.arrivals == [1, 2] and got.latency == 3
    ids = take(text("", token_ids=[5]), text("é", token_ids=[6]), text("", "stop", token_ids=[]), usage(2), DONE)
    assert ids.arrivals == [1, 2] and ids.chunk_tokens == [1, 1] and ids.token_ids == [5, 6]


def test_reasoning_and_tool_calls_are_output():
    call = [{"index": 0, "function": {"arguments": "{"}}]
    got = take(
        delta(role="assistant"), delta(reasoning_content="hm"), delta(tool_calls=call), delta(tool_calls=[]), delta("stop"), usage(2), DONE
    )
    assert got.arrivals == [2, 3] and got.generated_text.startswith("hm[")


def test_usage_on_every_chunk_gives_tokens_of_each():
    def one(words, made, reason=None):
        value = {"index": 0, "text": words, "finish_reason": reason}
        return event({"choices": [value], "usage": {"prompt_tokens": 7, "completion_tokens": made}})

    got = take(one("a", 1), one("bcd", 4), one("", 4, "length"), usage(4), DONE)
    assert got.arrivals == [1, 2] and got.chunk_tokens == [1, 3] and got.output_tokens == 4


def test_one_token_has_no_time_between_tokens():
    got = take(text("a", "length"), usage(1), DONE)
    assert got.tpot is None and got.itl == [] and got.ttft == got.latency == 1


def test_without_usage_ids_count_and_without_ids_the_limit_that_was_reached():
    assert take(text("a", token_ids=[1, 2]), text("b", "stop", token_ids=[3]), DONE).output_tokens == 3
    assert take(text("a b"), text("", "length"), DONE, wanted=5).output_tokens == 5
    got = take(text("a b"), text("", "stop"), DONE)
    assert "how many tokens it made is not known" in got.error


def test_cached_tokens_are_kept():
    assert take(text("a", "length"), usage(1, prompt_tokens_details={"cached_tokens": 6}), DONE).cached_tokens == 6
    assert take(text("a", "length"), usage(1, prompt_tokens_details=None), DONE).cached_tokens == 0


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([text("a"), text("b")], r"without a finish_reason and without \[DONE\]"),
        ([text("a"), usage(1), DONE], "the stream ended without a finish_reason$"),
        ([text("a"), text("", "abort"), usage(1), DONE], 'finish_reason "abort"'),
        ([text("a"), event({"error": {"message": "rank 3 is gone", "code": 500}})], "the server says: rank 3 is gone"),
        ([text("a", token_ids=[1]), text("b", "length", token_ids=[2]), usage(3), DONE], "usage counts 3 output tokens, but 2 token ids"),
        ([text("a"), b"data: {nonsense}\n\n", DONE], "a chunk that is none"),
        ([text("", "length"), usage(4), DONE], "4 tokens are counted, but no chunk brought any"),
        ([b""], "without a finish_reason"),
    ],
)
def test_what_looks_complete_and_is_not_has_failed(parts, message):
    import re

    got = take(*parts)
    assert not got.success and re.search(message, got.error)


def test_errors_of_http_keep_their_message():
    assert take(json.dumps({"error": {"message": "too long"}}).encode(), status=400).error == "HTTP 400: too long"
    assert take(json.dumps({"detail": "nobody"}).encode(), status=401).error == "HTTP 401: nobody"
    assert take(b"<h", b"tml>", status=502).error == "HTTP 502: <html>"
    assert len(take(*[b"x" * 900] * 50, status=500).error) < 1000


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_any_split_of_the_bytes_gives_the_same(newline):
    parts = [
        delta(role="assistant"),
        b": keep-alive\n\n",
        delta(content="héé ☃"),
        b"event: x\nid: 4\n" + delta(content="𝄞"),
        delta("length"),
    ]
    whole = b"".join([*parts, usage(2), DONE]).replace(b"\n", newline)
    draw = random.Random(1)
    for _ in range(200):
        cuts = sorted(draw.sample(range(1, len(whole)), draw.randint(0, 40)))
        pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        got = take(*pieces)
        assert got.success and got.generated_text == "héé ☃𝄞" and got.output_tokens == 2 and len(got.arrivals) == 2


def test_events_of_several_lines_and_without_a_space():
    assert EventSplitter().feed(b"data:a\ndata: b\n\n\n\n:c\n\ndata:  d\n\nrest") == [b"a\nb", b" d"]
