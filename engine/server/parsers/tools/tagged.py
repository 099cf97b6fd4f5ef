"""What the parsers of calls in tags share: a function, its arguments one by one, and the ways out of a call."""

from __future__ import annotations

from abc import abstractmethod

from .calls import Calls
from .machine import Machine
from .values import ArgumentWriter


class TaggedMachine(Machine):
    """A machine whose calls hold named values between tags. A format gives the states, ``_content`` and ``_value`` among them."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._function = ""
        self._writer = ArgumentWriter(calls)

    def _begin(self, function: str) -> None:
        """A call of ``function`` begins."""
        self._function = function
        self._calls.begin(function)
        self._writer = ArgumentWriter(self._calls)

    def _leave(self) -> None:
        """Behind a call."""
        self._gap = True
        self._state = self._content

    def _take_value(self, end: str) -> bool:
        """Pass a value's text on up to its ``end``; True when that was there, and the value is complete."""
        text, marker = self._until((end,))
        if text:
            self._writer.value(text)
        if marker is None:
            return False
        self._writer.end()
        return True

    def _take_junk(self, end: str) -> bool:
        """Text of a call that cannot be read, up to the call's ``end``; True when that was there."""
        text, marker = self._until((end,))
        if text:
            self._writer.spoil(text)
        return marker is not None

    @abstractmethod
    def _value(self) -> bool:
        """The state inside a value: a completion that ends here has a value that is cut."""

    def _end(self, rest: str) -> None:
        if self._state == self._content and not (self._gap and not rest.strip()):
            self._calls.content(rest)
        elif self._state == self._value:
            self._writer.cut()
