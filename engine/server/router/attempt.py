"""One try of a request at one server."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from .fleet import Fleet
from .headers import to_client
from .prompt import Asked

if TYPE_CHECKING:
    import httpx

_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')
_TAIL_BYTES = 4096  # of an answer, in which its usage is looked for

#: answers after which another server is asked: it has no room, or is ending
TRY_OTHERS = (429, 502, 503)


class Broken(Exception):
    """The server did not answer, or not to the end."""


class Attempt:
    """An answer of one server, and the account of it. ``close`` must be called."""

    def __init__(self, fleet: Fleet, name: str, rank: int, asked: Asked) -> None:
        self.rank = rank
        self.worker = fleet.workers[rank]
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.first = b""  # first bytes of the body
        self.sse = False  # the body is a stream of events
        self._fleet, self._name, self._asked = fleet, name, asked
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._events, self._tail, self._whole = 0, b"", False

    async def start(self, client: httpx.AsyncClient, request: httpx.Request) -> None:
        """Wait for head and first bytes of the answer.

        Raises:
            Broken: there were none.
        """
        import httpx

        began = time.monotonic()
        try:
            self._response = response = await client.send(request, stream=True)
            self._chunks = response.aiter_raw()
            self.status = response.status_code
            self.headers = to_client(response.headers.raw)
            self.sse = response.headers.get("content-type", "").startswith("text/event-stream")
            self.first = await anext(self._chunks, b"")
        except httpx.HTTPError as error:
            self._fault(error, at_once=isinstance(error, httpx.ConnectError | httpx.ConnectTimeout))
        self.worker.answers[self.status] += 1
        if self.status == 200:
            self._fleet.began(self._name, self.rank, self._asked, time.monotonic() - began)
        self._look(self.first)

    async def rest(self) -> AsyncIterator[bytes]:
        """The body behind ``first``, piece by piece.

        Raises:
            Broken: it ended too early.
        """
        import httpx

        assert self._chunks is not None
        try:
            async for chunk in self._chunks:
                self._look(chunk)
                yield chunk
            self._whole = True
        except httpx.HTTPError as error:
            self._fault(error)

    def _fault(self, error: Exception, *, at_once: bool = False) -> None:
        self.worker.broken += 1
        problem = f"{type(error).__name__} {error}".strip()
        if at_once:
            self._fleet.failed(self.rank, problem, at_once=True)
        raise Broken(f"{self.worker.url}: {problem}") from None

    def _look(self, chunk: bytes) -> None:
        """Count what went through."""
        if self.sse:
            self._events += chunk.count(b"data: ")
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:] if len(chunk) < _TAIL_BYTES else chunk[-_TAIL_BYTES:]

    def _generated(self) -> int | None:
        """Tokens of a whole good answer: by its usage, or its number of events."""
        if self.status != 200 or not self._whole:
            return None
        usage = _USAGE.findall(self._tail)
        return int(usage[-1]) if usage else max(0, self._events - 1) or None

    async def close(self) -> None:
        """Let go of the connection, which aborts a request that has not ended, and settle the account."""
        self._fleet.done(self._name, self._generated())
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()
