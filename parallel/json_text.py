"""JSON that users wrote: what nests too deeply to be read is refused like what is no JSON, not by a RecursionError."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

#: what to say of it, with the fix
TOO_DEEP = "more lists and objects inside one another than can be read; flatten them"
#: a string, whose brackets count for nothing, or a bracket; a string without an end too, else a search would begin at each quote in it
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{\]}]', re.DOTALL)


def parse_json(text: str | bytes, *, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """What ``text`` says; bytes are UTF-8.

    Raises:
        json.JSONDecodeError: no JSON, or nested too deeply; then with the deepest place.
        UnicodeDecodeError: bytes that are no text.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        found = text if isinstance(text, str) else text.decode(json.detect_encoding(text))
        raise json.JSONDecodeError(TOO_DEEP, found, _deepest(found)) from None


def _deepest(text: str) -> int:
    """Where the innermost list or object begins."""
    depth = most = place = 0
    for part in _PARTS.finditer(text):
        if part[0] in "[{":
            depth += 1
            if depth > most:
                most, place = depth, part.start()
        elif part[0] in "]}":
            depth -= 1
    return place
