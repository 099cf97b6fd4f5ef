"""What rank 0 tells an HTTP process when it starts it: one line on its standard input, which then stays open as a sign of life."""

from __future__ import annotations

import msgspec

from .config import ServerConfig


class Start(msgspec.Struct, kw_only=True):
    """The first line. It goes by a pipe, not by the command line: that is where keys would be seen."""

    config: ServerConfig
    address: str  # of the engine's socket
    name: str  # "http-0", "http-1", ...
    descriptor: int  # of the listening socket, inherited
    counts_folder: str | None = None  # shared by the HTTP processes of a server


def encode_start(start: Start) -> bytes:
    """The line, with its end."""
    return msgspec.json.encode(start) + b"\n"


def decode_start(line: bytes) -> Start:
    """The inverse of ``encode_start``.

    Raises:
        ValueError: it is none.
    """
    return msgspec.json.decode(line, type=Start)
