"""The lines of a text file, as those who write JSON lines count them."""

from __future__ import annotations

from pathlib import Path


def numbered_lines(path: str | Path) -> list[tuple[int, str]]:
    """(number from 1, line) of every line with something on it.

    Only line feeds end a line: U+2028, U+0085, form feeds and the like, at which ``str.splitlines`` cuts, may stand in JSON strings.

    Raises:
        ValueError: not UTF-8.
        OSError: the file cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
