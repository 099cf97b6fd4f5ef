"""Checking ``tools`` and ``tool_choice`` of a request."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

#: names that can be written in every format; wider than OpenAI's (letters, digits, "_" and "-")
_NAME = re.compile(r"[\w.:/-]{1,128}")
#: most tools of a request
MAX_TOOLS = 1024
_CHOICES = ("none", "auto", "required")


def check_tool_choice(tools: Sequence[dict[str, Any]], tool_choice: str | dict[str, Any]) -> None:
    """Check a request's ``tools`` (OpenAI's shape) and which of them it wants called.

    Raises:
        ValueError: a malformed tool, two of one name, a malformed ``tool_choice``, one that asks for tools which the request does
            not have.
    """
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools has {len(tools)} functions; at most {MAX_TOOLS} are allowed")
    names = [_tool_name(index, tool) for index, tool in enumerate(tools)]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"tools has more than one function named {', '.join(twice)}; names must differ")
    if isinstance(tool_choice, str):
        if tool_choice not in _CHOICES:
            raise ValueError(f"tool_choice must be one of {', '.join(_CHOICES)}, or name a function, found {tool_choice!r}")
        if tool_choice == "required" and not tools:
            raise ValueError("tool_choice 'required' needs tools, and the request has none")
        return
    known = set(names)
    for wanted in _wanted(tool_choice):
        if wanted not in known:
            raise ValueError(f"tool_choice asks for the function {wanted!r}, but tools has {', '.join(names[:50]) or 'none'}")


def _tool_name(index: int, tool: Any) -> str:
    """The name of a tool."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or tool.get("type", "function") != "function":
        raise ValueError(
            f"tool {index} must be {{'type': 'function', 'function': {{'name': ..., 'parameters': ...}}}}, found {str(tool)[:200]}"
        )
    if not _NAME.fullmatch(name):
        raise ValueError(f"tool {index}: a function's name is up to 128 letters, digits and '_-.:/', found {name[:200]!r}")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise ValueError(f"tool {index} ({name}): parameters must be a JSON schema (an object), found {type(parameters).__name__}")
    return name


def _wanted(tool_choice: Any) -> list[str]:
    """The functions that a ``tool_choice`` object names."""
    found: list[Any] = [None]
    if isinstance(tool_choice, dict) and tool_choice.get("type") == "function":
        found = [tool_choice]
    elif isinstance(tool_choice, dict) and tool_choice.get("type") == "allowed_tools":
        allowed = tool_choice.get("allowed_tools")
        if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required") and isinstance(allowed.get("tools"), list):
            found = allowed["tools"] or [None]
    functions = [entry.get("function") if isinstance(entry, dict) else None for entry in found]
    names = [function.get("name") if isinstance(function, dict) else None for function in functions]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"tool_choice must be {', '.join(map(repr, _CHOICES))}, {{'type': 'function', 'function': {{'name': ...}}}} or "
            f"{{'type': 'allowed_tools', 'allowed_tools': {{'mode': 'auto' or 'required', 'tools': [...]}}}}, "
            f"found {str(tool_choice)[:200]}"
        )
    return [str(name) for name in names]
