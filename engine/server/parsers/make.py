"""Making the parsers of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .chat_parser import ChatParser, ToolParser
from .choice import check_tool_choice
from .names import REASONING_FORMATS, ParserNames
from .reasoning import ReasoningSplitter
from .tools.calls import Calls
from .tools.dsml import DsmlParser
from .tools.glm import GlmParser
from .tools.sections import KIMI, DeepseekV3Parser, KimiK2Parser

_TOOL_PARSERS: dict[str, Callable[[Calls], ToolParser]] = {
    "deepseek_v3": DeepseekV3Parser,
    "deepseek_v31": DeepseekV3Parser,  # one parser: which of the two forms a model writes can be told from the text
    "deepseek_v32": DsmlParser,
    "glm47": GlmParser,
    "kimi_k2": KimiK2Parser,
}
#: markers that end the reasoning of a model which goes over to tool calls without closing it
_ALSO_END_REASONING = {"kimi_k2": (KIMI.section[0],)}


def parser_factory(
    names: ParserNames,
    *,
    prompt: str = "",
    tools: Sequence[dict[str, Any]] = (),
    tool_choice: str | dict[str, Any] = "auto",
    parallel_tool_calls: bool = True,
    separate_reasoning: bool = True,
) -> Callable[[], ChatParser]:
    """Makes the parsers of a request's completions: each of its ``n`` needs one of its own.

    Args:
        names: the server's parsers (``choose_parsers``).
        prompt: the rendered chat; its end tells whether the completion begins with reasoning.
        tools: the request's tools, OpenAI's shape. Without tools, and with ``tool_choice`` "none", no calls are looked for.
        tool_choice: OpenAI's: "none", "auto", "required" or ``{"type": "function", "function": {"name": ...}}``.
        parallel_tool_calls: False keeps the first call only.
        separate_reasoning: False leaves the reasoning with its markers in the content.

    Raises:
        ValueError: malformed tools or ``tool_choice`` (``check_tool_choice``), tools but no tool-call parser.
    """
    check_tool_choice(tools, tool_choice)
    wanted = bool(tools) and tool_choice != "none"
    if wanted and names.tools is None:
        raise ValueError(
            "tools need a tool-call parser, and this model has none by itself; start the server with --tool-call-parser "
            f"({', '.join(_TOOL_PARSERS)}) or send tool_choice 'none'"
        )
    tool_parser = _TOOL_PARSERS[names.tools] if wanted and names.tools is not None else None
    form = REASONING_FORMATS[names.reasoning] if names.reasoning is not None and separate_reasoning else None
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    also = _ALSO_END_REASONING.get(names.tools or "", ()) if wanted else ()
    is_open = form.is_open(prompt) if form is not None else None
    hidden = (tool_parser is not None and names.hidden_tools) or (form is not None and names.hidden_reasoning)

    def make() -> ChatParser:
        found = tool_parser(Calls(schemas, first_only=not parallel_tool_calls)) if tool_parser is not None else None
        splitter = ReasoningSplitter(form, open_=is_open, also_ends=also) if form is not None else None
        return ChatParser(splitter, found, needs_special_tokens=hidden)

    return make


def make_parser(names: ParserNames, **options: Any) -> ChatParser:
    """One parser of ``parser_factory``."""
    return parser_factory(names, **options)()
