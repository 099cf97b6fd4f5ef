"""Server-sent events out of bytes that are split anywhere."""

from __future__ import annotations


class EventSplitter:
    """Bytes in, the data of whole events out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are whole now, joined by a newline where an event has several lines of it."""
        data = self._rest + data
        if b"\r" in data:
            held = data.endswith(b"\r")  # its newline may be in the next bytes
            data = (data[:-1] if held else data).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if held else b"")
        parts = data.split(b"\n\n")
        self._rest = parts.pop()
        return [found for part in parts if (found := _data(part)) is not None]


def _data(event: bytes) -> bytes | None:
    if b"\n" not in event and event.startswith(b"data:"):  # as good as all
        return event[6:] if event[5:6] == b" " else event[5:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
