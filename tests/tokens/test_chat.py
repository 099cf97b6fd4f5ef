from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from rorqual.engine.text.chat import load_chat_format, render_chat
from rorqual.engine.text.tokenizer import Tokenizer
from tests.checkpoints import TINY

TOOL = {"type": "function", "function": {"name": "find", "description": "Findé", "parameters": {"type": "object", "properties": {}}}}
TOOLS_TEXT = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. \
The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{"name": "find", "description": "Findé", "parameters": {"type": "object", "properties": {}}}
</functions>
"""
B, E, U, A = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"


def message(role: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": role, **({} if content is None else {"content": content}), **more}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def v32(messages: list[dict[str, Any]], **options: Any) -> str:
    return render_chat(Path("nowhere"), messages, model_type="deepseek_v32", **options)


# ---- DeepSeek-V3.2


@pytest.mark.parametrize(("thinking", "marker"), [(False, "</think>"), (True, "<think>")])
def test_v32_one_question(thinking: bool, marker: str) -> None:
    assert v32([message("user", "Hi")], thinking=thinking) == f"{B}{U}Hi{A}{marker}"
    assert v32([message("user", "Hi")], thinking=thinking, add_generation_prompt=False) == f"{B}{U}Hi"
    assert v32([message("system", "Be brief."), message("user", "Hi")], thinking=thinking) == f"{B}Be brief.{U}Hi{A}{marker}"
    assert v32([message("system", "Be brief.")], thinking=thinking) == f"{B}Be brief.{A}{marker}"


def test_v32_turns_drop_earlier_reasoning() -> None:
    turns = [
        message("user", "1+1?"),
        message("assistant", "2", reasoning_content="easy"),
        message("user", [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]),
    ]
    assert v32(turns) == f"{B}{U}1+1?{A}</think>2{E}{U}2+2?{A}</think>"
    assert v32(turns, thinking=True) == f"{B}{U}1+1?{A}</think>2{E}{U}2+2?{A}<think>"
    done = [*turns, message("assistant", "4", reasoning_content="hm")]
    assert v32(done, thinking=True, add_generation_prompt=False) == f"{B}{U}1+1?{A}</think>2{E}{U}2+2?{A}<think>hm</think>4{E}"
    assert v32(done, add_generation_prompt=False) == f"{B}{U}1+1?{A}</think>2{E}{U}2+2?{A}</think>4{E}"
    assert v32(done).endswith(f"4{E}{A}</think>")


CALLS = [
    message("user", "Where?"),
    message(
        "assistant",
        reasoning_content="look",
        tool_calls=[call("find", '{"what": "a \\"b\\" é", "depth": 2, "deep": true}'), call("find", {"list": [1, "ü"], "none": None})],
    ),
    message("tool", "here"),
    message("tool", [{"type": "text", "text": '{"x": 1}'}]),
]
CALLS_TEXT = """

<｜DSML｜function_calls>
<｜DSML｜invoke name="find">
<｜DSML｜parameter name="what" string="true">a "b" é</｜DSML｜parameter>
<｜DSML｜parameter name="depth" string="false">2</｜DSML｜parameter>
<｜DSML｜parameter name="deep" string="false">true</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="find">
<｜DSML｜parameter name="list" string="false">[1, "ü"]</｜DSML｜parameter>
<｜DSML｜parameter name="none" string="false">null</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls><｜end▁of▁sentence｜>

<function_results>
<result>here</result>
<result>{"x": 1}</result>
</function_results>"""


def test_v32_tool_calls_and_results() -> None:
    assert v32(CALLS, thinking=True) == f"{B}{U}Where?{A}<think>look</think>{CALLS_TEXT}\n\n<think>"
    assert v32(CALLS) == f"{B}{U}Where?{A}</think>{CALLS_TEXT}\n\n</think>"
    assert v32(CALLS, add_generation_prompt=False) == f"{B}{U}Where?{A}</think>{CALLS_TEXT}"
    later = [*CALLS, message("assistant", "There.", reasoning_content="so"), message("user", "Sure?")]
    assert v32(later, thinking=True) == f"{B}{U}Where?{A}</think>{CALLS_TEXT}\n\n</think>There.{E}{U}Sure?{A}<think>"


def test_v32_tools_join_the_system_message() -> None:
    assert v32([message("system", "Be brief."), message("user", "Hi")], tools=[TOOL]) == f"{B}Be brief.\n\n{TOOLS_TEXT}{U}Hi{A}</think>"
    assert v32([message("user", "Hi")], tools=[TOOL]) == f"{B}\n\n{TOOLS_TEXT}{U}Hi{A}</think>"


def test_v32_developer_and_response_format() -> None:
    developer = message("developer", "Do it", tools=[TOOL], response_format={"type": "object"})
    schema = '## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"type": "object"}'
    assert v32([developer]) == f"{B}{U}\n\n{TOOLS_TEXT}\n\n{schema}\n\n# The user's message is: Do it{A}</think>"
    system = message("system", "S", response_format={"type": "object"})
    assert v32([system, message("user", "Hi")]) == f"{B}S\n\n{schema}{U}Hi{A}</think>"
    earlier = [message("developer", "Old"), message("assistant", "yes"), message("user", "New")]
    assert v32(earlier, thinking=True) == f"{B}yes{E}{U}New{A}<think>"  # as published
    assert v32(earlier) == f"{B}{U}\n\n# The user's message is: Old{A}</think>yes{E}{U}New{A}</think>"


V32_ERRORS = [
    ([message("tool", "x")], {}, "message 0: a tool result needs an assistant message with an unanswered tool call before it"),
    ([*CALLS, message("tool", "third")], {}, "message 4: a tool result needs an assistant message with an unanswered tool call"),
    (CALLS[:3], {}, "message 2: 1 more tool results are missing for the tool calls before it"),
    ([*CALLS[:3], message("user", "x")], {}, "message 3 (role user): 1 tool results are missing for the tool calls before it"),
    ([message("user", "a"), message("assistant", "b")], {"thinking": True}, "message 1: in thinking mode an assistant message"),
    ([message("developer", "")], {}, "message 0: a developer message must not be empty"),
]


@pytest.mark.parametrize(("messages", "options", "text"), V32_ERRORS)
def test_v32_refuses(messages: list[dict[str, Any]], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        v32(messages, **options)
    assert text in str(error.value)


# ---- messages of every format

MESSAGE_ERRORS = [
    ([], "messages must be a non-empty list of {'role': ..., 'content': ...}, found []"),
    ("hello", "messages must be a non-empty list of {'role': ..., 'content': ...}, found 'hello'"),
    (["hello"], "message 0 must be a dict with role and content, found str"),
    ([message("user", "a"), message("robot", "b")], "message 1 has role 'robot'; known roles are system, developer, user, assistant, tool"),
    ([{"content": "x"}], "message 0 has role None; known roles are"),
    ([message("user")], "message 0 (role user): content must be a string or a list of {'type': 'text', 'text': ...} parts, found None"),
    ([message("assistant")], "message 0 (role assistant): content must be"),
    ([message("user", 7)], "content must be a string or a list of {'type': 'text', 'text': ...} parts, found 7"),
    ([message("user", [{"type": "image_url"}, "x"])], "found parts of type ['image_url', 'str']"),
    ([message("user", "x", tool_calls=[call("f", {})])], "message 0 (role user) has tool_calls; only assistant messages may"),
    ([message("assistant", tool_calls=[{"name": "f"}])], "message 0: a tool call must be {'function': {'name': ..., 'arguments': ...}}"),
    ([message("assistant", tool_calls=[call("f", "{")])], "message 0: arguments of tool call 'f' are not valid JSON: "),
    ([message("assistant", tool_calls=[call("f", "[1]")])], "message 0: arguments of tool call 'f' must be a JSON object, found [1]"),
    ([message("assistant", "x", reasoning_content=3)], "message 0 (role assistant): reasoning_content must be a string, found int"),
]


@pytest.mark.parametrize(("messages", "text"), MESSAGE_ERRORS)
@pytest.mark.parametrize("folder", [Path("nowhere"), TINY])
def test_bad_messages_are_named(messages: Any, text: str, folder: Path) -> None:
    with pytest.raises(ValueError) as error:
        render_chat(folder, messages, model_type="deepseek_v32")
    assert text in str(error.value)


def test_bad_tools_are_named() -> None:
    with pytest.raises(ValueError, match=r"tool 1 must be \{'type': 'function', 'function': .*, found \{'name': 'f'\}"):
        v32([message("user", "x")], tools=[TOOL, {"name": "f"}])


def test_callers_messages_are_not_changed() -> None:
    messages = [message("system", "s"), *json.loads(json.dumps(CALLS))]
    before = json.dumps(messages)
    v32(messages, tools=[TOOL], thinking=True)
    assert json.dumps(messages) == before


# ---- jinja


def test_the_embedded_model_has_a_template() -> None:
    talk = [message("system", "S"), message("user", "Hello."), message("assistant", "Hi."), message("user", "Bye.")]
    assert render_chat(TINY, talk) == "<|begin|><|System|>S<|User|>Hello.<|Assistant|>Hi.<|end|><|User|>Bye.<|Assistant|>"
    assert render_chat(TINY, talk[:2], add_generation_prompt=False) == "<|begin|><|System|>S<|User|>Hello."
    reference = json.loads((TINY / "eval" / "reference.json").read_text())["prompts"]
    ids = Tokenizer.load(TINY).encode(render_chat(TINY, [message("user", "Hello.")]), add_special_tokens=False)
    assert ids == next(r["prompt_ids"] for r in reference if r["id"] == 15)


def write(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<b>"}, "eos_token": "<e>", **config}))
    return folder


def test_functions_and_white_space_of_templates(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{{ eos_token }}\n{% for m in messages %}\n  {%- if loop.first %}{% continue %}{% endif %}\n"
        "{{ m | tojson }}|{{ tools | tojson(indent=1) }}|{{ strftime_now('%Y') }}|{{ thinking }}{{ enable_thinking }}\n"
        "    {% endfor %}\nend"
    )
    talk = [message("user", "a"), message("user", "<é>")]
    found = render_chat(write(tmp_path, chat_template=template), talk, tools=[TOOL], thinking=True)
    year = datetime.datetime.now().year
    tools = json.dumps([TOOL], indent=1, ensure_ascii=False)
    assert found == f'<b><e>\n{{"role": "user", "content": "<é>"}}|{tools}|{year}|TrueTrue\nend'


def test_where_templates_are_found(tmp_path: Path) -> None:
    talk = [message("user", "x")]
    named = [{"name": "default", "template": "D{# tools #}"}, {"name": "tool_use", "template": "T{# tools #}"}]
    write(tmp_path, chat_template=named)
    assert render_chat(tmp_path, talk) == "D" and render_chat(tmp_path, talk, tools=[TOOL]) == "T"
    assert render_chat(write(tmp_path, chat_template=named[:1]), talk, tools=[TOOL]) == "D"
    with pytest.raises(ValueError, match=r"names \['tool_use'\] but no 'default'"):
        render_chat(write(tmp_path, chat_template=named[1:]), talk)
    with pytest.raises(ValueError, match=r"must be a string or a list, found dict"):
        render_chat(write(tmp_path, chat_template={}), talk)
    (tmp_path / "chat_template.jinja").write_text("J")
    assert render_chat(tmp_path, talk) == "J"


def test_models_without_a_format(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    with pytest.raises(ValueError) as error:
        load_chat_format(tmp_path)
    assert str(error.value) == (
        f"{tmp_path} has no chat format: no chat_template.jinja, no chat_template in tokenizer_config.json, and model type "
        "'deepseek_v3' has none built in (deepseek_v32 has); give a plain prompt instead of messages"
    )
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    assert render_chat(tmp_path, [message("user", "x")]) == f"{B}{U}x{A}</think>"


TEMPLATE_ERRORS = [
    ("{% for %}", "cannot be compiled: "),
    ("{{ raise_exception('roles must alternate') }}", "refused the messages: roles must alternate"),
    ("{{ messages[0].missing.deeper }}", "refused the messages: "),
    ("{{ messages[0]['content'] + 1 }}", "refused the messages: "),
    ("{{ ''.__class__.__mro__ }}", "refused the messages: access to attribute '__class__'"),
    ("{{ messages.append(1) }}", "refused the messages: "),
]


@pytest.mark.parametrize(("template", "text"), TEMPLATE_ERRORS)
def test_template_errors_name_the_folder(tmp_path: Path, template: str, text: str) -> None:
    with pytest.raises(ValueError) as error:
        render_chat(write(tmp_path, chat_template=template), [message("user", "x")])
    assert f"the chat template of {tmp_path} {text}" in str(error.value)
