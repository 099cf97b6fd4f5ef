"""Calls in XML-like tags without types: GLM 4.5 to 5."""

from __future__ import annotations

from .calls import Calls
from .machine import LONGEST_HEADER
from .tagged import TaggedMachine

BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class GlmParser(TaggedMachine):
    """``<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>``, white space between the tags allowed.

    The tool's schema tells whether a value is text; where it does not, a value that can be read as JSON is JSON.
    """

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._key = ""

    def _content(self) -> bool:
        marker = self._outside((BEGIN,))
        if marker is not None:
            self._state = self._name
        return marker is not None

    def _header(self, *markers: str) -> tuple[str, str] | None:
        """Take text up to the first of ``markers`` and the marker; None until there is one. An endless header gives an empty marker."""
        places = [(self._held.find(m, 0, LONGEST_HEADER), m) for m in markers]
        found = min((place for place in places if place[0] >= 0), default=None)
        if found is None:
            return ("", "") if len(self._held) >= LONGEST_HEADER else None
        start, marker = found
        text, self._held = self._held[:start], self._held[start + len(marker) :]
        return text, marker

    def _name(self) -> bool:
        found = self._header(_KEY, _END)
        if found is None:
            return False
        function = found[0].strip()
        if not function:  # no call without a name
            self._leave()
            return True
        self._begin(function)
        if found[1] == _END:
            self._writer.close()
            self._leave()
        else:
            self._state = self._in_key
        return True

    def _in_key(self) -> bool:
        found = self._header(_KEY_END)
        if found is None:
            return False
        self._key = found[0].strip()
        self._state = self._before_value if found[1] else self._junk
        return True

    def _before_value(self) -> bool:
        marker = self._next((_VALUE,))
        if marker == _VALUE:
            self._writer.begin(self._key, text=self._calls.is_text(self._function, self._key))
            self._state = self._value
        elif marker is not None:
            self._state = self._junk
        return marker is not None

    def _value(self) -> bool:
        if not self._take_value(_VALUE_END):
            return False
        self._state = self._between
        return True

    def _between(self) -> bool:
        marker = self._next((_KEY, _END))
        if marker == _KEY:
            self._state = self._in_key
        elif marker == _END:
            self._writer.close()
            self._leave()
        elif marker is not None:
            self._state = self._junk
        return marker is not None

    def _junk(self) -> bool:
        """The rest of a call that cannot be read."""
        if not self._take_junk(_END):
            return False
        self._writer.close()
        self._leave()
        return True
