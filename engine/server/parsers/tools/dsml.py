"""Calls in DSML tags: DeepSeek V3.2."""

from __future__ import annotations

import re

from .machine import LONGEST_HEADER
from .tagged import TaggedMachine

_DSML = "｜DSML｜"
SECTION, SECTION_END = f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"
_INVOKE, _INVOKE_END = f"<{_DSML}invoke", f"</{_DSML}invoke>"
_PARAMETER, _PARAMETER_END = f"<{_DSML}parameter", f"</{_DSML}parameter>"

#: the rest of an opening tag: no ">" outside of quotes
_TAG = re.compile(r'(?:[^">]++|"[^"]*+")*+>')
_NAME = re.compile(r'\sname="([^"]*)"')
_STRING = re.compile(r'\sstring="(true|false)"')


class DsmlParser(TaggedMachine):
    """``<invoke name=...>`` blocks of ``<parameter name=... string="true|false">`` values, or of one JSON object."""

    def _content(self) -> bool:
        marker = self._outside((SECTION, SECTION_END, _INVOKE))
        if marker == _INVOKE:
            self._state = self._invoke
        return marker is not None

    def _tag(self) -> str | None:
        """Take the rest of an opening tag; None until it is complete, empty for what is no tag."""
        found = _TAG.match(self._held, 0, LONGEST_HEADER)
        if found is None:
            return "" if len(self._held) >= LONGEST_HEADER else None
        self._held = self._held[found.end() :]
        return found.group()

    def _invoke(self) -> bool:
        """The opening tag of a call."""
        tag = self._tag()
        if tag is None:
            return False
        name = _NAME.search(tag)
        if name is None:
            self._state = self._content  # no call without a name
            return True
        self._begin(name.group(1))
        self._state = self._body
        return True

    def _body(self) -> bool:
        """Between the parameters of a call."""
        marker = self._next((_PARAMETER, _INVOKE_END))
        if marker is None:
            return False
        if marker == _PARAMETER:
            self._state = self._parameter
        elif marker == _INVOKE_END:
            self._writer.close()
            self._leave()
        else:
            self._state = self._json if self._held[0] == "{" and self._writer.empty else self._junk
        return True

    def _parameter(self) -> bool:
        """The opening tag of a parameter."""
        tag = self._tag()
        if tag is None:
            return False
        name, string = _NAME.search(tag), _STRING.search(tag)
        if name is None or string is None:
            self._writer.spoil(_PARAMETER + tag)
            self._state = self._junk
            return True
        said, declared = string.group(1) == "true", self._calls.is_text(self._function, name.group(1))
        # a tag that contradicts the tool's schema: the value must tell
        self._writer.begin(name.group(1), text=said if declared in (None, said) else None)
        self._state = self._value
        return True

    def _value(self) -> bool:
        if not self._take_value(_PARAMETER_END):
            return False
        self._state = self._body
        return True

    def _json(self) -> bool:
        """A call whose whole body is a JSON object; it is passed on as it comes."""
        text, marker = self._until((_INVOKE_END,))
        self._calls.arguments(text)
        if marker is not None:
            self._leave()
        return marker is not None

    def _junk(self) -> bool:
        """The rest of a call that cannot be read."""
        if not self._take_junk(_INVOKE_END):
            return False
        self._leave()
        return True
