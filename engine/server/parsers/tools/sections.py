"""Calls whose arguments are JSON text between marker tokens: DeepSeek V3, R1 and V3.1, Kimi K2."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from .calls import Calls
from .machine import LONGEST_HEADER, Machine

_FENCE = "```"
#: white space and backticks at the end of arguments that may be a closing fence
_LONGEST_FENCE = 64


@dataclass(frozen=True, kw_only=True)
class Markers:
    """The marker tokens of a format."""

    section: tuple[str, ...]  # begin and end of the section that holds the calls; text around it is content
    begin: str  # before each call
    separator: str  # between its header and its arguments
    end: str  # after each call


DEEPSEEK = Markers(
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    begin="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
KIMI = Markers(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_section_begin|>", "<|tool_call_section_end|>"),
    begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
)


class SectionParser(Machine):
    """Calls as ``begin`` header ``separator`` arguments ``end``; arguments are passed on as they come.

    A format gives its ``markers``, and what a header says.
    """

    markers: Markers

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._some = False  # this call has arguments
        self._fenced = False

    @abstractmethod
    def _header(self, header: str) -> None:
        """Begin the call that ``header`` names: ``_begin``, or a state that finds the name out."""

    def _content(self) -> bool:
        marker = self._outside((*self.markers.section, self.markers.begin))
        if marker == self.markers.begin:
            self._state = self._in_header
        return marker is not None

    def _in_header(self) -> bool:
        """The text before the arguments."""
        found = self._held.find(self.markers.separator, 0, LONGEST_HEADER)
        end = self._held.find(self.markers.end, 0, LONGEST_HEADER)
        if 0 <= end and (found < 0 or end < found):  # no arguments: a header only
            header, self._held = self._held[:end].strip(), self._held[end:]
        elif found >= 0:
            header, self._held = self._held[:found].strip(), self._held[found + len(self.markers.separator) :]
        elif len(self._held) >= LONGEST_HEADER:
            self._state = self._content  # no call at all
            return True
        else:
            return False
        self._some = self._fenced = False
        self._header(header)
        return True

    def _begin(self, name: str, call_id: str | None = None) -> None:
        """The call's name is known; its arguments follow."""
        self._calls.begin(name, call_id)
        self._state = self._open

    def _open(self) -> bool:
        """The beginning of the arguments: white space and an opening fence are left out."""
        self._held = self._held.lstrip()
        if self._held.startswith(_FENCE):
            line = self._held.find("\n", 0, LONGEST_HEADER)
            brace = self._held.find("{", 0, LONGEST_HEADER)
            if line < 0 and brace < 0:
                return self._held_too_long()
            self._held = self._held[line + 1 if line >= 0 and not 0 <= brace < line else brace :]
            self._fenced = True
        elif not self._held or _FENCE.startswith(self._held):
            return False
        self._state = self._arguments
        return True

    def _held_too_long(self) -> bool:
        """A fence whose first line never ends is no fence."""
        if len(self._held) < LONGEST_HEADER:
            return False
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        text, marker = self._until((self.markers.end, self.markers.begin, *self.markers.section))
        cut = max(len(text.rstrip("` \t\r\n" if self._fenced else None)), len(text) - _LONGEST_FENCE)
        text, rest = text[:cut], text[cut:]
        self._some = self._some or bool(text)
        self._calls.arguments(text)
        if marker is None:
            self._held = rest + self._held
            return False
        self._close()
        self._gap = True
        self._state = self._in_header if marker == self.markers.begin else self._content
        return True

    def _close(self) -> None:
        """The call is complete."""
        if not self._some:
            self._calls.arguments("{}")

    def _end(self, rest: str) -> None:
        if self._state == self._content and not (self._gap and not rest.strip()):
            self._calls.content(rest)


class DeepseekV3Parser(SectionParser):
    """DeepSeek V3 and R1 (``function<sep>NAME``, then fenced JSON) and V3.1 (``NAME<sep>JSON``)."""

    markers = DEEPSEEK

    def _header(self, header: str) -> None:
        if header != "function":
            self._begin(header)
        else:
            self._state = self._name

    def _name(self) -> bool:
        """The line with the name (V3), unless the arguments come at once: then the function is called "function" (V3.1)."""
        line = self._held = self._held.lstrip()  # blanks are not looked at again with all that follows
        if not line:
            return False
        if line.startswith("{"):
            self._begin("function")
            return True
        ends = [i for i in (line.find("\n"), line.find("{"), line.find(_FENCE), line.find(self.markers.end)) if 0 <= i < LONGEST_HEADER]
        if not ends and len(line) < LONGEST_HEADER:
            return False
        # a fence or a marker may still be cut in the middle: neither matters before it is complete
        cut = min(ends, default=LONGEST_HEADER)
        self._held = line[cut:]
        self._begin(line[:cut].strip())
        return True


class KimiK2Parser(SectionParser):
    """Kimi K2: the header is the id of the call, ``functions.NAME:INDEX``."""

    markers = KIMI

    def _header(self, header: str) -> None:
        name, colon, index = header.rpartition(":")
        if not colon or not index.isdigit():
            name = header
        name = name.removeprefix("functions.")
        self._begin(name, header if name != header else f"functions.{name}:{self._calls.count}")
