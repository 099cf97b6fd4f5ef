"""/v1/completions through the official client."""

import asyncio
from types import SimpleNamespace

import pytest

from rorqual.engine.sampling_params import SamplingParams
from rorqual.engine.server.openai.completions import _params
from rorqual.engine.server.openai.prepare import submits
from rorqual.engine.server.openai.requests import CompletionRequest
from rorqual.engine.text.detokenizer import Detokenizer
from rorqual.engine.text.tokenizer import Tokenizer
from tests.server.fake_engine import TINY

TOKENIZER = Tokenizer.load(TINY)


def ids_of(text):
    return TOKENIZER.encode(text)


def test_whole_answer(served):
    served.engine.cached_tokens = 3
    answer = served.openai().completions.create(model="tiny", prompt="The whale sang", max_tokens=12)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.text == served.engine.expected_text(ids_of("The whale sang"), 12)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert answer.usage.prompt_tokens == len(ids_of("The whale sang")) and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("chunk", [1, 5])
def test_streamed_pieces_add_up_to_the_whole_answer(served, chunk):
    served.engine.chunk = chunk
    client = served.openai()
    whole = client.completions.create(model="tiny", prompt=["a b", "c d e"], n=2, max_tokens=17)
    texts, reasons, usages = {}, {}, []
    for event in client.completions.create(
        model="tiny", prompt=["a b", "c d e"], n=2, max_tokens=17, stream=True, stream_options={"include_usage": True}
    ):
        usages.append(event.usage)
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == {c.index: c.text for c in whole.choices} and set(texts) == {0, 1, 2, 3}
    assert reasons == dict.fromkeys(range(4), "length")
    assert usages[:-1] == [None] * (len(usages) - 1) and usages[-1] == whole.usage
    assert whole.usage.completion_tokens == 4 * 17


def test_prompts_as_ids(served):
    client = served.openai()
    one = client.completions.create(model="tiny", prompt=[10, 11, 12], max_tokens=4)
    assert one.choices[0].text == served.engine.expected_text([10, 11, 12], 4)
    two = client.completions.create(model="tiny", prompt=[[10, 11, 12], [13]], max_tokens=4)
    assert [c.text for c in two.choices] == [served.engine.expected_text(p, 4) for p in ([10, 11, 12], [13])]
    assert two.usage.prompt_tokens == 4


def test_the_prompt_is_read_once_for_all_its_completions(served, monkeypatch):
    tokenizer, prompt = served.process.state.texts.tokenizer, [10, 11, 12] * 20
    asked = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 1, "n": 16}
    calls, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **how: calls.append(len(ids)) or decode(ids, **how))
    with served.http() as client:
        whole = client.post("/v1/completions", json=asked)
        assert whole.status_code == 200 and 1 <= calls.count(len(prompt)) <= 3, calls
        offsets = [choice["logprobs"]["text_offset"] for choice in whole.json()["choices"]]
        assert len(offsets) == 16 and all(found[: len(prompt)] == offsets[0][: len(prompt)] for found in offsets)
        calls.clear()
        stream = client.post("/v1/completions", json={**asked, "stream": True})
        assert stream.status_code == 200 and stream.content.endswith(b"[DONE]\n\n") and 1 <= calls.count(len(prompt)) <= 3, calls


def test_parameters_are_read_once_for_all_prompts():
    """Those of a request with many prompts and many biases took seconds."""
    asked = CompletionRequest(prompt="x", logit_bias={str(token): 1.0 for token in range(1024)})
    job = SimpleNamespace(request=asked, prompts=[[1] * n for n in range(1, 101)], made=1, n=1, top=None)
    params = _params(SimpleNamespace(defaults={}), SimpleNamespace(max_model_len=110), job)
    assert [param.max_tokens for param in params] == [min(16, 110 - n) for n in range(1, 101)]
    assert len({id(param) for param in params}) == 7  # 16 tokens of room, and 15 to 10
    messages = asyncio.run(submits("x", job.prompts, params, SimpleNamespace(vocab_size=2000), priority=0, grammar=None, dp_rank=None))
    assert [message.params for message in messages] == [param.to_wire() for param in params]


def test_every_parameter_reaches_the_engine(served):
    served.openai().completions.create(
        model="other", prompt="x", max_tokens=9, n=2, temperature=0.5, top_p=0.9, seed=-7, stop=["zz", "yy"], presence_penalty=0.25,
        frequency_penalty=-0.5, logprobs=3, user="me",
        extra_body={"top_k": 40, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5, 6],
                    "skip_special_tokens": False, "include_stop_str_in_output": True, "priority": -3, "no_such_field": {"a": 1}},
        extra_headers={"X-data-parallel-rank": "0", "X-Request-Id": "mine"},
    )  # fmt: skip
    (submit,) = served.engine.submits
    assert submit.params == {
        "max_tokens": 9, "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": -7 & (2**63 - 1), "stop": ["zz", "yy"],
        "presence_penalty": 0.25, "frequency_penalty": -0.5, "logprobs": 3, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.5,
        "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5, 6], "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    assert (submit.priority, submit.dp_rank, submit.request_id, submit.grammar) == (-3, 0, "cmpl-mine", None)
    assert submit.at > 0


def test_defaults_are_vllms(served):
    served.openai().completions.create(model="tiny", prompt="x")
    assert served.engine.submits[0].params == {}  # 16 tokens, temperature 1


def starts_of(ids, *, skip=True):
    """Characters that are complete before each token."""
    stream, found, length = Detokenizer(TOKENIZER, SamplingParams(skip_special_tokens=skip), eos_ids=()), [], 0
    for token in ids:
        found.append(length)
        length += len(stream.push(token).text)
    return found


@pytest.mark.parametrize("prompt", ["Héllo 日", "<|User|>Hi<|Assistant|>", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_point_into_the_text(served, prompt, stream):
    """Tokens that the text does not show, such as the begin token, take no room; those of one character begin together."""
    ids = ids_of(prompt)
    given = ids if prompt == "ids" else prompt
    more = {"max_tokens": 6, "logprobs": 0, "echo": True, "stream": stream}
    made = served.openai().completions.create(model="tiny", prompt=given, **more)
    choices = [event.choices[0] for event in made] if stream else [made.choices[0]]
    text = "".join(choice.text for choice in choices)
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    assert len(offsets) == len(ids) + 6 and offsets == sorted(offsets) and offsets[0] == 0
    for place, token in enumerate(ids):
        spelled = TOKENIZER.token_bytes(token).decode("utf-8", "replace")
        if "\ufffd" not in spelled and token != TOKENIZER.bos_id:
            assert text[offsets[place] :].startswith(spelled)
    shown = "ids" if prompt == "ids" else prompt
    assert text.startswith(shown) and offsets[len(ids)] == len(shown)
    assert [o - len(shown) for o in offsets[len(ids) :]] == starts_of(served.engine.expected_ids(ids, 6))


def test_logprobs(served):
    answer = served.openai().completions.create(model="tiny", prompt="x", max_tokens=5, logprobs=2)
    found = answer.choices[0].logprobs
    ids = served.engine.expected_ids(ids_of("x"), 5)
    assert found.tokens == [TOKENIZER.token_bytes(t).decode("utf-8", "replace") for t in ids]
    assert found.token_logprobs == [-0.25, -0.5, -0.75, -1.0, -0.25]
    assert all(len(top) == 2 for top in found.top_logprobs)
    assert found.text_offset == starts_of(ids)
    streamed = [], [], []
    for event in served.openai().completions.create(model="tiny", prompt="x", max_tokens=5, logprobs=2, stream=True):
        for into, more in zip(
            streamed,
            (event.choices[0].logprobs.tokens, event.choices[0].logprobs.token_logprobs, event.choices[0].logprobs.text_offset),
            strict=True,
        ):
            into.extend(more)
    assert streamed == (found.tokens, found.token_logprobs, found.text_offset)


def test_logprobs_of_zero_name_only_the_token(served):
    answer = served.openai().completions.create(model="tiny", prompt="x", max_tokens=2, logprobs=0)
    assert [len(top) for top in answer.choices[0].logprobs.top_logprobs] == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_echo(served, stream):
    prompt = "The whale sang"
    made = served.openai().completions.create(model="tiny", prompt=prompt, max_tokens=4, echo=True, logprobs=1, stream=stream)
    if stream:
        events = list(made)
        text = "".join(e.choices[0].text for e in events)
        tokens = [t for e in events for t in e.choices[0].logprobs.tokens]
        values = [v for e in events for v in e.choices[0].logprobs.token_logprobs]
    else:
        text, tokens, values = made.choices[0].text, made.choices[0].logprobs.tokens, made.choices[0].logprobs.token_logprobs
    ids = ids_of(prompt)
    assert text == prompt + served.engine.expected_text(ids, 4)
    assert len(tokens) == len(ids) + 4 and values[0] is None and None not in values[1:]
    assert tokens[0] == "<|begin|>" and "".join(tokens[1:]) == text


def test_echo_of_nothing_but_the_prompt(served):
    answer = served.openai().completions.create(model="tiny", prompt="The whale", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "The whale" and answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == len(ids_of("The whale"))


def test_stop_strings(served):
    ids = ids_of("x")
    text = served.engine.expected_text(ids, 12)
    stop = text[9:12]
    answer = served.openai().completions.create(model="tiny", prompt="x", max_tokens=12, stop=stop)
    (choice,) = answer.choices
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop" and choice.stop_reason == stop


def test_best_of_returns_the_likeliest(served):
    # the fake engine's log-probabilities rise and fall with the position: a short completion has a better mean
    served.engine.script = lambda submit, index: [20, 21, 22][: 3 - index]
    answer = served.openai().completions.create(
        model="tiny", prompt="x", best_of=3, n=1, max_tokens=8, extra_body={"return_token_ids": True}
    )
    assert [c.token_ids for c in answer.choices] == [[20]]
    assert served.engine.submits[0].params["n"] == 3
    assert answer.usage.completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_when_asked_for(served, stream):
    body = {"model": "tiny", "prompt": [10, 11], "max_tokens": 6, "return_token_ids": True, "stream": stream}
    with served.http() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    if not stream:
        choice = answer.json()["choices"][0]
        assert choice["token_ids"] == served.engine.expected_ids([10, 11], 6) and choice["prompt_token_ids"] == [10, 11]
        return
    import json

    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == served.engine.expected_ids([10, 11], 6)
    assert events[0]["choices"][0]["prompt_token_ids"] == [10, 11] and "prompt_token_ids" not in events[1]["choices"][0]


def test_continuous_usage(served):
    events = list(
        served.openai().completions.create(
            model="tiny", prompt="x", max_tokens=3, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
    )
    assert [e.usage.completion_tokens for e in events] == [1, 2, 3, 3]


def test_prompt_logprobs_as_vllm_gives_them(served):
    with served.http() as client:
        answer = client.post("/v1/completions", json={"prompt": [10, 11, 12], "max_tokens": 1, "prompt_logprobs": 1})
    found = answer.json()["choices"][0]["prompt_logprobs"]
    assert found[0] is None and found[1]["11"]["rank"] == 1 and len(found) == 3


def test_truncated_prompts(served):
    with served.http() as client:
        client.post("/v1/completions", json={"prompt": [10, 11, 12], "max_tokens": 1, "truncate_prompt_tokens": 2}).raise_for_status()
        client.post(
            "/v1/completions", json={"prompt": list(range(10, 60)) * 200, "max_tokens": 2, "truncate_prompt_tokens": -1}
        ).raise_for_status()
    assert served.engine.submits[0].prompt == b"\x0b\0\0\0\x0c\0\0\0"
    assert len(served.engine.submits[1].prompt) == 4 * (8192 - 2)


def test_an_empty_stream_of_text_still_ends(served):
    """Special tokens only: no text at all, but a finish reason."""
    served.engine.script = lambda submit, index: [3, 4, 1]
    events = list(served.openai().completions.create(model="tiny", prompt="x", max_tokens=5, stream=True))
    assert "".join(e.choices[0].text for e in events) == "" and events[-1].choices[0].finish_reason == "stop"
