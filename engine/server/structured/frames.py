"""How an HTTP process and its compiling process talk: a length, then msgpack."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[str, Any])
HEADER = _LENGTH.size


def pack(message: dict[str, Any]) -> bytes:
    """One frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def length(header: bytes) -> int:
    """Bytes of the body behind ``header``."""
    found: int = _LENGTH.unpack(header)[0]
    return found


def unpack(body: bytes) -> dict[str, Any]:
    """The message of a frame's body.

    Raises:
        ValueError: bytes that are none.
    """
    return _decoder.decode(body)


class Frames:
    """Frames out of a stream of bytes."""

    def __init__(self) -> None:
        self._held = bytearray()

    def push(self, data: bytes) -> list[dict[str, Any]]:
        """Messages that are complete with ``data``."""
        self._held += data
        found = []
        while len(self._held) >= HEADER and len(self._held) >= HEADER + (n := length(bytes(self._held[:HEADER]))):
            found.append(unpack(bytes(self._held[HEADER : HEADER + n])))
            del self._held[: HEADER + n]
        return found
