"""Building the JSON arguments of a call from parameters that are written one by one."""

from __future__ import annotations

import json

from .calls import Calls

#: what a JSON value that is no string may begin with
_JSON_STARTS = frozenset('{["-0123456789tfn')


class ArgumentWriter:
    """Writes ``{"name": value, ...}`` piece by piece.

    A value that is certainly text is passed on as it comes, and so is one that is certainly JSON. Where that is not certain
    the value waits for its end: it is JSON if it can be read as that, otherwise text.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._opened = False
        self._broken = False
        self._text: bool | None = None  # how the value is written; None: not known yet
        self._waiting: list[str] = []
        self._checked = False
        self._blanks: list[str] = []  # white space behind JSON, left out unless more JSON follows

    @property
    def empty(self) -> bool:
        """True before the first parameter."""
        return not self._opened and not self._broken

    def begin(self, name: str, *, text: bool | None) -> None:
        """A parameter; ``text``: True for a string, False for any other JSON, None when its form must tell."""
        self._calls.arguments((", " if self._opened else "{") + json.dumps(name, ensure_ascii=False) + ": ")
        self._opened = True
        self._text, self._waiting, self._checked, self._blanks = text, [], False, []
        if text:
            self._calls.arguments('"')

    def value(self, piece: str) -> None:
        """More of the parameter's value."""
        if self._text:
            self._calls.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])
            return
        if self._text is False and not self._checked:
            piece = piece.lstrip()
            if not piece:
                return
            self._checked = True
            if piece[0] not in _JSON_STARTS:
                self._text = None  # the model did not write JSON
        if self._text is None:
            self._waiting.append(piece)
            return
        kept = piece.rstrip()
        if kept:
            self._calls.arguments("".join(self._blanks) + kept)
            self._blanks = []
        self._blanks.append(piece[len(kept) :])

    def end(self) -> None:
        """The value is complete."""
        if self._text:
            self._calls.arguments('"')
        elif self._text is None:
            self._calls.arguments(_json_or_text("".join(self._waiting)))
        elif not self._checked:
            self._calls.arguments('""')  # an empty value is no JSON
        self._waiting = []

    def cut(self) -> None:
        """The completion ends within the value."""
        self._calls.arguments("".join(self._waiting))

    def spoil(self, text: str) -> None:
        """Text where a parameter should be: it goes into the arguments, which then are no JSON, so that nobody runs the call."""
        if self.empty:
            self._calls.arguments("{")
        if not self._broken:
            self._calls.arguments("?")  # also what would be JSON by chance
        self._broken = True
        self._calls.arguments(text)

    def close(self) -> None:
        """The call is complete."""
        if not self._broken:
            self._calls.arguments("}" if self._opened else "{}")


def _json_or_text(value: str) -> str:
    """``value`` itself if it is JSON, else as a JSON string."""
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(value, ensure_ascii=False)
    return value.strip()


def _refuse(constant: str) -> None:
    """NaN and Infinity are no JSON."""
    raise ValueError(constant)
