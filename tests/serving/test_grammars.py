"""Structured output of a serving engine: grammars that come by name or as text, on two replicas, and those that do not fit."""

from __future__ import annotations

import json
import signal

import pytest

from rorqual.engine.grammar.compiler import Compiler
from rorqual.engine.grammar.names import Namer
from rorqual.engine.grammar.structured import Form, StructuredOutputsParams
from rorqual.engine.serving.wire import Grammar
from rorqual.engine.text.tokenizer import Tokenizer
from tests.server.structured.folder import FOLDER
from tests.serving.client import RawClient
from tests.serving.ranks import costless, good_ends

pytest.importorskip("xgrammar")

VOCAB = 4096
FORMS = [
    {"json": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}, "disable_any_whitespace": True},
    {"regex": "[a-f]{4}"},
    {"choice": ["yes", "no"]},
]


def kept(form: dict, text: str) -> bool:
    if "json" in form:
        return json.loads(text)["ok"] in (True, False)
    return text in form.get("choice", ()) or (len(text) == 4 and not set(text) - set("abcdef"))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    compiler = Compiler(Tokenizer.load(FOLDER), VOCAB, (1,))
    return [compiler.compile(Form(asked=StructuredOutputsParams(**form))) for form in FORMS]


def send(client: RawClient, grammar: str, **more) -> str:
    from tests.serving.client import Completion

    name = client.new_name()
    for index in range(more.get("n", 1)):
        client.open[name, index] = Completion()
    dp_rank = more.pop("dp_rank", None)
    return client.submit_raw([3, 4, 5 + len(name)], {"max_tokens": 40, **more}, name=name, grammar=grammar, dp_rank=dp_rank)


def sender(client: RawClient, text: str):
    """Sends a grammar under the name that it is called with."""
    return lambda name: client.send(Grammar(name=name, text=text))


def test_two_replicas_keep_forms_by_name_and_by_text(texts):
    with costless(2, dp=2, tokenizer=FOLDER, timeout=150.0) as engine:
        with RawClient(engine.address, timeout=100.0) as client:
            namer, asked = Namer(), {}
            for i in range(24):
                text = texts[i % 3]
                name = namer.name(text, sender(client, text))
                asked[send(client, text if i % 5 == 4 else name, dp_rank=i % 2, n=1 + i % 2)] = FORMS[i % 3]
            free = client.submit([3, 4], max_tokens=30, ignore_eos=True)
            unknown, broken = send(client, "0" * 64), send(client, '{"a": 1}')
            gone = send(client, name, ignore_eos=True)
            client.abort(gone)
            client.finish()
            for (request, _), one in client.done.items():
                if request in asked:
                    assert one.finish_reason == "stop" and kept(asked[request], one.text), one
            assert len(client.done) == 24 + 12 + 2 and len(client.done[free, 0].token_ids) == 30
            assert {one.dp_rank for one in client.done.values()} == {0, 1}
            assert sorted(client.refused) == sorted([unknown, broken])
            assert all(r.status == 400 and "compiled grammar" in r.error for r in client.refused.values())
        engine.signal(signal.SIGTERM)
    good_ends(engine)
