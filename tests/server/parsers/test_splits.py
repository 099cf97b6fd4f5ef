"""However the text is cut into pieces, the message is the same: over texts made of pieces of the formats."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.engine.server.parsers import REASONING_FORMATS, TOOL_FORMATS, ParserNames, make_parser
from tests.server.parsers.whole import TOOLS, parse

D = "｜DSML｜"
SNIPPETS = (
    ["<think>", "</think>", " ", "\n", "\n\n", " " * 70, "a", "{", "}", '"', "é", "1", "[1, 2]", "<", "</", ">", "`", "```json\n", "\n```"]
    + ["text", '{"city": "x"}', "function", "weather", "now", "city", "days", "functions.now:0"]
    + [f"<｜tool▁{x}｜>" for x in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]
    + [
        f"<{D}function_calls>",
        f"</{D}function_calls>",
        f'<{D}invoke name="weather">',
        f'<{D}invoke name="now">',
        f"</{D}invoke>",
        f"<{D}invoke",
    ]
    + [f'<{D}parameter name="{n}" string="{s}">' for n, s in (("city", "true"), ("days", "false"), ("days", "true"), ("x", "false"))]
    + [f"<{D}parameter", f"</{D}parameter>"]
    + [f"<|tool_{x}|>" for x in ("calls_section_begin", "calls_section_end", "call_begin", "call_argument_begin", "call_end")]
    + ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
)


@settings(max_examples=int(os.environ.get("RORQUAL_EXAMPLES", 250)), deadline=None)
@given(
    snippets=st.lists(st.sampled_from(SNIPPETS), max_size=24),
    cuts=st.lists(st.floats(0, 1), max_size=12),
    reasoning=st.sampled_from([None, *REASONING_FORMATS]),
    tools=st.sampled_from([None, *TOOL_FORMATS]),
    prompt=st.sampled_from(["", "<think>", "</think>"]),
    parallel=st.booleans(),
)
def test_the_cut_makes_no_difference(
    snippets: list[str], cuts: list[float], reasoning: str | None, tools: str | None, prompt: str, parallel: bool
) -> None:
    text = "".join(snippets)
    names = ParserNames(reasoning=reasoning, tools=tools)

    def message(pieces: list[str]) -> object:
        made = make_parser(names, prompt=prompt, tools=TOOLS if tools else (), parallel_tool_calls=parallel)
        return parse(made, pieces).parts()

    places = sorted({int(cut * len(text)) for cut in cuts} | {0, len(text)})
    whole = message([text])
    assert message([text[a:b] for a, b in zip(places, places[1:], strict=False)]) == whole
    assert message(list(text)) == whole
