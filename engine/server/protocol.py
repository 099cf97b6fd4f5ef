"""uvicorn's HTTP protocol with limits of its own: how long the head of a request may take, how large it may be, and how long an answer
may lie unread.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError

log = logging.getLogger("rorqual.server")

#: bytes of request line and headers together; also of what a request has beside head and body: trailers, extensions of chunks
MAX_HEAD_BYTES = 64 * 1024
#: requests of one connection whose answers are not complete. A client that sends more without waiting would fill memory with them
MOST_PIPELINED = 128


class _Flood(Exception):
    """A connection has too many requests open; the parser stops, and the connection is closing."""


class GuardedProtocol(HttpToolsProtocol):
    """Closes connections that send no whole head in time, one that is too large, or read nothing of an answer."""

    #: seconds; set by ``guarded``
    head_timeout = 10.0
    send_timeout = 120.0

    # ---- life

    def connection_made(self, transport: Any) -> None:
        """A client has connected: its first request is due."""
        super().connection_made(transport)
        self._idle_bytes = 0  # since the last part of a request that was of use
        self._in_head = False
        self._known = False  # the parser reads what was read before
        self._cycles: list[Any] = []  # requests whose answers are not complete, as far as known
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, for every request on it."""
        self._cancel_timer()
        self._cancel_unread()
        self._disconnect()
        super().connection_lost(exc)

    def _disconnect(self) -> bool:
        """Tell all requests that nobody listens; True when an answer has begun."""
        busy = [cycle for cycle in self._cycles if not cycle.response_complete]
        for cycle in busy:
            cycle.disconnected = True
            cycle.message_event.set()
        return any(cycle.response_started for cycle in busy)

    # ---- in

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        self._unset_keepalive_if_required()
        self._idle_bytes += len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:  # also what a callback raised
            if not self.transport.is_closing():
                self.send_400_response("Invalid HTTP request received.")
        if self._idle_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            text = f"the head of the request, or what follows its body, has more than {MAX_HEAD_BYTES} bytes"
            self._refuse(ApiError(431, text, code="head_too_large"))

    def _feed(self, data: bytes) -> bytes:
        """Parse; what is left where the parser stops because another protocol is asked for, which nobody here speaks."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            self._go_on()
            return data[error.args[0] :]
        return b""

    def _go_on(self) -> None:
        """Read what follows the head of a request that asks for another protocol as its body, with a new parser."""
        fields = dict(self.headers)
        framing = [name + b": " + fields[name] for name in (b"transfer-encoding", b"content-length") if fields.get(name, b"0") != b"0"]
        self.parser = httptools.HttpRequestParser(self)
        if not framing:
            super().on_message_complete()
            return
        self._known = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing[0] + b"\r\n\r\n")
        finally:
            self._known = False

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._known:
            return
        super().on_message_begin()
        # a stream whose client does not read can be dropped at once: closing would wait for the client
        self.scope["extensions"] = {"rorqual": {"drop": self.transport.abort}}
        self._in_head = True
        if self._head_timer is None:
            self._expect_head()

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        if not self._known:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header. One behind the body is left out: it must not say anything of a request that was let in before."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if self._known:
            return
        self._in_head = False
        self._idle_bytes = 0
        self._cancel_timer()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if len(self._cycles) >= MOST_PIPELINED:
            text = f"{MOST_PIPELINED} requests of this connection wait for their answers; wait for some, or open more connections"
            self._refuse(ApiError(400, text, code="too_many_pipelined"))
            raise _Flood
        super().on_headers_complete()
        self._cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._idle_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole, unless the parser believes that another protocol follows."""
        self._idle_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout, self._too_slow)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            if self._idle_bytes:
                self._refuse(ApiError(408, f"no whole request came within {self.head_timeout:g} s"))
            else:
                self.transport.close()

    # ---- out

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent to."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._cancel_unread()

    def on_response_complete(self) -> None:
        """The answer is written; where the connection ends with it, the client has to read it now."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_unread()

    def timeout_keep_alive_handler(self) -> None:
        """No other request has come."""
        super().timeout_keep_alive_handler()
        self._watch_unread()

    def _watch_unread(self) -> None:
        """Drop the connection if the client reads nothing of what waits for it: closing would wait for the client."""
        self._cancel_unread()
        waiting = self.transport.get_write_buffer_size()
        # a stream that stalls ends first: its request has more to say
        self._unread_timer = self.loop.call_later(self.send_timeout + 1.0, self._look_unread, waiting)

    def _look_unread(self, waiting: int) -> None:
        self._unread_timer = None
        left = self.transport.get_write_buffer_size()
        if left < waiting:
            self._watch_unread()
        elif left:
            log.warning("a client has read nothing of its answer for %g s (--send-timeout); it is dropped", self.send_timeout)
            self.transport.abort()

    def _cancel_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        if self._disconnect():  # in the middle of another answer it would be taken for a part of that
            self.transport.abort()
            return
        body = error.encoded()
        reason = {408: b"Request Timeout", 431: b"Request Header Fields Too Large", 400: b"Bad Request"}[error.status]
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (error.status, reason, len(body)) + body)
        self.transport.close()
        self._watch_unread()

    def send_400_response(self, msg: str) -> None:
        """Answer to bytes that are no HTTP."""
        self._refuse(ApiError(400, msg))


def guarded(head_timeout: float, send_timeout: float = GuardedProtocol.send_timeout) -> type[GuardedProtocol]:
    """The protocol with limits."""
    return type("GuardedProtocol", (GuardedProtocol,), {"head_timeout": head_timeout, "send_timeout": send_timeout})
