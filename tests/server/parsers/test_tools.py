from __future__ import annotations

import json
from typing import Any

import pytest

from rorqual.engine.server.parsers import ParserNames, make_parser
from tests.server.parsers.whole import TOOLS, parse, parse_text

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
D = "｜DSML｜"


def invoke(name: str, *parameters: tuple[str, str, str]) -> str:
    lines = "".join(f'<{D}parameter name="{n}" string="{s}">{v}</{D}parameter>\n' for n, s, v in parameters)
    return f'<{D}invoke name="{name}">\n{lines}</{D}invoke>\n'


def dsml(*invokes: str) -> str:
    return f"\n\n<{D}function_calls>\n{''.join(invokes)}</{D}function_calls>"


def kimi(*calls: tuple[str, str]) -> str:
    inner = "".join(f"<|tool_call_begin|>{i}<|tool_call_argument_begin|>{a}<|tool_call_end|>" for i, a in calls)
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def glm(name: str, *pairs: tuple[str, str], gap: str = "") -> str:
    inner = "".join(f"<arg_key>{k}</arg_key>{gap}<arg_value>{v}</arg_value>{gap}" for k, v in pairs)
    return f"<tool_call>{name}{gap}{inner}</tool_call>"


ROME = '{"city": "Rome", "days": 3}'
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    # DeepSeek V3, R1
    ("deepseek_v3", f"{BEGIN}{CALL}function{SEP}weather\n```json\n{ROME}\n```{CALL_END}{END}", "", [("weather", ROME)]),
    (
        "deepseek_v3",
        f"Wait. {BEGIN}{CALL}function{SEP}weather\n```json\n{ROME}\n```{CALL_END}\n"
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{END}",
        "Wait.",
        [("weather", ROME), ("now", "{}")],
    ),
    ("deepseek_v3", f"{CALL}function{SEP}weather\n{ROME}\n{CALL_END}", "", [("weather", ROME)]),  # neither section nor fence
    (
        "deepseek_v3",
        f'{BEGIN}{CALL}function{SEP}weather\n```json\n{{"city": "a```b\\n"}}\n```\n{CALL_END}',
        "",
        [("weather", '{"city": "a```b\\n"}')],
    ),
    ("deepseek_v3", f"{BEGIN}{CALL}function{SEP}now\n```json\n```{CALL_END}{END}", "", [("now", "{}")]),
    # DeepSeek V3.1
    ("deepseek_v31", f"{BEGIN}{CALL}weather{SEP}{ROME}{CALL_END}{END}", "", [("weather", ROME)]),
    (
        "deepseek_v31",
        f"ok{BEGIN}{CALL}weather{SEP}{ROME}{CALL_END}{CALL}now{SEP}{{}}{CALL_END}{END}",
        "ok",
        [("weather", ROME), ("now", "{}")],
    ),
    ("deepseek_v31", f"{BEGIN}{CALL}now{SEP}{CALL_END}{END}", "", [("now", "{}")]),
    ("deepseek_v31", f"{BEGIN}{CALL}now{CALL_END}{END}", "", [("now", "{}")]),
    ("deepseek_v31", f"{BEGIN}{CALL}function{SEP}{{}}{CALL_END}{END}", "", [("function", "{}")]),
    ("deepseek_v31", f"{BEGIN}{CALL}weather{SEP}{ROME}{END} more", "more", [("weather", ROME)]),  # the end of the call is missing
    # DeepSeek V3.2
    ("deepseek_v32", dsml(invoke("weather", ("city", "true", "Rome"), ("days", "false", "3"))), "", [("weather", ROME)]),
    ("deepseek_v32", "Let me see." + dsml(invoke("now"), invoke("now")), "Let me see.", [("now", "{}"), ("now", "{}")]),
    (
        "deepseek_v32",
        dsml(invoke("weather", ("city", "true", 'a "b"\n</x>\\ é'))),
        "",
        [("weather", json.dumps({"city": 'a "b"\n</x>\\ é'}, ensure_ascii=False))],
    ),
    ("deepseek_v32", dsml(invoke("weather", ("city", "true", ""))), "", [("weather", '{"city": ""}')]),
    ("deepseek_v32", dsml(invoke("weather", ("tags", "false", '[1, {"a": "]"}]'))), "", [("weather", '{"tags": [1, {"a": "]"}]}')]),
    ("deepseek_v32", dsml(invoke("weather", ("days", "false", "\n3 \n"))), "", [("weather", '{"days": 3}')]),
    ("deepseek_v32", dsml(invoke("other", ("x", "false", "True"), ("y", "false", ""))), "", [("other", '{"x": "True", "y": ""}')]),
    # the tag contradicts the schema: the value tells
    ("deepseek_v32", dsml(invoke("weather", ("city", "false", "Rome"), ("days", "true", "3"))), "", [("weather", ROME)]),
    ("deepseek_v32", dsml(invoke("weather", ("days", "true", "three"))), "", [("weather", '{"days": "three"}')]),
    ("deepseek_v32", dsml(f'<{D}invoke name="weather">\n{ROME}\n</{D}invoke>'), "", [("weather", ROME + "\n")]),
    ("deepseek_v32", invoke("now"), "", [("now", "{}")]),  # without its section
    ("deepseek_v32", f"a <{D} b</{D}invoke", f"a <{D} b</{D}invoke", []),
    # Kimi K2
    ("kimi_k2", "Hm " + kimi(("functions.weather:0", ROME), ("functions.now:1", "{}")), "Hm", [("weather", ROME), ("now", "{}")]),
    ("kimi_k2", kimi((" now ", " {} ")), "", [("now", "{}")]),
    ("kimi_k2", kimi(("functions.a:b:7", "{}")), "", [("a:b", "{}")]),
    # GLM
    ("glm47", glm("weather", ("city", "Rome"), ("days", "3")), "", [("weather", ROME)]),
    ("glm47", "ok\n" + glm("weather", ("city", "3"), gap="\n") + "\n" + glm("now"), "ok", [("weather", '{"city": "3"}'), ("now", "{}")]),
    (
        "glm47",
        glm("other", ("a", "x y"), ("b", "1"), ("c", "NaN"), ("d", "[1]")),
        "",
        [("other", '{"a": "x y", "b": 1, "c": "NaN", "d": [1]}')],
    ),
    ("glm47", glm("weather", ("days", "soon")), "", [("weather", '{"days": "soon"}')]),
]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found(name: str, text: str, content: str, calls: list[tuple[str, str]], split: bool) -> None:
    whole = parse_text(None, name, text, split=split)
    assert whole.parts() == ("", content, calls)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31", "deepseek_v32", "kimi_k2", "glm47"])
def test_text_without_calls_stays_as_it_is(name: str, split: bool) -> None:
    text = "\n a < b, <｜x｜> <tool <|tool_call| </｜DSML｜ \n\n"
    assert parse_text(None, name, text, split=split).parts() == ("", text, [])


BROKEN = [
    ("deepseek_v32", dsml(f'<{D}invoke name="weather">\n<parameter name="days">3</{D}parameter>\n</{D}invoke>\n')),
    ("deepseek_v32", dsml(f'<{D}invoke name="weather">\n<{D}parameter name="days">3</{D}parameter>\n</{D}invoke>\n')),
    ("deepseek_v32", dsml(invoke("weather", ("city", "true", "Rome")).replace(f"</{D}invoke>", f"oops</{D}invoke>"))),
    ("deepseek_v32", dsml(f'<{D}invoke name="weather">"city": "Rome"}}</{D}invoke>')),  # would be JSON with a brace before it
    ("glm47", "<tool_call>weather<arg_key>city</arg_key>Rome</tool_call>"),
    ("glm47", "<tool_call>weather<arg_key>city</arg_key><arg_value>a</arg_value>b</tool_call>"),
]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_a_malformed_call_cannot_be_run(name: str, text: str, split: bool) -> None:
    whole = parse_text(None, name, text + " more", split=split)
    assert [call[0] for call in whole.calls] == ["weather"]
    assert whole.content == "more"
    with pytest.raises(ValueError):
        json.loads(whole.calls[0][1])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek_v32", dsml(invoke("weather", ("city", "true", "Rome"), ("days", "true", "3")))),
        ("deepseek_v3", f"{BEGIN}{CALL}function{SEP}weather\n```json\n{ROME}\n```{CALL_END}{END}"),
        ("deepseek_v31", f"{BEGIN}{CALL}weather{SEP}{ROME}{CALL_END}{END}"),
        ("kimi_k2", kimi(("functions.weather:0", ROME))),
        ("glm47", glm("weather", ("city", "Rome"), ("days", "3"))),
    ],
)
def test_a_completion_may_end_anywhere(name: str, text: str) -> None:
    for end in range(len(text) + 1):
        at_once, split = parse_text(None, name, text[:end]), parse_text(None, name, text[:end], split=True)
        assert at_once == split
        if at_once.calls:
            arguments = at_once.calls[0][1]
            assert at_once.calls[0][0] == "weather" and (ROME.startswith(arguments) or arguments == '{"city": "Rome", "days": "')
            assert arguments != "{}"


def test_arguments_are_streamed() -> None:
    parser = make_parser(ParserNames(tools="deepseek_v32"), tools=TOOLS)
    assert parser.needs_special_tokens
    assert not parser.push(f'\n\n<{D}function_calls>\n<{D}invoke name="wea')
    (call,) = parser.push('ther">').tool_calls
    assert (call.index, call.name, call.arguments) == (0, "weather", "") and call.id is not None
    (part,) = parser.push(f'<{D}parameter name="city" string="true">Ro').tool_calls
    assert part.id is None and part.name is None and part.arguments == '{"city": "Ro'
    assert parser.push("me<").tool_calls[0].arguments == "me"
    assert parser.push(f"/{D}parameter></{D}invoke>").tool_calls[0].arguments == '<"}'.replace("<", "")
    assert parser.calls == 1


def test_ids_of_kimi_are_its_own() -> None:
    whole = parse_text(None, "kimi_k2", kimi(("functions.weather:4", "{}"), ("now", "{}")))
    assert whole.ids == ["functions.weather:4", "functions.now:1"]


def test_ids_differ() -> None:
    ids = [parse_text(None, "deepseek_v32", dsml(invoke("now"))).ids[0] for _ in range(100)]
    assert len(set(ids)) == 100 and all(i.startswith("call_") for i in ids)


def test_one_call_when_parallel_calls_are_off() -> None:
    whole = parse_text(None, "deepseek_v32", dsml(invoke("now"), invoke("weather", ("city", "true", "x"))), parallel_tool_calls=False)
    assert whole.parts() == ("", "", [("now", "{}")])


@pytest.mark.parametrize("options", [{"tools": ()}, {"tool_choice": "none"}])
def test_no_calls_are_looked_for_without_tools(options: dict[str, Any]) -> None:
    text = dsml(invoke("now"))
    whole = parse_text(None, "deepseek_v32", text, **options)
    assert whole.parts() == ("", text, [])


def test_tools_need_a_parser() -> None:
    with pytest.raises(ValueError, match=r"--tool-call-parser \(deepseek_v3, .*'none'"):
        make_parser(ParserNames(), tools=TOOLS)
    make_parser(ParserNames(), tools=TOOLS, tool_choice="none")


def test_reasoning_before_calls() -> None:
    whole = parse_text("deepseek_v32", "deepseek_v32", "hm</think>so" + dsml(invoke("now")), prompt="<think>", split=True)
    assert whole.parts() == ("hm", "so", [("now", "{}")])
    whole = parse_text("deepseek_v32", "deepseek_v32", dsml(invoke("now")) + "</think>so", prompt="<think>")
    assert whole.parts() == (dsml(invoke("now")), "so", [])  # a call that was only thought of


def test_kimi_may_go_from_reasoning_to_calls() -> None:
    whole = parse_text("kimi_k2", "kimi_k2", "<think>hm" + kimi(("functions.now:0", "{}")), split=True)
    assert whole.parts() == ("hm", "", [("now", "{}")])
    assert parse_text("kimi_k2", "kimi_k2", "<think>hm" + kimi(), tools=()).content == ""


def test_headers_without_end_do_not_stop_the_stream() -> None:
    for text in (f"<{D}invoke ", "<tool_call>", f"{CALL}", f"{CALL}function{SEP}", "<|tool_call_begin|>"):
        for name in ("deepseek_v32", "glm47", "deepseek_v3", "kimi_k2"):
            parser = make_parser(ParserNames(tools=name), tools=TOOLS)
            whole = parse(parser, [text, *["x"] * 6000, "y"])
            found = whole.content + "".join(n + a for n, a in whole.calls)
            assert len(found) > 1500 and found.endswith("y")
