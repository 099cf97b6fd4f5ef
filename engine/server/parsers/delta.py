"""What new text of a chat completion adds to the message."""

from __future__ import annotations

import secrets
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallDelta:
    """A part of one tool call. Its first part has ``id`` and the whole ``name``; the parts of ``arguments`` add up to JSON text."""

    index: int  # which call of the message, from 0
    id: str | None = None  # in the first part only
    name: str | None = None  # in the first part only
    arguments: str = ""  # text to append


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """New text, sorted by what it is. False when there is none."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


#: a delta without anything
NOTHING = Delta()


def new_call_id() -> str:
    """A fresh id for a tool call, in OpenAI's shape."""
    return f"call_{secrets.token_hex(12)}"
