"""The prompt format of DeepSeek-V3.2, which comes without a jinja template.

The strings are the model's input format as published in its model card (``encoding/`` of deepseek-ai/DeepSeek-V3.2): turns
between special tokens, reasoning between <think> and </think>, tool calls and their parameters in DSML tags. A turn of
the assistant is opened by the turn before it: a user's message ends with the assistant token and "<think>" (thinking mode,
last user message) or "</think>".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .conversation import Conversation
from .messages import Message
from .template import OPTIONAL_ARGS

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK, THINK_END = "<think>", "</think>"
DSML = "｜DSML｜"

_TOOLS_SECTION = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. \
The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<{DSML}function_calls>
...
</{DSML}function_calls>

<function_results>
...
</function_results>

{THINK}...thinking about results{THINK_END}

Here are the functions available in JSONSchema format:
<functions>
"""


class DeepseekV32ChatFormat:
    """The format of DeepSeek-V3.2."""

    def render(self, talk: Conversation) -> str:
        """The prompt. ``thinking`` None is False; other template arguments are without meaning here.

        Tools are described in the first system message (an empty one is made when there is none). Reasoning of
        earlier turns is left out: only what follows the last user message keeps it, and only in thinking mode.

        Raises:
            ValueError: an unknown template argument, tool results that do not answer the tool calls before them, an assistant
                turn after the last user message that lacks reasoning in thinking mode, an empty developer message.
        """
        unknown = talk.template_args.keys() - OPTIONAL_ARGS
        if unknown:
            raise ValueError(f"chat_template_kwargs has {', '.join(sorted(unknown))}; DeepSeek-V3.2's format knows thinking only")
        thinking = bool(talk.thinking)
        turns = _with_tools(talk.messages, talk.tools)
        last_user = max((i for i, m in enumerate(turns) if m["role"] in ("user", "developer")), default=-1)
        if thinking:
            # the published encoder drops earlier developer messages together with earlier reasoning
            turns = [m for i, m in enumerate(turns) if m["role"] != "developer" or i >= last_user]
            last_user = max((i for i, m in enumerate(turns) if m["role"] in ("user", "developer")), default=-1)
        parts = [BOS]
        answers_due = 0  # tool results still expected
        for index, message in enumerate(turns):
            role = message["role"]
            answers_due = _check_order(index, message, answers_due)
            opens = talk.add_generation_prompt or index + 1 < len(turns)
            marker = THINK if thinking and index >= last_user else THINK_END
            if role == "system":
                parts.append(message["content"] + _sections(message))
            elif role in ("user", "developer"):
                parts.append(_user(index, message) + (ASSISTANT + marker if opens else ""))
            elif role == "tool":
                first = turns[index - 1]["role"] == "assistant"
                parts.append("\n\n<function_results>" if first else "")
                parts.append(f"\n<result>{message['content']}</result>")
                if answers_due == 0:
                    parts.append("\n</function_results>" + (f"\n\n{marker}" if opens else ""))
            else:
                parts.append(_assistant(index, message, reasons=thinking and index > last_user))
        if answers_due and turns[-1]["role"] == "tool":
            raise ValueError(f"message {len(turns) - 1}: {answers_due} more tool results are missing for the tool calls before it")
        if talk.add_generation_prompt and turns[-1]["role"] in ("system", "assistant"):
            parts.append(ASSISTANT + (THINK if thinking else THINK_END))
        return "".join(parts)


def _with_tools(messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    """Attach ``tools`` to the first system message."""
    if not tools:
        return messages
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    return [{**messages[0], "tools": [*(messages[0].get("tools") or ()), *tools]}, *messages[1:]]


def _check_order(index: int, message: Message, due: int) -> int:
    """Tool results must follow their calls; returns how many are still expected after this message."""
    if message["role"] == "tool":
        if due == 0:
            raise ValueError(f"message {index}: a tool result needs an assistant message with an unanswered tool call before it")
        return due - 1
    if due:
        raise ValueError(f"message {index} (role {message['role']}): {due} tool results are missing for the tool calls before it")
    return len(message.get("tool_calls") or ())


def _sections(message: Message) -> str:
    """The tools and the response format that a system or developer message brings."""
    text = ""
    if message.get("tools"):
        schemas = "\n".join(_json(tool["function"]) for tool in message["tools"])
        text += f"\n\n{_TOOLS_SECTION}{schemas}\n</functions>\n"
    if message.get("response_format"):
        schema = _json(message["response_format"])
        text += f"\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"
    return text


def _user(index: int, message: Message) -> str:
    """A user's or developer's turn."""
    content: str = message["content"]
    if message["role"] == "developer":
        if not content:
            raise ValueError(f"message {index}: a developer message must not be empty")
        content = f"{_sections(message)}\n\n# The user's message is: {content}"
    return USER + content


def _assistant(index: int, message: Message, *, reasons: bool) -> str:
    """An assistant's turn; with ``reasons`` its reasoning comes first ("<think>" is already in the prompt)."""
    calls = message.get("tool_calls") or ()
    text: str = ""
    if reasons:
        reasoning: str = message.get("reasoning_content") or message.get("reasoning") or ""
        if not reasoning and not calls:
            raise ValueError(
                f"message {index}: in thinking mode an assistant message after the last user message needs reasoning_content or tool_calls"
            )
        text = reasoning + THINK_END
    text += message["content"]
    if calls:
        invokes = "\n".join(_invoke(call["function"]) for call in calls)
        text += f"\n\n<{DSML}function_calls>\n{invokes}\n</{DSML}function_calls>"
    return text + EOS


def _invoke(function: dict[str, Any]) -> str:
    """One tool call."""
    lines = []
    for name, value in function["arguments"].items():
        is_text = isinstance(value, str)
        shown = value if is_text else _json(value)
        lines.append(f'<{DSML}parameter name="{name}" string="{"true" if is_text else "false"}">{shown}</{DSML}parameter>')
    return f'<{DSML}invoke name="{function["name"]}">\n' + "\n".join(lines) + f"\n</{DSML}invoke>"


def _json(value: Any) -> str:
    """JSON with Python's default separators and unescaped Unicode, as the model saw it."""
    return json.dumps(value, ensure_ascii=False)
