from __future__ import annotations

import json
from typing import Any

import pytest

from rorqual.engine.server.parsers import ParserNames, check_tool_choice, make_parser, reasoning_mode, tool_tag
from tests.server.parsers.whole import TOOLS, parse

NAMED = {"type": "function", "function": {"name": "now"}}
V32 = ParserNames(reasoning="deepseek_v32", tools="deepseek_v32")


def accepts(tag: dict[str, Any], text: str) -> bool:
    """Whether xgrammar's matcher takes ``text`` and lets it end there."""
    xgrammar = pytest.importorskip("xgrammar")
    vocabulary = [chr(i) for i in range(128)] + ["｜", "▁", "é", "</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1])
    found = xgrammar.get_model_structural_tag(**tag)
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(info, max_threads=1).compile_structural_tag(found))
    return bool(matcher.accept_string(text)) and bool(matcher.accept_token(len(vocabulary) - 1))


@pytest.mark.parametrize(
    ("names", "prompt", "mode"),
    [(V32, "<think>", "enabled"), (V32, "</think>", "disabled"), (V32, "x", "auto"), (ParserNames(), "<think>", "disabled")],
)
def test_reasoning_mode(names: ParserNames, prompt: str, mode: str) -> None:
    assert reasoning_mode(names, prompt) == mode


D = "｜DSML｜"
NOW = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": f'\n\n<{D}function_calls>\n<{D}invoke name="now">\n</{D}invoke>\n</{D}function_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "glm47": "<tool_call>now</tool_call>",
}


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("name", list(NOW))
def test_a_forced_call_is_what_the_parser_reads(name: str, choice: Any) -> None:
    names = ParserNames(reasoning="deepseek_v32", tools=name)
    tag = tool_tag(names, prompt="</think>", tools=TOOLS, tool_choice=choice)
    assert tag is not None and json.dumps(tag)
    assert accepts(tag, NOW[name])
    assert not accepts(tag, "text")
    assert not accepts(tag, "")
    assert parse(make_parser(names, prompt="</think>", tools=TOOLS, tool_choice=choice), [NOW[name]]).parts() == ("", "", [("now", "{}")])


def test_a_forced_call_has_arguments_of_the_schema() -> None:
    tag = tool_tag(V32, prompt="<think>", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
    assert tag is not None

    def text(value: str, kind: str) -> str:
        parameter = f'<{D}parameter name="days" string="{kind}">{value}</{D}parameter>\n'
        return f'hm</think>\n\n<{D}function_calls>\n<{D}invoke name="weather">\n{parameter}</{D}invoke>\n</{D}function_calls>'

    assert accepts(tag, text("3", "false"))
    assert not accepts(tag, text("x", "false"))
    whole = parse(make_parser(V32, prompt="<think>", tools=TOOLS), [text("3", "false")])
    assert whole.parts() == ("hm", "", [("weather", '{"days": 3}')])


def test_the_model_is_free_where_nothing_is_asked() -> None:
    assert tool_tag(V32) is None
    assert tool_tag(V32, tools=TOOLS) is None
    assert tool_tag(ParserNames(), tools=TOOLS, tool_choice="none") is None
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    tag = tool_tag(V32, prompt="</think>", tools=strict)
    assert tag is not None and [tool["function"]["strict"] for tool in tag["tools"]] == [True, False]
    assert accepts(tag, "no call")
    with pytest.raises(ValueError, match="--tool-call-parser"):
        tool_tag(ParserNames(), tools=TOOLS, tool_choice="required")


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (TOOLS, "any", r"tool_choice must be one of none, auto, required, or name a function, found 'any'"),
        ([], "required", "needs tools"),
        (TOOLS, {"type": "function", "function": {"name": "later"}}, "asks for the function 'later', but tools has weather, now"),
        (TOOLS, {"type": "function", "name": "now"}, "tool_choice must be"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [NAMED]}}, "tool_choice must be"),
        (TOOLS, 3, "tool_choice must be"),
        ([*TOOLS, TOOLS[1]], "auto", "more than one function named now"),
        (TOOLS * 600, "auto", "tools has 1200 functions; at most 1024 are allowed"),
        ([{"type": "function"}], "auto", "tool 0 must be"),
        ([{"type": "custom", "function": {"name": "x"}}], "auto", "tool 0 must be"),
        ([{"type": "function", "function": {"name": 'a">b'}}], "auto", "tool 0: a function's name"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "auto", "must be a JSON schema"),
    ],
)
def test_wrong_tools_and_choices_are_refused(tools: Any, choice: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tool_choice(tools, choice)


def test_choices_that_name_tools() -> None:
    check_tool_choice(TOOLS, NAMED)
    check_tool_choice(TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}})
    tag = tool_tag(
        V32, prompt="</think>", tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    )
    assert tag is not None
    assert accepts(tag, NOW["deepseek_v32"])
    assert not accepts(tag, NOW["deepseek_v32"].replace("now", "weather"))
