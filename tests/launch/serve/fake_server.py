"""An OpenAI server that says exactly what a test wants it to, byte for byte, without any HTTP library."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: (body of the request) -> [(seconds to wait before, bytes of the response's body)]
Script = Callable[[dict[str, Any]], list[tuple[float, bytes]]]


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def completions(
    body: dict[str, Any], *, wait: float = 0.0, gap: float = 0.0, prompt_tokens: int | None = None
) -> list[tuple[float, bytes]]:
    """A completion as servers send it: a chunk a token, the reason on the last, then usage, then [DONE]."""
    n = body.get("max_tokens") or body["max_completion_tokens"]
    prompt = body.get("prompt") or body.get("messages")
    parts = []
    for i in range(n):
        last = "length" if i == n - 1 else None
        if "messages" in body:
            choice = {"index": 0, "delta": {"content": f"w{i} "}, "finish_reason": last}
        else:
            choice = {"index": 0, "text": f"w{i} ", "finish_reason": last}
        if body.get("return_token_ids"):
            choice["token_ids"] = [i]
        parts.append((gap if i else wait, event({"choices": [choice]})))
    if "messages" in body:
        parts.insert(0, (0.0, event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})))
    usage = {"prompt_tokens": len(prompt) if prompt_tokens is None else prompt_tokens, "completion_tokens": n}
    return [*parts, (0.0, event({"choices": [], "usage": usage})), (0.0, DONE)]


@dataclass
class FakeServer:
    """``with FakeServer(script) as server:`` answers on ``server.port`` from a thread of its own."""

    script: Script = completions
    routes: dict[str, tuple[int, Any]] = field(default_factory=dict)  # "POST /path" -> status, JSON
    slots: int | None = None  # requests that it runs at a time
    busy: int = 0  # how many first completions get a 503
    cut: bool = False  # close instead of ending the chunked body
    bodies: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    at: int = 0  # the port to take; any free one by default
    port: int = 0

    def __enter__(self):
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self, started):
        self._loop.run_until_complete(self._serve(started))
        self._loop.close()

    async def _serve(self, started):
        self._stop = asyncio.Event()
        self._gate = asyncio.Semaphore(self.slots or 1 << 20)
        server = await asyncio.start_server(self._client, "127.0.0.1", self.at)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def _client(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                route = " ".join(lines[0].split()[:2])
                self.calls.append(route)
                if not await self._answer(route, data, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, route, data, writer) -> bool:
        if route in self.routes or not route.endswith("completions"):
            models = {"data": [{"id": "fake", "vocab_size": 100}]}
            status, value = self.routes.get(
                route, (200, models) if route == "GET /v1/models" else (404, {"error": {"message": "no such route"}})
            )
            self._plain(writer, status, value)
            return True
        body = json.loads(data)
        self.bodies.append(body)
        if self.busy > 0:
            self.busy -= 1
            self._plain(writer, 503, {"error": {"message": "loading"}})
            return True
        async with self._gate:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            for wait, part in self.script(body):
                if wait:
                    await asyncio.sleep(wait)
                writer.write(b"%x\r\n" % len(part) + part + b"\r\n")
                await writer.drain()
        if self.cut:
            return False
        writer.write(b"0\r\n\r\n")
        return True

    def _plain(self, writer, status, value):
        text = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text)
