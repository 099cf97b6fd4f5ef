"""Messages put together from what a parser gives, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rorqual.engine.server.parsers import ChatParser, Delta, ParserNames, make_parser

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


class Whole:
    """A message: reasoning, content, calls as (name, arguments) and their ids."""

    def __init__(self) -> None:
        self.reasoning = self.content = ""
        self.calls: list[list[str]] = []
        self.ids: list[str] = []

    def add(self, delta: Delta) -> None:
        assert bool(delta) == bool(delta.reasoning or delta.content or delta.tool_calls)
        self.reasoning += delta.reasoning
        self.content += delta.content
        for part in delta.tool_calls:
            if part.name is not None:
                assert part.index == len(self.calls) and part.id
                self.calls.append([part.name, ""])
                self.ids.append(part.id)
            else:
                assert part.id is None
            self.calls[part.index][1] += part.arguments

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Whole)
        return self.parts() == other.parts()

    def __repr__(self) -> str:
        return repr(self.parts())

    def parts(self) -> tuple[Any, ...]:
        return self.reasoning, self.content, [tuple(call) for call in self.calls]


def parse(parser: ChatParser, pieces: Iterable[str]) -> Whole:
    whole = Whole()
    for piece in pieces:
        whole.add(parser.push(piece))
    whole.add(parser.finish())
    assert parser.calls == len(whole.calls)
    return whole


def parse_text(reasoning: str | None, calls: str | None, text: str, *, split: bool = False, **options: Any) -> Whole:
    """``text`` at once, or a character at a time."""
    options.setdefault("tools", TOOLS if calls else ())
    parser = make_parser(ParserNames(reasoning=reasoning, tools=calls), **options)
    return parse(parser, text if split else [text])
