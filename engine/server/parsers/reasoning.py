"""Splitting a completion into reasoning and answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .scan import LONGEST_GAP, first_marker, held_length, steady_length

_START, _INSIDE, _GAP, _AFTER = "start", "inside", "gap", "after"


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False  # the model reasons even when the prompt does not open the reasoning
    strip: bool = False  # white space at both ends of the reasoning and before the answer belongs to the format

    def is_open(self, prompt: str) -> bool | None:
        """Whether the completion of ``prompt`` begins inside the reasoning; None when its first characters must tell."""
        tail = prompt[-LONGEST_GAP:].rstrip()
        if tail.endswith(self.begin):
            return True
        if tail.endswith(self.end):
            return False
        return True if self.always else None


class ReasoningSplitter:
    """Splits one completion. The result does not depend on how the text is cut into pieces."""

    def __init__(self, form: ReasoningFormat, *, open_: bool | None, also_ends: Sequence[str] = ()) -> None:
        """``open_``: see ``ReasoningFormat.is_open``. ``also_ends``: markers that end the reasoning and belong to the answer."""
        self._form = form
        self._open = open_
        self._also = tuple(also_ends)
        self._state = _AFTER if open_ is False else _START
        self._held = ""
        self._skip = form.strip  # white space comes next that belongs to the format

    @property
    def reasoning(self) -> bool:
        """True while what comes next is (or may be) reasoning."""
        return self._state in (_START, _INSIDE)

    def push(self, text: str) -> tuple[str, str]:
        """(new reasoning, new text of the answer)."""
        if self._state == _AFTER:
            return "", text
        if self._state == _INSIDE and self._plain(text):
            return text, ""
        self._held += text
        reasoning = ""
        if self._state == _START:
            self._enter()
        if self._state == _INSIDE:
            reasoning = self._inside()
        return reasoning, self._answer()

    def _plain(self, text: str) -> bool:
        """The short way for most pieces: nothing is held, and nothing in ``text`` can begin a marker or belong to the format."""
        return not self._held and "<" not in text and not self._skip and not (self._form.strip and text[-1].isspace())

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the completion."""
        rest, self._held = self._held, ""
        if self._state == _INSIDE or (self._state == _START and self._open):
            return (rest[: steady_length(rest)] if self._form.strip else rest), ""
        return "", "" if self._state == _GAP else rest

    def _enter(self) -> None:
        """Find out what the completion begins with; an opening marker is dropped."""
        text = self._held.lstrip()
        begin = self._form.begin
        if text.startswith(begin) and len(self._held) - len(text) < LONGEST_GAP:
            self._state, self._held = _INSIDE, text[len(begin) :]
        elif not begin.startswith(text) or len(self._held) - len(text) >= LONGEST_GAP:  # nothing but white space may go on as both
            self._state = _INSIDE if self._open else _AFTER

    def _inside(self) -> str:
        """Take reasoning from the held text, up to its end."""
        if self._skip:
            self._held = self._held.lstrip()
            if not self._held:
                return ""
            self._skip = False
        found = first_marker(self._held, (self._form.end, *self._also))
        if found is None:
            keep = held_length(self._held, (self._form.end, *self._also))
            cut = len(self._held) - keep
            if self._form.strip:
                cut = steady_length(self._held[:cut])
            reasoning, self._held = self._held[:cut], self._held[cut:]
            return reasoning
        start, marker = found
        reasoning = self._held[:start]
        self._held = self._held[start:] if marker in self._also else self._held[start + len(marker) :]
        self._state = _GAP if self._form.strip else _AFTER
        return reasoning[: steady_length(reasoning)] if self._form.strip else reasoning

    def _answer(self) -> str:
        """Text of the answer in the held text."""
        if self._state == _GAP:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _AFTER
        if self._state != _AFTER:
            return ""
        text, self._held = self._held, ""
        return text
