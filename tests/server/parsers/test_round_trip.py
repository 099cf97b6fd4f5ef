"""What the model is shown of its own turns is what it wrote: rendering and parsing are inverse for DeepSeek-V3.2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.engine.server.parsers import choose_parsers, make_parser
from rorqual.engine.text.chat import ChatRenderer
from tests.server.parsers.whole import parse

EOS = "<｜end▁of▁sentence｜>"
NAMES = choose_parsers("deepseek_v32")
CHAT = ChatRenderer(Path("nowhere"), model_type="deepseek_v32")
USER = {"role": "user", "content": "Go"}
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")) | st.sampled_from('\n\t <>"\\{}｜日'), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
NAME = st.text("abcXYZ_019-", min_size=1, max_size=12)
CALLS = st.lists(st.tuples(NAME, st.dictionaries(NAME, JSON, max_size=4)), max_size=3)


def schema(values: dict[str, Any]) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return {"type": "object", "properties": {name: {"type": kinds[type(value)]} for name, value in values.items()}}


@given(reasoning=TEXT, content=TEXT, calls=CALLS, thinking=st.booleans(), typed=st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_turn_comes_back_as_it_was(
    reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], thinking: bool, typed: bool
) -> None:
    content = content.rstrip() if calls else content
    reasoning = reasoning if thinking else ""
    if not content and not calls and not reasoning:
        return
    described = {name: schema(values) if typed else {"type": "object"} for name, values in calls}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name, parameters in described.items()]
    turn: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    if calls:
        turn["tool_calls"] = [{"function": {"name": name, "arguments": json.dumps(values)}} for name, values in calls]
    if thinking and not reasoning and not calls:
        return  # refused: a turn of a thinking model has reasoning
    more = {"tools": tools, "template_args": {"thinking": thinking}}
    prompt = CHAT.render([USER], **more)
    rendered = CHAT.render([USER, turn], add_generation_prompt=False, **more)
    assert rendered.startswith(prompt) and rendered.endswith(EOS)
    written = rendered[len(prompt) : -len(EOS)]
    whole = parse(make_parser(NAMES, prompt=prompt, tools=tools), list(written))
    assert (whole.reasoning, whole.content) == (reasoning, content)
    # one tool may be called with different arguments: the schema is of the last call, and only types may then differ
    assert [name for name, _ in whole.calls] == [name for name, _ in calls]
    if len(described) == len(calls):
        assert [json.loads(arguments) for _, arguments in whole.calls] == [values for _, values in calls]


def test_a_tool_loop_only_adds_to_the_prompt() -> None:
    """The next prompt begins with the last one and what the model wrote: its keys and values can be used again."""
    tools = [{"type": "function", "function": {"name": "find", "parameters": schema({"what": "", "depth": 1})}}]
    more: dict[str, Any] = {"tools": tools, "template_args": {"thinking": True}}
    talk: list[dict[str, Any]] = [{"role": "system", "content": "S"}, USER]
    written = (
        "Let me look.\n</think>I look.\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="find">\n<｜DSML｜parameter name="what" string="true">a "b"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="depth" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    )
    for _ in range(3):
        prompt = CHAT.render(talk, **more)
        whole = parse(make_parser(NAMES, prompt=prompt, tools=tools), [written])
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, (name, arguments) in zip(whole.ids, whole.calls, strict=True)
        ]
        talk.append({"role": "assistant", "content": whole.content, "reasoning_content": whole.reasoning, "tool_calls": calls})
        talk.append({"role": "tool", "tool_call_id": whole.ids[0], "content": "found"})
        assert CHAT.render(talk, **more).startswith(prompt + written + EOS)
