"""/v1/chat/completions through the official client."""

import json

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tests.server.v32_folder import make_v32_folder

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a whale?"}]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}},
]


def test_whole_answer(served):
    answer = served.openai().chat.completions.create(model="tiny", messages=ASK, max_completion_tokens=7)
    (choice,) = answer.choices
    (submit,) = served.engine.submits
    prompt = [int.from_bytes(submit.prompt[i : i + 4], "little") for i in range(0, len(submit.prompt), 4)]
    assert prompt[0] == 0 and prompt[-1] == 4  # begins with <|begin|>, which the template writes, and opens the assistant's turn
    assert prompt.count(0) == 1
    assert choice.message.role == "assistant" and choice.message.content == served.engine.expected_text(prompt, 7)
    assert choice.finish_reason == "length" and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == 7


def test_without_a_limit_the_answer_may_fill_the_context(served):
    served.engine.script = lambda submit, index: "short"
    answer = served.openai().chat.completions.create(model="tiny", messages=ASK)
    assert answer.choices[0].message.content == "short" and answer.choices[0].finish_reason == "stop"
    (submit,) = served.engine.submits
    assert submit.params["max_tokens"] == 8192 - len(submit.prompt) // 4


def test_streamed_pieces_add_up_to_the_whole_answer(served):
    client = served.openai()
    whole = client.chat.completions.create(model="tiny", messages=ASK, n=3, max_tokens=11, logprobs=True, top_logprobs=2)
    texts, roles, tokens, reasons, usage = {}, {}, {}, {}, None
    for event in client.chat.completions.create(
        model="tiny", messages=ASK, n=3, max_tokens=11, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}
    ):
        assert event.object == "chat.completion.chunk"
        usage = event.usage or usage
        for choice in event.choices:
            at = choice.index
            if choice.delta.role:
                assert at not in roles
                roles[at] = choice.delta.role
            texts[at] = texts.get(at, "") + (choice.delta.content or "")
            tokens.setdefault(at, []).extend(choice.logprobs.content if choice.logprobs else [])
            if choice.finish_reason:
                reasons[at] = choice.finish_reason
    assert roles == dict.fromkeys(range(3), "assistant")
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert tokens == {c.index: c.logprobs.content for c in whole.choices}
    assert reasons == dict.fromkeys(range(3), "length") and usage == whole.usage


def test_logprobs_have_bytes_that_join_to_the_text(served):
    answer = served.openai().chat.completions.create(model="tiny", messages=ASK, max_tokens=9, logprobs=True)
    (choice,) = answer.choices
    data = bytes(b for token in choice.logprobs.content for b in token.bytes)
    assert data.decode("utf-8", "replace") == choice.message.content
    assert all(token.top_logprobs == [] for token in choice.logprobs.content)


def test_echo_and_continuing_a_message(served):
    begun = [*ASK, {"role": "assistant", "content": "A whale is"}]
    with served.http() as client:
        body = {"messages": begun, "max_tokens": 3, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"].startswith("A whale is")
    (submit,) = served.engine.submits
    assert submit.prompt[-4:] != b"\x04\0\0\0"


def test_content_parts(served):
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a whale?"}]}]
    client = served.openai()
    client.chat.completions.create(model="tiny", messages=parts, max_tokens=1)
    client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "What is a whale?"}], max_tokens=1)
    assert served.engine.submits[0].prompt == served.engine.submits[1].prompt


@pytest.fixture(scope="module")
def v32(tmp_path_factory):
    """A server whose chat format and parsers are those of DeepSeek-V3.2."""
    with serving(FakeEngine(folder=make_v32_folder(tmp_path_factory.mktemp("v32")))) as found:
        yield found


CALL = (
    'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Kiel</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_and_reasoning(v32, stream):
    v32.engine.script = lambda submit, index: "Where?</think>" + CALL
    made = v32.openai().chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, stream=stream, extra_body={"chat_template_kwargs": {"thinking": True}}
    )
    if not stream:
        (choice,) = made.choices
        message = choice.message
        reasoning, content, reason = message.reasoning_content, message.content, choice.finish_reason
        assert made.usage.completion_tokens_details.reasoning_tokens > 0
        calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]
    else:
        reasoning, content, parts, reason = "", "", {}, None
        for event in made:
            delta = event.choices[0].delta
            reasoning += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
            for call in delta.tool_calls or ():
                old = parts.setdefault(call.index, [None, "", ""])
                old[0] = call.id or old[0]
                old[1] += call.function.name or ""
                old[2] += call.function.arguments or ""
            reason = event.choices[0].finish_reason or reason
        calls = [tuple(parts[i]) for i in sorted(parts)]
    assert reasoning == "Where?" and content.strip() == "I look." and reason == "tool_calls"
    ((name_id, name, arguments),) = calls
    assert name_id.startswith("call_") and name == "weather" and json.loads(arguments) == {"city": "Kiel"}


def test_tools_can_be_switched_off_for_a_request(v32):
    v32.engine.script = lambda submit, index: CALL
    answer = v32.openai().chat.completions.create(model="tiny", messages=ASK, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].finish_reason == "stop"
    assert "invoke" in answer.choices[0].message.content


@pytest.mark.parametrize(
    ("body", "opening"),
    [
        ({}, "</think>"),
        ({"thinking": {"type": "enabled"}}, "<think>"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "</think>"),
        ({"reasoning_effort": "high"}, "<think>"),
        ({"reasoning_effort": "none"}, "</think>"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, "<think>"),
    ],
)
def test_switches_of_reasoning(v32, body, opening):
    v32.engine.submits.clear()
    with v32.http() as client:
        assert client.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 1, **body}).status_code == 200
    (submit,) = v32.engine.submits
    ids = [int.from_bytes(submit.prompt[i : i + 4], "little") for i in range(0, len(submit.prompt), 4)]
    assert v32.process.state.texts.decode(ids, skip_special_tokens=False).endswith("<｜Assistant｜>" + opening)


def test_a_wrong_switch_is_named(v32):
    with v32.http() as client:
        answer = client.post("/v1/chat/completions", json={"messages": ASK, "thinking": {"type": "maybe"}})
    assert answer.status_code == 400 and "enabled or disabled, found 'maybe'" in answer.json()["error"]["message"]


def test_reasoning_can_be_left_out(v32):
    v32.engine.script = lambda submit, index: "Hm.</think>Yes."
    more = {"include_reasoning": False, "chat_template_kwargs": {"thinking": True}}
    answer = v32.openai().chat.completions.create(model="tiny", messages=ASK, extra_body=more)
    assert answer.choices[0].message.content == "Yes." and not hasattr(answer.choices[0].message, "reasoning_content")
