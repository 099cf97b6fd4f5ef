"""Checking chat messages (OpenAI's shape) before any template sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....parallel.json_text import parse_json
from .arguments import Arguments

#: roles that a message may have
ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


def check_messages(messages: Sequence[Message]) -> list[Message]:
    """Copies of the messages with plain-string contents.

    A content may be a string or a list of ``{"type": "text", "text": ...}`` parts, which are joined; an assistant's may be
    None or missing beside reasoning or tool calls. The arguments of tool calls become ``Arguments``; reasoning is found under
    the name ``reasoning_content``.

    Raises:
        ValueError: no messages, an unknown role, a content that is no text, or a malformed tool call; names the message.
    """
    if isinstance(messages, (str, bytes, dict)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a non-empty list of {{'role': ..., 'content': ...}}, found {messages!r}")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: Message) -> Message:
    """One message, normalised."""
    if not isinstance(message, dict):
        raise ValueError(f"message {index} must be a dict with role and content, found {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"message {index} has role {role!r}; known roles are {', '.join(ROLES)}")
    checked = dict(message)
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant":
            raise ValueError(f"message {index} (role {role}) has tool_calls; only assistant messages may")
        checked["tool_calls"] = [_check_call(index, call) for call in calls]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, str):
        raise ValueError(f"message {index} (role {role}): reasoning_content must be a string, found {type(reasoning).__name__}")
    if reasoning is not None:
        checked["reasoning_content"] = reasoning  # the name that templates know
    content = message.get("content")
    if content is None and role == "assistant" and (calls or reasoning):
        checked["content"] = ""
    else:
        checked["content"] = _text(index, role, content)
    return checked


def _text(index: int, role: str, content: Any) -> str:
    """The content as one string."""
    if isinstance(content, str):
        return content
    found = repr(content)
    if isinstance(content, list):
        if all(isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
        found = f"parts of type {[part.get('type') if isinstance(part, dict) else type(part).__name__ for part in content]}"
    wanted = "a string or a list of {'type': 'text', 'text': ...} parts"
    raise ValueError(f"message {index} (role {role}): content must be {wanted}, found {found}")


def _check_call(index: int, call: Any) -> dict[str, Any]:
    """One tool call with its arguments as a dict (they may come as a JSON string)."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"message {index}: a tool call must be {{'function': {{'name': ..., 'arguments': ...}}}}, found {call!r}")
    arguments, text = function.get("arguments", {}), None
    if isinstance(arguments, str):
        text = arguments
        try:
            arguments = parse_json(text) if text.strip() else {}
        except ValueError as error:
            raise ValueError(f"message {index}: arguments of tool call {function['name']!r} are not valid JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"message {index}: arguments of tool call {function['name']!r} must be a JSON object, found {arguments!r}")
    return {**call, "function": {**function, "arguments": Arguments(arguments, text)}}


def check_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Tools as a list; ValueError unless each is ``{"type": "function", "function": {"name": ..., ...}}``."""
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"tool {index} must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}, found {tool!r}")
    return list(tools or ())
