"""A request on its way through the router: read, sent to a server, its answer passed on as it comes."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from ..body import read_body
from ..errors import ApiError
from ..reply import send_error
from .attempt import TRY_OTHERS, Attempt, Broken
from .fleet import Fleet
from .headers import to_server
from .prompt import Asked, read_request

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("rorqual.router")

#: paths that one server answers, with the methods they take
ONE_SERVER = {
    "/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/responses": "POST", "/v1/embeddings": "POST",
    "/tokenize": "POST", "/detokenize": "POST", "/v1/models": "GET", "/version": "GET",
}  # fmt: skip


class Forward:
    """ASGI application for ``ONE_SERVER``."""

    def __init__(self, fleet: Fleet, client: httpx.AsyncClient) -> None:
        self.fleet, self.client = fleet, client
        self.open = 0  # requests under way

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the ASGI specification."""
        try:
            self._check(scope)
        except ApiError as error:
            await send_error(send, error)
            return
        self.open += 1
        try:
            body = b"" if scope["method"] == "GET" else await read_body(dict(_texts(scope["headers"])), receive, self.fleet.config)
            await self._until_gone(receive, self._answer(scope, body, send))
        except ApiError as error:
            if error.status != 499:  # the client has gone
                await send_error(send, error)
        finally:
            self.open -= 1

    def _check(self, scope: Any) -> None:
        path, method = scope["path"], scope["method"]
        takes = "GET" if path.startswith("/v1/models/") and ".." not in path else ONE_SERVER.get(path)
        if takes is None:
            raise ApiError(404, f"the router has no such path; it passes on {', '.join(ONE_SERVER)}")
        if method != takes:
            raise ApiError(405, f"{path} takes {takes}, found {method}")
        if self.open >= self.fleet.config.max_concurrent_requests:
            text = f"{self.open} requests are open, which is all that this router takes (--max-concurrent-requests); try again later"
            raise ApiError(429, text, retry_after_s=1.0)

    async def _until_gone(self, receive: Any, answer: Any) -> None:
        """Run ``answer`` to its end, or until the client leaves."""
        work = asyncio.ensure_future(answer)
        watch = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, watch):
                if not task.done():
                    task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _answer(self, scope: Any, body: bytes, send: Any) -> None:
        attempt = await self._first_that_answers(scope, body, read_request(body))
        try:
            await self._pass_on(attempt, send)
        finally:
            await attempt.close()

    async def _first_that_answers(self, scope: Any, body: bytes, asked: Asked) -> Attempt:
        """An answer that has begun; that of the last server when none has room.

        Raises:
            ApiError: 502 or 503, no server answered.
        """
        fleet, tried, problems = self.fleet, set[int](), list[str]()
        while True:
            choice = fleet.choose(asked, tried) if len(tried) <= fleet.config.retries else None
            if choice is None:
                fleet.refused += 1
                raise _nobody(fleet, problems)
            fleet.retries += bool(tried)
            tried.add(choice[1])
            attempt = Attempt(fleet, *choice, asked)
            try:
                await attempt.start(self.client, self._request(attempt.worker.url, scope, body))
            except Broken as error:
                problems.append(str(error))
                await attempt.close()
                continue
            except BaseException:
                await attempt.close()
                raise
            others = len(tried) <= fleet.config.retries and any(rank not in tried for rank in fleet.well())
            if attempt.status not in TRY_OTHERS or not others:
                return attempt
            problems.append(f"{attempt.worker.url}: HTTP {attempt.status}")
            await attempt.close()

    def _request(self, url: str, scope: Any, body: bytes) -> httpx.Request:
        import httpx

        query = quote(scope["query_string"], safe="=&%+,;:@/?!~*'()[]")
        target = url + quote(scope["path"], safe="/") + (f"?{query}" if query else "")
        extensions = {"timeout": self.client.timeout.as_dict()}
        return httpx.Request(scope["method"], target, headers=to_server(scope["headers"]), content=body or None, extensions=extensions)

    async def _pass_on(self, attempt: Attempt, send: Any) -> None:
        headers = [*attempt.headers, (b"x-rorqual-worker", attempt.worker.url.encode())]
        await send({"type": "http.response.start", "status": attempt.status, "headers": headers})
        await send({"type": "http.response.body", "body": attempt.first, "more_body": True})
        try:
            async for chunk in attempt.rest():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Broken as error:
            log.warning("an answer broke off: %s", error)
            if not attempt.sse:
                raise ConnectionAbortedError(str(error)) from None  # closes the connection: the client sees that something is missing
            await send({"type": "http.response.body", "body": _last_event(error)})
            return
        await send({"type": "http.response.body", "body": b""})


def _texts(headers: Any) -> list[tuple[str, str]]:
    return [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]


def _last_event(error: Exception) -> bytes:
    """What a client reads when a stream breaks off: an error, and no [DONE]."""
    body = ApiError(502, f"the server broke off its answer: {error}", code="upstream_broken").body()
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _nobody(fleet: Fleet, problems: list[str]) -> ApiError:
    if problems:
        return ApiError(502, f"no server answered: {'; '.join(problems)}", code="upstream_failed")
    sick = "; ".join(f"{worker.url}: {worker.problem}" for worker in fleet.workers if not worker.well)
    return ApiError(503, f"no server is well: {sick}", retry_after_s=fleet.config.health_interval)


async def _disconnect(receive: Any) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
