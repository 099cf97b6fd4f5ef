"""Structured output through HTTP and the official client: a real engine loop behind it, whose model is arithmetic."""

from __future__ import annotations

import json
import re
import signal
from contextlib import nullcontext

import pytest

from tests.server.serving import serving, wait_ready
from tests.server.structured.folder import FOLDER
from tests.serving.ranks import costless, good_ends

pytest.importorskip("xgrammar")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
}
TALK = [{"role": "user", "content": "What is your name?"}]
FORM = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
POWERS = "((((a{1,100}){1,100}){1,100}){1,100}){1,100}((((b{1,100}){1,100}){1,100}){1,100}){1,100}"


@pytest.fixture(scope="module")
def server():
    with costless(tokenizer=FOLDER, timeout=200.0) as engine:
        with serving(nullcontext(engine), wait=False, structured_compile_timeout=2.0) as served:
            wait_ready(served.url, 90.0)
            served.openai().with_options(timeout=120).completions.create(model="costless", prompt="a", extra_body={"guided_regex": "a"})
            yield served
        engine.signal(signal.SIGTERM)
    good_ends(engine)


@pytest.fixture(scope="module")
def client(server):
    return server.openai().with_options(timeout=120)


def chat(client, **more):
    return client.chat.completions.create(model=client.models.list().data[0].id, messages=TALK, max_tokens=400, **more)


def test_chats_keep_a_schema_whole_and_streamed(client):
    answer = chat(client, response_format=FORM, n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "stop" and set(json.loads(choice.message.content)) == {"name", "ok"}
    pieces, reason = "", None
    for chunk in chat(client, response_format=FORM, stream=True):
        for choice in chunk.choices:
            pieces += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert reason == "stop" and pieces == answer.choices[0].message.content


def test_every_spelling_keeps_its_form(client):
    model = client.models.list().data[0].id
    for body, form in (
        ({"structured_outputs": {"regex": "[a-f]{3}"}}, "[a-f]{3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'root ::= "<" [0-9] [0-9] ">"'}, "<[0-9]{2}>"),
        ({"guided_json": {"type": "integer", "minimum": 10, "maximum": 99}}, "[1-9][0-9]"),
    ):
        choice = client.completions.create(model=model, prompt="Emma", max_tokens=60, extra_body=body).choices[0]
        assert choice.finish_reason == "stop" and re.fullmatch(form, choice.text), (body, choice)


@pytest.mark.parametrize(("body", "message"), [
    ({"guided_regex": "a("}, "parenthesis"),
    ({"guided_regex": POWERS}, "longer than 2 s"),
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"guided_grammar": "no"}, "EBNF"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "each ask for a form"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"guided_choice": []}, "list of texts"),
    ({"guided_json": {"const": 10**30}}, "beyond 64 bits"),
    ({"guided_choice": ["x" * 2_000_000]}, "characters as JSON"),
])  # fmt: skip
def test_wrong_and_hostile_forms_are_400s_with_the_reason(server, client, body, message):
    with server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "Emma", "max_tokens": 3, **body}, timeout=60)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert re.search(message, error["message"]) and error["type"] and len(error["message"]) < 1000
        assert http.get("/health").status_code == 200
