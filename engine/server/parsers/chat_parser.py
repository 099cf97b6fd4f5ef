"""From the text of one chat completion to the parts of its message."""

from __future__ import annotations

from typing import Protocol

from .delta import NOTHING, Delta
from .reasoning import ReasoningSplitter


class ToolParser(Protocol):
    """Finds tool calls in the answer of one completion (its text without the reasoning)."""

    @property
    def calls(self) -> int:
        """Calls begun so far."""

    def push(self, text: str) -> Delta:
        """What new text adds: content and parts of calls."""

    def finish(self) -> Delta:
        """What was held back, at the end of the completion."""


class ChatParser:
    """Parses one completion. Its deltas add up to the same message however the text is cut into pieces.

    Text is held back only while it may be the beginning of a marker, so a stream is as fast as without a parser.
    """

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolParser | None, *, needs_special_tokens: bool = False) -> None:
        """``None`` for what shall not be looked for."""
        self._reasoning, self._tools = reasoning, tools
        #: the completion must be made with ``skip_special_tokens=False``: the markers are special tokens
        self.needs_special_tokens = needs_special_tokens

    @property
    def calls(self) -> int:
        """Tool calls begun so far. With at least one, the finish reason "stop" is reported as "tool_calls"."""
        return self._tools.calls if self._tools is not None else 0

    @property
    def in_reasoning(self) -> bool:
        """True while what comes next is (or may be) reasoning: for counting reasoning tokens."""
        return self._reasoning is not None and self._reasoning.reasoning

    def push(self, text: str) -> Delta:
        """What new text adds to the message."""
        if not text:
            return NOTHING
        reasoning, answer = ("", text) if self._reasoning is None else self._reasoning.push(text)
        return self._join(reasoning, answer)

    def finish(self) -> Delta:
        """What was held back. Call it once, after the last text."""
        reasoning, answer = ("", "") if self._reasoning is None else self._reasoning.finish()
        delta = self._join(reasoning, answer)
        if self._tools is None:
            return delta
        last = self._tools.finish()
        return Delta(reasoning=delta.reasoning, content=delta.content + last.content, tool_calls=delta.tool_calls + last.tool_calls)

    def _join(self, reasoning: str, answer: str) -> Delta:
        if self._tools is None or not answer:
            return Delta(reasoning=reasoning, content=answer)
        found = self._tools.push(answer)
        return Delta(reasoning=reasoning, content=found.content, tool_calls=found.tool_calls) if reasoning else found
