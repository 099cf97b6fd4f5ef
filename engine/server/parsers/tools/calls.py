"""Collecting what a tool parser finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..delta import NOTHING, Delta, ToolCallDelta, new_call_id

#: JSON schema types of which no value is a string
_NOT_TEXT = frozenset({"number", "integer", "boolean", "array", "object", "null"})


class Calls:
    """Content and calls since the last ``take``."""

    def __init__(self, schemas: Mapping[str, Any], *, first_only: bool = False) -> None:
        """``schemas``: JSON schema of the arguments by tool; ``first_only``: calls after the first are left out."""
        self._schemas = schemas
        self._first_only = first_only
        self._content: list[str] = []
        self._parts: list[ToolCallDelta] = []
        self._muted = False
        self.count = 0

    def content(self, text: str) -> None:
        """Text outside of calls."""
        self._content.append(text)

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call of ``name`` begins; later arguments are its."""
        self._muted = self._first_only and self.count > 0
        if not self._muted:
            self._parts.append(ToolCallDelta(index=self.count, id=call_id or new_call_id(), name=name))
            self.count += 1

    def arguments(self, text: str) -> None:
        """More of the arguments' JSON text."""
        if text and not self._muted:
            self._parts.append(ToolCallDelta(index=self.count - 1, arguments=text))

    def is_text(self, name: str, parameter: str) -> bool | None:
        """Whether a parameter of tool ``name`` is a string: True for nothing else, False for anything else, None for unknown or both."""
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        found = properties.get(parameter) if isinstance(properties, dict) else None
        kinds = found.get("type") if isinstance(found, dict) else None
        listed = {kinds} if isinstance(kinds, str) else {k for k in kinds if isinstance(k, str)} if isinstance(kinds, list) else set()
        if listed == {"string"}:
            return True
        return False if listed and listed <= _NOT_TEXT else None

    def take(self) -> Delta:
        """What came since the last call."""
        if not self._content and not self._parts:
            return NOTHING
        delta = Delta(content="".join(self._content), tool_calls=_joined(self._parts))
        self._content, self._parts = [], []
        return delta


def _joined(parts: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Neighbouring parts of one call as one."""
    joined: list[ToolCallDelta] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and last.index == part.index:
            joined[-1] = ToolCallDelta(index=last.index, id=last.id, name=last.name, arguments=last.arguments + part.arguments)
        else:
            joined.append(part)
    return tuple(joined)
