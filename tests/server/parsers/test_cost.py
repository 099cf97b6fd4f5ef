"""Answers and requests that would cost far more than their size if anything in them were looked at again and again."""

from __future__ import annotations

import time

import pytest

from rorqual.engine.server.parsers import ParserNames, check_tool_choice, make_parser
from tests.server.parsers.whole import TOOLS

#: minutes where the cost is quadratic, a fraction of a second where it is not
FASTER_THAN_S = 10.0


@pytest.mark.parametrize(
    ("name", "start", "end", "arguments"),
    [
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "now\n{}<｜tool▁call▁end｜>", "{}"),
        ("glm47", "<tool_call>weather<arg_key>days</arg_key><arg_value>1", "</arg_value></tool_call>", '{"days": 1}'),
    ],
)
def test_endless_blanks_in_a_call(name, start, end, arguments):
    parser = make_parser(ParserNames(tools=name), tools=TOOLS)
    parts = [parser.push(start)]
    began = time.monotonic()
    parts += [parser.push(" " * 128) for _ in range(80_000)]
    parts += [parser.push(end), parser.finish()]
    assert time.monotonic() - began < FASTER_THAN_S
    assert parser.calls == 1 and "".join(call.arguments for part in parts for call in part.tool_calls) == arguments


class Name(str):
    """A name that counts how often it is compared with another."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)


def test_a_choice_of_very_many_tools():
    """Each name was compared with those of all tools."""
    tools = [{"type": "function", "function": {"name": Name(f"tool_{place}")}} for place in range(1000)]
    wanted = [{"type": "function", "function": {"name": Name(f"tool_{place % 1000}")}} for place in range(5000)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": wanted}}
    Name.compared = 0
    check_tool_choice(tools, choice)
    assert 0 < Name.compared < 50_000  # about one for each name that is looked up; else 2.5 million
    wanted.append({"function": {"name": "gone"}})
    with pytest.raises(ValueError, match="'gone'"):
        check_tool_choice(tools, choice)
