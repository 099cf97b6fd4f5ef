"""What the tool parsers share: a state machine over text that arrives in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from ..delta import NOTHING, Delta
from ..scan import first_marker, held_length, steady_length
from .calls import Calls

#: a call header (name, tag) of more characters than this is no header
LONGEST_HEADER = 4096


class Machine(ABC):
    """A parser as states. A state is a method that takes what it can from ``_held``.

    It returns True when it went on to another state (which then runs), False when it needs more text. Whether it does may
    depend on the whole text so far only, never on how it was cut: then the result cannot either.

    A format gives the first state, ``_content``, and ``_end``; a class that lacks one of them cannot be made.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._held = ""
        self._state: Callable[[], bool] = self._content
        self._gap = False  # white space comes next that belongs to the format

    @property
    def calls(self) -> int:
        """Calls begun so far."""
        return self._calls.count

    def push(self, text: str) -> Delta:
        """What new text adds."""
        if not self._held and "<" not in text and not text[-1].isspace() and not self._gap and self._state == self._content:
            return Delta(content=text)  # the short way for most pieces
        self._held += text
        while self._held and self._state():
            pass
        return self._calls.take()

    def finish(self) -> Delta:
        """What was held back at the end: text that is no marker after all. Within a call, unfinished markup is dropped."""
        rest, self._held = self._held, ""
        self._end(rest)
        return self._calls.take() or NOTHING

    @abstractmethod
    def _content(self) -> bool:
        """The first state: text outside of calls."""

    @abstractmethod
    def _end(self, rest: str) -> None:
        """The completion ends with ``rest`` held back, which may be empty, in whatever state."""

    def _until(self, markers: Sequence[str]) -> tuple[str, str | None]:
        """Take text up to the first of ``markers`` and the marker; without one, all text that can be no beginning of one."""
        found = first_marker(self._held, markers)
        if found is None:
            cut, marker = len(self._held) - held_length(self._held, markers), None
            text, self._held = self._held[:cut], self._held[cut:]
        else:
            cut, marker = found
            text, self._held = self._held[:cut], self._held[cut + len(marker) :]
        return text, marker

    def _next(self, markers: Sequence[str]) -> str | None:
        """Take white space and one of ``markers`` behind it. Empty when something else comes, None when that is not known yet."""
        self._held = self._held.lstrip()
        for marker in markers:
            if self._held.startswith(marker):
                self._held = self._held[len(marker) :]
                return marker
        return None if any(marker.startswith(self._held) for marker in markers) else ""

    def _outside(self, markers: Sequence[str]) -> str | None:
        """Pass text on as content until one of ``markers``, which is taken; white space around it belongs to the format."""
        if self._gap:
            self._held = self._held.lstrip()
            if not self._held:
                return None
        text, marker = self._until(markers)
        if marker is None:
            text, kept = text[: steady_length(text)], text[steady_length(text) :]
            self._held = kept + self._held
        else:
            text = text[: steady_length(text)]
        if text:
            self._gap = False
            self._calls.content(text)
        if marker is not None:
            self._gap = True
        return marker
