"""A small HTTP/1.1 client whose cost per streamed chunk is small: connections that are kept, and bytes handed on with their time.

A load generator must not be what is measured. Responses go from the socket through httptools' parser into a sink, without
coroutines in between: a chunk costs a few microseconds.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

NEED = "the load client needs httptools and msgspec, which are not installed; pip install 'rorqual[serve]'"


class Sink(Protocol):
    """What takes a response. It is told everything while it comes, with the time at which the bytes were there."""

    status: int

    def body(self, data: bytes, now: float) -> None:
        """A part of the body."""


class Whole:
    """A sink that keeps the body."""

    def __init__(self) -> None:
        self.status = 0
        self.data = bytearray()

    def body(self, data: bytes, now: float) -> None:
        """Keep it."""
        self.data += data


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a server is."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    prefix: str = ""  # path in front of all others
    authority: str = ""  # the Host header

    @classmethod
    def of(cls, url: str, *, verify: bool = True) -> Site:
        """The place that an http:// or https:// URL names; ValueError when it names none."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r} is no URL of a server: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server; write http://HOST:PORT")
        context = None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            if not verify:
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        port = port or (443 if context else 80)
        return cls(host=parts.hostname, port=port, tls=context, prefix=parts.path.rstrip("/"), authority=parts.netloc.rpartition("@")[2])


class Connection(asyncio.Protocol):
    """One connection; it carries one request at a time."""

    def __init__(self, parser: Callable[[Any], Any]) -> None:
        self._make_parser = parser
        self._parser: Any = None
        self._transport: asyncio.Transport | None = None
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._framed = False  # the response says itself where it ends
        self._status_seen = False
        self.alive = False
        self.heard = False  # bytes of the present response have come

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.alive = cast(asyncio.Transport, transport), True  # uvloop's is no subclass of it

    def send(self, data: bytes, sink: Sink) -> asyncio.Future[None]:
        """Send a request; the future is done when its response is whole, and fails with ConnectionError when it never will be."""
        assert self._transport is not None and self._done is None
        self._parser, self._sink, self.heard = self._make_parser(self), sink, False
        self._framed = self._status_seen = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._done

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None:  # bytes that nobody asked for: the server is confused
            self.close()
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except Exception as error:  # httptools' own errors, and those of the sink
            self._end(ConnectionError(f"the response could not be read: {error}"))
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        assert self._sink is not None
        self._status_seen = True
        self._sink.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        assert self._sink is not None
        self._sink.body(data, self._now)

    def on_message_complete(self) -> None:
        assert self._sink is not None
        if self._sink.status < 200:  # 100 Continue: the real one follows
            return
        if not self._parser.should_keep_alive():
            self.close()
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if exc is None and self._status_seen and not self._framed:  # a body without a length ends with the connection
            self._end(None)
        self._end(ConnectionError(f"the server closed the connection{f': {exc}' if exc else ' before the response was whole'}"))

    def _end(self, error: Exception | None) -> None:
        done, self._done, self._sink = self._done, None, None
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def close(self) -> None:
        """Drop the connection; a server sees that its client has gone."""
        self.alive = False
        if self._transport is not None:
            self._transport.close()


@dataclass
class Client:
    """Requests to one server, over as many connections as there are requests at a time."""

    site: Site
    headers: dict[str, str] = field(default_factory=dict)
    connect_timeout_s: float = 30.0
    _idle: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            import httptools
        except ImportError:
            raise ValueError(NEED) from None
        self._parser = httptools.HttpResponseParser

    async def send(self, method: str, path: str, body: bytes | None, sink: Sink, headers: dict[str, str] | None = None) -> None:
        """Send a request and wait until its response is whole.

        Raises:
            ConnectionError: no connection, or the response broke off.
        """
        data = self.request_bytes(method, path, body, headers)
        while True:
            kept = self._kept()
            connection = kept or await self._connect()
            try:
                await connection.send(data, sink)
            except ConnectionError:
                if kept is None or connection.heard:
                    raise
                continue  # the server had closed a kept connection at the same moment: this is no answer to our request
            except BaseException:  # cancelled: the connection is in the middle of a response
                connection.close()
                raise
            if connection.alive:
                self._idle.append(connection)
            return

    def request_bytes(self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None) -> bytes:
        """The request as it goes over the wire."""
        lines = [f"{method} {self.site.prefix}{path} HTTP/1.1", f"Host: {self.site.authority}"]
        lines += [f"{name}: {value}" for name, value in {**self.headers, **(headers or {})}.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        site = self.site
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, connection = await loop.create_connection(lambda: Connection(self._parser), site.host, site.port, ssl=site.tls)
        except TimeoutError:
            raise ConnectionError(f"no connection to {site.host}:{site.port} within {self.connect_timeout_s:g} s") from None
        except OSError as error:
            raise ConnectionError(f"no connection to {site.host}:{site.port}: {error.strerror or error}") from None
        return connection

    def close(self) -> None:
        """Drop the kept connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
