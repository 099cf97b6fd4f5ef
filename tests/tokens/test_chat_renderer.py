from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rorqual.engine.text.chat import ChatRenderer
from rorqual.engine.text.tokenizer import Tokenizer
from tests.checkpoints import TINY

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
#: in the manner of DeepSeek V3 and R1: arguments are joined to strings, roles that it does not know are left out
V3_LIKE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '<u>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{{ '<a>' + m['content'] }}"
    "{% if 'tool_calls' in m %}{% for t in m['tool_calls'] %}"
    "{{ '<call>' + t['function']['name'] + '\\n```json\\n' + t['function']['arguments'] + '\\n```' }}"
    "{% endfor %}{% endif %}{% endif %}"
    "{% if m['role'] == 'tool' %}{{ '<out>' + m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% if thinking %}<think>{% endif %}{% endif %}"
)


def renderer(folder: Path, template: str, **options: Any) -> ChatRenderer:
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<b>", "chat_template": template}))
    return ChatRenderer(folder, **options)


def assistant(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": arguments}}]}


def test_the_server_and_the_offline_engine_render_alike() -> None:
    chat = ChatRenderer(TINY)
    assert chat.source is not None and not chat.built_in
    assert chat.render([USER]) == "<|begin|><|User|>Hi<|Assistant|>"
    assert chat.render([USER], add_generation_prompt=False) == "<|begin|><|User|>Hi"


def test_the_built_in_format(tmp_path: Path) -> None:
    chat = ChatRenderer(tmp_path, model_type="deepseek_v32")
    assert chat.source is None and chat.built_in
    begin = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>"
    assert chat.render([USER]) == begin + "</think>"
    assert chat.render([USER], template_args={"thinking": True}) == begin + "<think>"
    assert chat.render([USER], template_args={"enable_thinking": True, "clear_thinking": False}) == begin + "<think>"
    with pytest.raises(ValueError, match="chat_template_kwargs has depth; DeepSeek-V3.2's format knows thinking only"):
        chat.render([USER], template_args={"depth": 1})


def test_an_answer_that_goes_on(tmp_path: Path) -> None:
    chat = ChatRenderer(tmp_path, model_type="deepseek_v32")
    begin = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>"
    talk = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Well"}], "reasoning_content": "hm"}]
    more: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert chat.render(talk, **more) == begin + "</think>Well"
    assert chat.render(talk, **more, template_args={"thinking": True}) == begin + "<think>hm</think>Well"
    for wrong in ([USER], talk[1:], [USER, {"role": "assistant", "content": "", "reasoning_content": "x"}], [USER, assistant("{}")]):
        with pytest.raises(ValueError, match="continue_final_message needs a last message of the assistant with text, after another"):
            chat.render(wrong, **more)


def test_a_model_without_a_format_serves_all_but_chats(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    chat = ChatRenderer(tmp_path)
    with pytest.raises(ValueError, match="has no chat format"):
        chat.render([USER])


def test_arguments_are_text_where_a_template_wants_text(tmp_path: Path) -> None:
    chat = renderer(tmp_path, V3_LIKE)
    for arguments, text in (('{"a":1}', '{"a":1}'), ({"a": "é"}, '{"a": "é"}'), ("", ""), ({}, "{}")):
        found = chat.render([USER, assistant(arguments), {"role": "tool", "content": "x"}])
        assert found == f"<b><u>Hi<a><call>find\n```json\n{text}\n```<out>x<a>"
    mapping = renderer(tmp_path, "{% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}")
    assert mapping.render([assistant('{"a": 1, "b": [2]}')]) == "a=1;b=[2];"
    written = renderer(
        tmp_path, "{{ messages[0].tool_calls[0].function.arguments | tojson }}|{{ messages[0].tool_calls[0].function.arguments }}"
    )
    assert written.render([assistant('{"a":1}')]) == '{"a": 1}|{"a":1}'


def test_thinking_is_the_templates_choice_unless_the_request_says(tmp_path: Path) -> None:
    chat = renderer(tmp_path, "{{ thinking is defined }}{{ enable_thinking is defined and enable_thinking }}{{ effort }}")
    assert chat.render([USER]) == "FalseFalse"
    assert chat.render([USER], template_args={"thinking": True, "effort": 3}) == "TrueTrue3"
    assert chat.render([USER], template_args={"enable_thinking": False}) == "TrueFalse"
    for wrong, text in (
        ({"thinking": "yes"}, "thinking must be true or false, found 'yes'"),
        ({"thinking": True, "enable_thinking": False}, "contradict each other"),
        ({"eff": 1}, r"chat_template_kwargs has eff; the template of .* reads effort, enable_thinking, thinking|reads effort"),
        ({"messages": []}, "must not have messages, which the server sets itself"),
    ):
        with pytest.raises(ValueError, match=text):
            chat.render([USER], template_args=wrong)


def test_nothing_is_left_out_without_a_word(tmp_path: Path) -> None:
    chat = renderer(tmp_path, V3_LIKE)
    with pytest.raises(ValueError, match="has no place for tools; give another template with --chat-template"):
        chat.render([USER], tools=[TOOL])
    assert chat.render([{"role": "developer", "content": "Be brief."}, USER]) == "<b>Be brief.<u>Hi<a>"
    simple = renderer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="message 1: the chat template of .* has no place for tool_calls"):
        simple.render([USER, assistant("{}")])
    with pytest.raises(ValueError, match="message 1: the chat template of .* has no place for tool results"):
        simple.render([USER, {"role": "tool", "content": "x"}])
    reasons = renderer(tmp_path, "{{ messages[0].reasoning_content }}")
    assert reasons.render([{"role": "assistant", "content": "a", "reasoning": "why"}]) == "why"


def test_a_template_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("<|User|>{{ messages[0].content }}{{ eos_token }}")
    chat = ChatRenderer(TINY, template_file=path, tokenizer=Tokenizer.load(TINY))
    assert chat.render([USER]) == "<|User|>Hi<|end|>" and chat.source == path.read_text()
    path.write_text("{{ '<|im_start|>user' }}{{ messages[0].content }}<|im_end|>")
    with pytest.raises(ValueError, match=r"mine.jinja writes <\|im_end\|>, <\|im_start\|>, which this model's tokenizer does not have"):
        ChatRenderer(TINY, template_file=path, tokenizer=Tokenizer.load(TINY))
    path.write_text("{% if %}")
    with pytest.raises(ValueError, match="chat template of .*mine.jinja cannot be compiled"):
        ChatRenderer(TINY, template_file=path)
    with pytest.raises(ValueError, match="--chat-template .*none.jinja cannot be read"):
        ChatRenderer(TINY, template_file=tmp_path / "none.jinja")


def test_a_broken_template_is_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be compiled"):
        renderer(tmp_path, "{% for %}")
