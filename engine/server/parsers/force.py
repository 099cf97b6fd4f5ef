"""What a completion must look like so that a required tool call is made: input for structured output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .choice import check_tool_choice
from .names import REASONING_FORMATS, ParserNames

#: xgrammar's names of the formats
_FORMATS = {
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "deepseek_v3_1",
    "deepseek_v32": "deepseek_v3_2",
    "glm47": "glm_4_7",
    "kimi_k2": "kimi",
}


def reasoning_mode(names: ParserNames, prompt: str) -> str:
    """How the completion of ``prompt`` begins: "enabled" inside the reasoning, "disabled" behind it, "auto" with "<think>" or without.

    Structured output holds for what comes behind the reasoning.
    """
    if names.reasoning is None:
        return "disabled"
    is_open = REASONING_FORMATS[names.reasoning].is_open(prompt)
    return {True: "enabled", False: "disabled", None: "auto"}[is_open]


def tool_tag(
    names: ParserNames,
    *,
    prompt: str = "",
    tools: Sequence[dict[str, Any]] = (),
    tool_choice: str | dict[str, Any] = "auto",
    parallel_tool_calls: bool = True,
) -> dict[str, Any] | None:
    """Keyword arguments of ``xgrammar.get_model_structural_tag``, None where the model is free.

    It is free with ``tool_choice`` "none", and with "auto" unless a tool is ``strict``: then its calls must match its schema.

    Raises:
        ValueError: a malformed ``tool_choice``, one without tools, one that names a tool which the request does not have, or
            no tool-call parser.
    """
    check_tool_choice(tools, tool_choice)
    strict = any(tool["function"].get("strict") for tool in tools)
    if tool_choice == "none" or (tool_choice == "auto" and not strict):
        return None
    if names.tools is None:
        known = ", ".join(_FORMATS)
        raise ValueError(f"tool_choice {tool_choice!r} needs a tool-call parser; start the server with --tool-call-parser ({known})")
    return {
        "model": _FORMATS[names.tools],
        "tools": [_described(tool, loose=tool_choice == "auto") for tool in tools],
        "tool_choice": tool_choice,
        "reasoning": reasoning_mode(names, prompt),
        "parallel_tool_calls": parallel_tool_calls,
    }


def _described(tool: dict[str, Any], *, loose: bool) -> dict[str, Any]:
    """A tool as xgrammar takes it; with ``loose`` arguments of a tool that is not strict may be any JSON object."""
    function = {key: tool["function"][key] for key in ("name", "parameters", "strict") if tool["function"].get(key) is not None}
    if loose:
        function["strict"] = bool(function.get("strict"))
    return {"type": "function", "function": function}
