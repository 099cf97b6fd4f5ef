"""The form of a request, in every spelling that clients use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rorqual.engine.grammar.structured import Form, StructuredOutputsParams
from rorqual.engine.server.parsers.names import ParserNames
from rorqual.engine.server.structured.asked import asked_form
from rorqual.engine.server.structured.service import form_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
NAMES = ParserNames(reasoning="deepseek_v32", tools="deepseek_v32")


@pytest.mark.parametrize(("body", "field", "value"), [
    ({"response_format": {"type": "json_object"}}, "json_object", True),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}}, "json", SCHEMA),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ("a", "b")),
    ({"guided_json": SCHEMA}, "json", SCHEMA),
    ({"guided_json": '{"type": "object"}'}, "json", '{"type": "object"}'),
    ({"guided_regex": "a"}, "regex", "a"),
    ({"guided_choice": ["x"]}, "choice", ("x",)),
    ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, "regex", "a"),
])  # fmt: skip
def test_spellings(body, field, value):
    assert getattr(asked_form(body), field) == value


def test_free():
    for body in ({}, {"response_format": {"type": "text"}}, {"response_format": None, "guided_json": None}, {"temperature": 1}):
        assert asked_form(body) is None and form_of(body, NAMES, "") is None


@pytest.mark.parametrize(("body", "message"), [
    ({"response_format": "json"}, "response_format must be"),
    ({"response_format": {"type": "yaml"}}, "response_format must be"),
    ({"response_format": {"type": "json_schema"}}, "under 'schema'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "under 'schema'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "must be a JSON schema"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex and guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "each ask"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "exactly one of"),
    ({"structured_outputs": {"whitespace_pattern": "a", "json": {}}}, "unknown fields"),
    ({"guided_regex": 3}, "must be a text"),
    ({"guided_choice": "abc"}, "list of texts"),
    ({"guided_json": [1]}, "must be JSON"),
])  # fmt: skip
def test_wrong_ones(body, message):
    with pytest.raises(ValueError, match=message):
        asked_form(body)


def test_reasoning_comes_before_the_form():
    body = {"response_format": {"type": "json_object"}}
    assert form_of(body, NAMES, "<|Assistant|><think>").reasoning == "enabled"
    assert form_of(body, NAMES, "<|Assistant|></think>").reasoning == "disabled"
    assert form_of(body, NAMES, "<|Assistant|>").reasoning == "auto"
    assert form_of(body, None, "<think>").reasoning == form_of(body, ParserNames(), "<think>").reasoning == "disabled"


def test_tools():
    assert form_of({"tools": TOOLS}, NAMES, "") is None and form_of({"tools": TOOLS, "tool_choice": "none"}, NAMES, "") is None
    forced = form_of({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, NAMES, "x</think>")
    assert forced.asked is None and forced.tools["tool_choice"] == "required" and forced.tools["parallel_tool_calls"] is False
    either = form_of({"tools": TOOLS, "guided_regex": "a"}, NAMES, "x</think>")
    assert either.asked is not None and either.tools["tool_choice"] == "required"  # the form, or a call
    only = form_of({"tools": TOOLS, "tool_choice": "none", "guided_regex": "a"}, NAMES, "x</think>")
    assert only.asked is not None and only.tools is None
    with pytest.raises(ValueError, match="cannot both be kept"):
        form_of({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, NAMES, "")
    with pytest.raises(ValueError, match="are for chats"):
        form_of({"tools": TOOLS}, None, "")
    with pytest.raises(ValueError, match="tool-call parser"):
        form_of({"tools": TOOLS, "tool_choice": "required"}, ParserNames(), "")


def test_forms_travel():
    for form in (Form(asked=StructuredOutputsParams(choice=["a", "b"])), Form(tools={"model": "x"}, reasoning="auto", begin="<", end=">")):
        assert Form.from_wire(form.to_wire()) == form


def test_http_processes_import_neither_torch_nor_the_library():
    code = "import sys, rorqual.engine.server.structured; print(sorted({'torch', 'numpy', 'xgrammar', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
