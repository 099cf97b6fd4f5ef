"""What the server refuses, and how it says so."""

import pytest

from rorqual.engine.serving import wire

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def refused(served, path, body, status=400, **more):
    with served.http() as client:
        answer = client.post(path, json=body, **more) if not isinstance(body, bytes) else client.post(path, content=body, **more)
    assert answer.status_code == status, answer.text[:500]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert len(answer.content) < 3000
    return error, answer


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n", "1"),
        (COMPLETIONS, {"prompt": "x", "n": 10**9}, "n", "1024"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 10**6}, "logprobs", "64"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature", "0"),
        (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "temperature", "str"),
        (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p", "0"),
        (COMPLETIONS, {"prompt": "x", "min_tokens": 20, "max_tokens": 4}, "min_tokens", "4"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": [1, "x"]}, "prompt", "mixes"),
        (COMPLETIONS, {"prompt": [4096]}, "prompt", "4095"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "-1"),
        (COMPLETIONS, {"prompt": [2**40]}, "prompt", "4095"),
        (COMPLETIONS, {"prompt": [10, -(2**63)], "echo": True}, "prompt", "4095"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "object"),
        (COMPLETIONS, {}, None, "prompt"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens", "echo"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 8192}, "max_tokens", "8192"),
        (COMPLETIONS, {"prompt": [9] * 8192}, "prompt", "8192"),
        (COMPLETIONS, {"prompt": "x" * 3_000_000}, None, "8192"),
        (COMPLETIONS, {"prompt": "x", "best_of": 2, "n": 3}, "best_of", "n"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3, "stream": True}, "best_of", "stream"),
        (COMPLETIONS, {"prompt": "x", "suffix": "end"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "x", "use_beam_search": True}, "use_beam_search", "not supported"),
        (COMPLETIONS, {"prompt": "x", "cache_salt": "a"}, "cache_salt", "not supported"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop", "empty"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 1000}, "stop", "64"),
        (COMPLETIONS, {"prompt": "x", "stop": "a" * 5000}, "stop", "1024"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [5000]}, "stop_token_ids", "4095"),
        (COMPLETIONS, {"prompt": ["x"] * 600, "n": 2}, "n", "1024"),
        (COMPLETIONS, {"prompt": "x", "request_id": "a b"}, "request_id", "match"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", ""),
        (CHAT, {"messages": []}, "messages", "1"),
        (CHAT, {"messages": "hi"}, "messages", "str"),
        (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages", "wizard"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages", "image_url"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "logprobs"),
        (CHAT, {"messages": HI, "functions": [{"name": "f"}]}, "functions", "not supported"),
        (CHAT, {"messages": HI, "modalities": ["text", "audio"]}, "modalities", "not supported"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, "tool_choice", "tools"),
        (CHAT, {"messages": HI, "chat_template": "{{ 7*7 }}"}, "chat_template", "--chat-template"),
        (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "messages", "tool 0"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(served, path, body, param, words):
    error, _ = refused(served, path, body)
    assert error["type"] == "invalid_request_error" and words in error["message"]
    if param is not None:
        assert error["param"] == param
    assert not served.engine.submits


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"17",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt":' * 5000,
        b"\0" * 100,
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/abort"])
def test_bodies_that_are_no_request(served, path, body):
    refused(served, path, body, headers={"content-type": "application/json"})


def test_other_content_types(served):
    """A page in a browser can post a form to this machine without asking; such requests must not do anything."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None):
        headers = {} if kind is None else {"content-type": kind}
        error, _ = refused(served, COMPLETIONS, b'{"prompt": "x"}', 415, headers=headers)
        assert "application/json" in error["message"]
    with served.http() as client:
        assert (
            client.post(
                COMPLETIONS, content=b'{"prompt":"x","max_tokens":1}', headers={"content-type": "Application/JSON; charset=utf-8"}
            ).status_code
            == 200
        )


def test_unknown_models_paths_and_methods(served):
    error, _ = refused(served, COMPLETIONS, {"prompt": "x", "model": "gpt-9"}, 404)
    assert error["code"] == "model_not_found" and "tiny" in error["message"]
    refused(served, "/v1/nothing", {}, 404)
    refused(served, "/health", {}, 405)
    with served.http() as client:
        assert client.get("/v1/models/nobody").status_code == 404


def test_headers_out_of_range(served):
    for value in ("1", "-1", "x", "9" * 400):
        error, _ = refused(served, COMPLETIONS, {"prompt": "x"}, headers={"X-data-parallel-rank": value})
        assert "0 to 0" in error["message"]
    refused(served, COMPLETIONS, {"prompt": "x"}, headers={"X-Request-Id": "a" * 500})


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_keeps_its_status(served, stream):
    served.engine.refuse = lambda s: wire.Refused(request_id=s.request_id, status=429, error="4 requests wait", retry_after_s=7.2)
    error, answer = refused(served, COMPLETIONS, {"prompt": ["x", "y"], "stream": stream}, 429)
    assert answer.headers["retry-after"] == "7" and error["code"] == "rate_limit_exceeded" and "4 requests wait" in error["message"]


def test_one_refused_prompt_ends_its_siblings(served):
    served.engine.delay = 30
    served.engine.refuse = lambda s: wire.Refused(request_id=s.request_id, status=400, error="no") if s.request_id.endswith("-1") else None
    refused(served, COMPLETIONS, {"prompt": ["x", "y", "z"]}, 400)
    served.engine.wait(lambda: len(served.engine.aborts) == 1, "the abort")
    assert [name[-2:] for name in served.engine.aborts[0].request_ids] == ["-0", "-2"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_failures_of_the_engine(served, path):
    served.engine.fail_after = 2
    body = {"messages": HI, "max_tokens": 9} if path == CHAT else {"prompt": "x", "max_tokens": 9}
    error, _ = refused(served, path, body, 500)
    assert error["type"] == "server_error" and "told to fail" in error["message"]
    served.engine.delay = 0.05
    with served.http() as client:
        answer = client.post(path, json={**body, "stream": True})
    events = [line for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200 and '"error"' in events[-2] and events[-1] == "data: [DONE]"


def test_a_request_id_in_use(served):
    served.engine.delay = 0.2
    import threading

    results = []

    def ask():
        with served.http() as client:
            results.append(client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 3, "request_id": "same"}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(results) == [200, 409]
