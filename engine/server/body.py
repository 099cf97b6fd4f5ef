"""Reading and decoding the body of a request, within limits of size and time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import nullcontext
from typing import Any, TypeVar

import msgspec

from ..collector import no_collection
from .errors import ApiError, shorten
from .http_settings import HttpSettings
from .large import LARGE, IdsApart, check_large

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_decoders: dict[type, Any] = {}
_apart: dict[type, IdsApart] = {}
_PLACE = re.compile(r"^(.*) - at `\$\.?(.*)`$", re.DOTALL)


async def read_body(headers: Any, receive: Receive, config: HttpSettings) -> bytes:
    """The whole body, which can be decoded in a short time.

    Raises:
        ApiError: 413 too large or too full, 408 too slow, 415 not JSON by its content type, 499 the client has gone.
    """
    check_type(headers.get("content-type"))
    limit = config.max_request_bytes
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(int(length[:20]), limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(499, "the client closed the connection before its request was complete")
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_large(size, limit)
                parts.append(part)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        seconds = config.body_timeout
        raise ApiError(408, f"the body has not arrived within {seconds:g} s; {size} bytes came (--body-timeout)") from None
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    if size > LARGE:
        await check_large(data, limit)
    return data


async def decode_ids(kind: type[T], field: str, data: bytes) -> T:
    """``decode`` of a body whose ``field`` may be an array of very many token ids."""
    if len(data) > LARGE:
        apart = _apart.get(kind)
        if apart is None:
            apart = _apart[kind] = IdsApart(kind, field)
        found: T | None = await apart.decode(data)
        if found is not None:
            return found
    return decode(kind, data)


def check_type(content_type: str | None) -> None:
    """Raise ApiError 415 unless the content type says JSON: a browser may send other types to this server unasked."""
    kind = (content_type or "").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        found = "none" if not kind else repr(shorten(kind, 80))
        raise ApiError(415, f"the content type must be application/json, found {found}; send 'Content-Type: application/json'")


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the request has {size} bytes or more, this server takes {limit} (--max-request-bytes)")


def decode(kind: type[T], data: bytes) -> T:
    """The body as a struct.

    Raises:
        ApiError: 400, it is no JSON, or a field has the wrong type; names the field.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        # A collection would look through what is being made again and again.
        with no_collection() if len(data) > LARGE else nullcontext():
            found: T = decoder.decode(data)
        return found
    except msgspec.ValidationError as error:
        match = _PLACE.match(str(error))
        text, place = (match[1], match[2]) if match else (str(error), "")
        raise ApiError(400, shorten(f"{place}: {text}" if place else text), param=place or None) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ApiError(400, f"the body is not JSON: {shorten(str(error))}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is not JSON that this server reads: it is nested too deeply", code="invalid_json") from None
