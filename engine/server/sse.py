"""Server-sent events: an ASGI response that costs little for each token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.responses import Response

from .errors import ApiError
from .openai.generation import Generation, Watch

log = logging.getLogger("rorqual.server")

DONE = b"data: [DONE]\n\n"
#: a comment: keeps proxies from closing a stream whose request still waits for its turn
PING = b": waiting\n\n"
#: seconds without news after which the head of the answer is sent, and between comments
PATIENCE_S = 10.0
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def error_event(error: ApiError) -> bytes:
    """An error in the middle of a stream, and its end."""
    return b"data: " + error.encoded() + b"\n\n" + DONE


class EventStream(Response):
    """Sends what ``events`` yields. The first must come from the engine: until then an error still has a status of its own."""

    def __init__(self, generation: Generation, events: AsyncIterator[bytes], headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.generation, self.events = generation, events
        self.status_code, self.background = 200, None
        self.raw_headers = [*_HEADERS, *(headers or [])]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the generation to its end, or to that of the client."""
        timeout = self.generation.state.config.send_timeout

        async def timed(message: dict[str, Any]) -> None:
            async with asyncio.timeout(timeout):
                await send(message)

        with self.generation:
            async with Watch(receive, self.generation):
                try:
                    await self._run(timed)
                except TimeoutError:
                    log.warning("%s: the client has read nothing for %g s (--send-timeout); its request is aborted",
                                self.generation.name, timeout)  # fmt: skip
                    drop = scope.get("extensions", {}).get("rorqual", {}).get("drop")
                    if drop is not None:
                        drop()

    async def _run(self, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """Send all events. Raises TimeoutError when the client does not read, ApiError before the first event."""
        begun = False
        try:
            async for data in self.events:
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun = True
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except ApiError as error:
            if error.status == 499:
                return  # nobody listens
            if not begun:
                raise
            await send({"type": "http.response.body", "body": error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
