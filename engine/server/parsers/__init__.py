"""From the text of a chat completion to reasoning, content and tool calls. Nothing here imports torch."""

from __future__ import annotations

from .chat_parser import ChatParser
from .choice import check_tool_choice
from .delta import Delta, ToolCallDelta
from .force import reasoning_mode, tool_tag
from .make import make_parser, parser_factory
from .names import REASONING_FORMATS, TOOL_FORMATS, ParserNames, choose_parsers

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ChatParser",
    "Delta",
    "ParserNames",
    "ToolCallDelta",
    "check_tool_choice",
    "choose_parsers",
    "make_parser",
    "parser_factory",
    "reasoning_mode",
    "tool_tag",
]
