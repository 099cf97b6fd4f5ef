"""Looking for markers in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

#: longest run of white space that is held back because it may belong to the format
LONGEST_GAP = 64


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """(start, marker) of the marker that starts first in ``text``, of several at one place the longest; None without any."""
    best: tuple[int, str] | None = None
    for marker in markers:
        start = text.find(marker)
        if start >= 0 and (best is None or (start, -len(marker)) < (best[0], -len(best[1]))):
            best = (start, marker)
    return best


def held_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may still become one of ``markers``, all of which have one "<", at the start."""
    start = text.rfind("<")
    if start < 0:
        return 0
    end = text[start:]
    return len(end) if any(len(end) < len(marker) and marker.startswith(end) for marker in markers) else 0


def steady_length(text: str) -> int:
    """Length of ``text`` without the white space at its end, of which at most ``LONGEST_GAP`` characters are cut off."""
    return max(len(text.rstrip()), len(text) - LONGEST_GAP)
