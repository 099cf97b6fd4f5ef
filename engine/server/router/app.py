"""The web application of the stand-alone router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from .... import __version__
from ..body import read_body
from ..errors import ApiError
from ..needs import need
from ..reply import send_error
from .config import RouterConfig
from .fleet import Fleet
from .forward import Forward
from .headers import to_server
from .health import ask_all, keep_looking, look_all
from .metrics import render

if TYPE_CHECKING:
    import httpx
    from fastapi import FastAPI


def make_client(config: RouterConfig) -> httpx.AsyncClient:
    """Connections to the servers; no proxy of the environment comes between.

    Raises:
        ValueError: httpx is not installed.
    """
    httpx: Any = need("httpx")
    return httpx.AsyncClient(  # type: ignore[no-any-return]
        timeout=httpx.Timeout(config.answer_timeout, connect=config.connect_timeout, pool=None),
        # servers close idle connections after a few seconds; one that is just being closed must not be used
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0),
        trust_env=False,
    )


def make_app(config: RouterConfig) -> FastAPI:
    """The application: own pages, and everything that it passes on.

    Raises:
        ValueError: fastapi or httpx is not installed.
    """
    need("fastapi")
    from fastapi import FastAPI
    from starlette.routing import Route

    from ..origin import OriginGuard

    fleet, client = Fleet(config), make_client(config)
    forward = Forward(fleet, client)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        await look_all(fleet, client)
        looking = asyncio.create_task(keep_looking(fleet, client))
        try:
            yield
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
            await client.aclose()

    app = FastAPI(title="rorqual router", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.fleet = fleet
    pages = Pages(fleet, forward)
    app.router.routes += [
        Route("/health", pages.health), Route("/workers", pages.workers), Route("/metrics", pages.metrics),
        Route("/abort", ToAll(fleet, client), methods=["POST"]), Route("/flush_cache", ToAll(fleet, client), methods=["POST"]),
    ]  # fmt: skip
    app.mount("/", forward)
    app.add_middleware(OriginGuard, allowed=())
    return app


class Pages:
    """What the router says of itself."""

    def __init__(self, fleet: Fleet, forward: Forward) -> None:
        self._fleet, self._forward = fleet, forward

    async def health(self, request: Any) -> Any:
        """200 while some server gets requests, else 503."""
        well = len(self._fleet.well())
        return _json({"healthy": well, "workers": len(self._fleet.workers)}, 200 if well else 503)

    async def workers(self, request: Any) -> Any:
        """Every server, and what the router knows of it."""
        view = self._fleet.router.snapshot()
        rows = [
            {"url": worker.url, "healthy": worker.well, "problem": worker.problem, "broken": worker.broken}
            | {
                name: view[name][rank]
                for name in ("picked", "open_requests", "open_tokens", "hit_blocks", "prompt_blocks", "cached_blocks")
            }
            for rank, worker in enumerate(self._fleet.workers)
        ]
        return _json({"policy": view["policy"], "open": self._forward.open, "workers": rows}, 200)

    async def metrics(self, request: Any) -> Any:
        """For Prometheus."""
        from starlette.responses import Response

        return Response(render(self._fleet, self._forward.open), media_type="text/plain; version=0.0.4; charset=utf-8")


class ToAll:
    """ASGI application for requests that every server gets."""

    def __init__(self, fleet: Fleet, client: httpx.AsyncClient) -> None:
        self._fleet, self._client = fleet, client

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the ASGI specification."""
        try:
            # /flush_cache has no body: then no content type is asked for either
            headers = {"content-type": "application/json"} | {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
            body = await read_body(headers, receive, self._fleet.config)
        except ApiError as error:
            await send_error(send, error)
            return
        if scope["path"] == "/flush_cache":
            for rank in range(len(self._fleet.workers)):
                self._fleet.forget(rank)
        found = await ask_all(self._fleet, self._client, scope["path"], body, to_server(scope["headers"]))
        good = all(answer.get("status") == 200 for answer in found.values())
        await _json({"workers": found}, 200 if good else 502)(scope, receive, send)


def _json(value: Any, status: int) -> Any:
    from starlette.responses import Response

    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")
