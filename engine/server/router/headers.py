"""Which headers go through a proxy, and which belong to one connection only."""

from __future__ import annotations

from collections.abc import Iterable

_HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer", b"trailers",
        b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
# of a request: made anew for the server, or judged here
_OURS = frozenset((b"host", b"content-length", b"expect", b"origin", b"sec-fetch-site"))

Headers = list[tuple[bytes, bytes]]


def to_server(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers of a request as they go on."""
    return _through(headers, _HOP_BY_HOP | _OURS)


def to_client(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers of an answer as they go back."""
    return _through(headers, _HOP_BY_HOP)


def _through(headers: Iterable[tuple[bytes, bytes]], without: frozenset[bytes]) -> Headers:
    found = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in found if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in found if name not in without and name not in named]
