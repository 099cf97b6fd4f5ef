"""What a person reads: prompts, text as it comes, tables."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

#: characters of a prompt that are shown
PROMPT_CHARS = 200


def shorten(text: str, limit: int = PROMPT_CHARS) -> str:
    """``text`` with its middle left out when it is longer than ``limit``."""
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Aligned columns; numbers to the right, the first column and texts to the left."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(header[i]), *(len(row[i]) for row in cells)) if cells else len(header[i]) for i in range(len(header))]
    numeric = [all(isinstance(row[i], (int, float)) or row[i] is None for row in rows) for i in range(len(header))]
    lines = [list(header), *cells]
    return "\n".join(
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True)).rstrip() for line in lines
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


class StreamPrinter:
    """Prints texts that grow at the same time.

    One text is printed as it comes. Of several, each is printed line by line (a line ends at a newline or at the width
    of the screen), with its label in front, so that they can be told apart; empty lines are left out.
    """

    def __init__(self, labels: Sequence[str], out: TextIO | None = None, width: int | None = None) -> None:
        self._labels = list(labels)
        self._out = out or sys.stdout
        self._held = [""] * len(self._labels)
        columns = width or shutil.get_terminal_size((120, 24)).columns
        self._room = max(20, columns - 1 - max((len(label) for label in self._labels), default=0))

    def add(self, place: int, text: str, finished: bool) -> None:
        """New text of one of them."""
        if len(self._labels) == 1:
            self._out.write(text + ("\n" if finished else ""))
            self._out.flush()
            return
        *lines, rest = (self._held[place] + text).split("\n")
        for line in lines:
            while line:
                line = self._put(place, line)
        while len(rest) > self._room or (finished and rest):
            rest = self._put(place, rest)
        self._held[place] = rest
        self._out.flush()

    def _put(self, place: int, line: str) -> str:
        """Print as much of ``line`` as fits, up to a space if there is one; the rest of it."""
        cut = len(line)
        if cut > self._room:
            space = line.rfind(" ", 1, self._room + 1)
            cut = space if space > 0 else self._room
        if line[:cut].strip():
            self._out.write(f"{self._labels[place]} {line[:cut].strip()}\n")
        return line[cut:]
