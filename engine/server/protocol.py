"""uvicorn's HTTP protocol with limits of its own: how long the head of a request may take, and how large it may be."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError

#: bytes of request line and headers together
MAX_HEAD_BYTES = 64 * 1024


class GuardedProtocol(HttpToolsProtocol):
    """Closes connections that send no whole head in time, or one that is too large."""

    #: seconds; set by ``guarded``
    head_timeout = 10.0

    def connection_made(self, transport: Any) -> None:
        """A client has connected: its first request is due."""
        super().connection_made(transport)
        self._head_bytes = 0
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._in_head or self._head_timer is not None or self.cycle is None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes", code="head_too_large"))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        # a stream whose client does not read can be dropped at once: closing would wait for the client
        self.scope["extensions"] = {"rorqual": {"drop": self.transport.abort}}
        self._in_head = True
        if self._head_timer is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._in_head = False
        self._head_bytes = 0
        self._cancel_timer()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout, self._too_slow)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            if self._head_bytes:
                self._refuse(ApiError(408, f"no whole request came within {self.head_timeout:g} s"))
            else:
                self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        body = error.encoded()
        reason = {408: b"Request Timeout", 431: b"Request Header Fields Too Large", 400: b"Bad Request"}[error.status]
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (error.status, reason, len(body)) + body)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer to bytes that are no HTTP."""
        self._refuse(ApiError(400, msg))


def guarded(head_timeout: float) -> type[GuardedProtocol]:
    """The protocol with a limit."""
    return type("GuardedProtocol", (GuardedProtocol,), {"head_timeout": head_timeout})
