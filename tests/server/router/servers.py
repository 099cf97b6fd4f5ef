"""Fake OpenAI servers for tests of the router: small ASGI applications under uvicorn, each with knobs and a record."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


class Running:
    """An ASGI application on a port of its own, served from a thread."""

    def __init__(self, app: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="on", ws="none", timeout_graceful_shutdown=1, loop="asyncio"
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.thread.start()
        end = time.monotonic() + 20
        while not self.server.started:
            assert time.monotonic() < end and self.thread.is_alive(), "the server does not start"
            time.sleep(0.01)

    def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(20)
        self.listener.close()
        assert not self.thread.is_alive(), "the server does not stop"


class FakeServer:
    """Answers completions with as many pieces as asked for; every knob may be turned while it runs."""

    def __init__(self) -> None:
        self.health = 200
        self.status = 200  # of completions
        self.delay = 0.0  # seconds before each piece
        self.break_after: int | None = None  # pieces after which the connection is cut
        self.break_head = False  # cut before the head
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.cut = 0  # requests whose client left before the end
        self.open = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._lifespan(receive, send)
        if scope["path"] == "/health":
            return await self._answer(send, self.health, {"ok": True})
        self.paths.append(scope["path"])
        self.headers.append({k.decode(): v.decode() for k, v in scope["headers"]})
        body = await self._body(receive)
        if scope["path"] not in ("/v1/completions", "/v1/chat/completions"):
            return await self._answer(send, 200, {"path": scope["path"], "query": scope["query_string"].decode()})
        self.bodies.append(body)
        if self.break_head:
            return receive.__self__.transport.abort()  # uvicorn would answer with a 500 to an exception
        if self.status != 200:
            return await self._answer(send, self.status, {"error": {"message": f"status {self.status}"}}, [(b"retry-after", b"7")])
        self.open += 1
        try:
            await self._complete(json.loads(body), receive, send)
        finally:
            self.open -= 1

    async def _complete(self, asked: Any, receive: Any, send: Any) -> None:
        count = asked.get("max_tokens", 4)
        if not asked.get("stream"):
            await asyncio.sleep(self.delay * count)
            return await self._answer(send, 200, {"choices": [{"text": "x" * count}], "usage": {"completion_tokens": count}})
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for place in range(count):
            await asyncio.sleep(self.delay)
            if gone.done():
                self.cut += 1
                return
            if place == self.break_after:
                gone.cancel()
                raise RuntimeError("the test wants this connection to be cut")
            event = {"choices": [{"text": f"{asked['prompt']}-{place} "}]}
            await send({"type": "http.response.body", "body": f"data: {json.dumps(event)}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        gone.cancel()

    @staticmethod
    async def _lifespan(receive: Any, send: Any) -> None:
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    @staticmethod
    async def _body(receive: Any) -> bytes:
        parts = []
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    @staticmethod
    async def _answer(send: Any, status: int, value: Any, headers: Any = ()) -> None:
        body = json.dumps(value).encode()
        length = (b"content-length", str(len(body)).encode())
        head = [(b"content-type", b"application/json"), length, *headers]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": body})


@contextmanager
def routed(n: int = 2, **settings: Any) -> Iterator[tuple[str, list[FakeServer], Any, list[Running]]]:
    """A router over ``n`` fake servers: its URL, the servers, its fleet, and what runs the servers."""
    from rorqual.engine.server.router.app import make_app
    from rorqual.engine.server.router.config import RouterConfig

    fakes = [FakeServer() for _ in range(n)]
    running: list[Running] = []
    try:
        running += [Running(fake) for fake in fakes]
        config = RouterConfig(worker_urls=tuple(r.url for r in running), **{"health_interval": 0.05, "health_timeout": 2.0, **settings})
        app = make_app(config)
        running.append(Running(app))
        yield running[-1].url, fakes, app.state.fleet, running[:-1]
    finally:
        for each in reversed(running):
            if each.thread.is_alive():
                each.stop()
