"""Large bodies. Decoding one is a call that nothing interrupts: it must not hold up the other requests."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from .errors import ApiError

#: bytes from which on a body is looked through before it is decoded
LARGE = 1 << 20
#: bytes of the limit of a body (--max-request-bytes) for each value that it may hold: a token id with its comma and space has some
#: seven. Texts, lists and objects take longer to make
_BYTES_PER_VALUE, _BYTES_PER_TEXT, _BYTES_PER_LIST = 8, 128, 128
_PIECE = 128 << 10  # bytes of an array that are decoded at a time


async def check_large(data: bytes, max_request_bytes: int) -> None:
    """Refuse a body that would take long to decode. Other tasks get their turn meanwhile.

    Raises:
        ApiError: 413, too many values.
    """
    for escaped in (b"\\\\", b'\\"') if b"\\" in data else ():
        data = data.replace(escaped, b"")
        await asyncio.sleep(0)
    _check(data.count(b'"') // 2, "texts", max_request_bytes // _BYTES_PER_TEXT)
    await asyncio.sleep(0)
    outside = b"".join(data.split(b'"')[::2])
    await asyncio.sleep(0)
    _check(outside.count(b"[") + outside.count(b"{"), "lists and objects", max_request_bytes // _BYTES_PER_LIST)
    _check(outside.count(b","), "values", max_request_bytes // _BYTES_PER_VALUE)


def _check(found: int, what: str, most: int) -> None:
    if found > most:
        raise ApiError(413, f"the request holds {found} {what}; this server takes {most}, which grow with --max-request-bytes")


class IdsApart:
    """Decodes bodies of one kind with the array of token ids in one of their fields in pieces; other tasks get their turn between them."""

    def __init__(self, kind: type, field: str) -> None:
        self._field = field
        twin = msgspec.defstruct(kind.__name__, [(field, msgspec.Raw)], bases=(kind,), kw_only=True)
        self._rest = msgspec.json.Decoder(twin)
        self._flat, self._nested = msgspec.json.Decoder(list[int]), msgspec.json.Decoder(list[list[int]])

    async def decode(self, data: bytes) -> Any:
        """The body; None, where it has to be decoded as usual: the field is no array of ids or of lists of them, or something is wrong."""
        try:
            found = self._rest.decode(data)
            array = bytes(cast(msgspec.Raw, getattr(found, self._field))).strip()
            if not array.startswith(b"[") or b'"' in array or b"{" in array:
                return None
            setattr(found, self._field, await self._ids(array))
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        return found

    async def _ids(self, array: bytes) -> list[Any]:
        nested = array.find(b"[", 1) > 0
        decoder, mark = (self._nested, b"]") if nested else (self._flat, b",")
        values: list[Any] = []
        start, end = 1, len(array) - 1
        while start < end:
            stop = end
            if end - start > _PIECE:
                stop = array.rfind(mark, start, start + _PIECE)
                stop = array.find(mark, start + _PIECE, end) if stop < 0 else stop
                stop = end if stop < 0 else stop + nested  # a list is whole with its mark
            values += decoder.decode(b"[" + array[start:stop] + b"]")
            await asyncio.sleep(0)
            start = array.find(b",", stop, end) + 1 or end
        return values
