"""A server under load: is it there, what does it serve, and the routes that a benchmark uses besides completions."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec

from .ask import Asker
from .config import TargetConfig, pairs
from .http import Client, Site, Whole
from .load import ask
from .outcome import Outcome

#: seconds for a route that is no completion
ROUTE_S = 30.0
#: seconds between two looks whether the server is there
_LOOK_S = 0.5
#: routes that forget cached prefixes: ours and SGLang's, vLLM's
FLUSH = ("/flush_cache", "/reset_prefix_cache")


def make_client(target: TargetConfig) -> Client:
    """A client of the server that the flags name."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    site = Site.of(target.base_url or f"http://{host}:{target.port}", verify=not target.insecure)
    headers = dict(pairs(target.header, "--header"))
    key = target.api_key or os.environ.get("OPENAI_API_KEY")
    if key and "authorization" not in {name.lower() for name in headers}:
        headers["Authorization"] = f"Bearer {key}"
    for name, value in headers.items():
        if any(c in name + value for c in "\r\n\0") or not (name + value).isascii():
            raise ValueError(f"--header or --api-key: {name!r} holds characters that no HTTP header may have")
    return Client(site=site, headers=headers)


async def call(client: Client, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """(status, body) of a route, the body from JSON where it is any; ConnectionError when the server does not answer in time."""
    sink = Whole()
    data = msgspec.json.encode(body) if body is not None else b"" if method == "POST" else None
    try:
        async with asyncio.timeout(ROUTE_S):
            await client.send(method, path, data, sink)
    except TimeoutError:
        raise ConnectionError(f"{method} {path} was not answered within {ROUTE_S:g} s") from None
    try:
        return sink.status, msgspec.json.decode(bytes(sink.data))
    except msgspec.MsgspecError:
        return sink.status, bytes(sink.data).decode("utf-8", "replace")


async def served_models(client: Client, patience_s: float) -> list[dict[str, Any]]:
    """The entries of /v1/models, one or more, waiting for the server to come up.

    Raises:
        ValueError: no server within ``patience_s``, or it serves no such route; the last answer is named.
    """
    end = time.monotonic() + patience_s
    while True:
        try:
            status, body = await call(client, "GET", "/v1/models")
            if status == 200 and isinstance(body, dict) and body.get("data"):
                return [dict(entry) for entry in body["data"]]
            last = f"GET /v1/models: HTTP {status}, {str(body)[:200]}"
            if status in (401, 403):
                raise ValueError(f"{last}; give --api-key, or OPENAI_API_KEY in the environment")
            if 400 <= status < 500:
                raise ValueError(f"{last}; name the model with --served-model-name")
        except ConnectionError as error:
            last = str(error)
        if time.monotonic() >= end:
            raise ValueError(f"no server at {client.site.host}:{client.site.port} within {patience_s:g} s; last: {last}")
        await asyncio.sleep(_LOOK_S)


async def check_ready(client: Client, asker: Asker, prompt: Any, patience_s: float) -> None:
    """Complete one token, over and over until it works: a server that answers need not be one that can run its model.

    Raises:
        ValueError: it did not within ``patience_s``, or refuses such requests; its last answer is named.
    """
    end = time.monotonic() + patience_s
    while True:
        outcome = Outcome(wanted=1)
        await ask(client, asker.endpoint, asker.body(prompt, 1), outcome, timeout_s=max(1.0, end - time.monotonic()), headers={})
        if outcome.success:
            return
        refused = (outcome.error or "").startswith("HTTP 4") and not (outcome.error or "").startswith(("HTTP 408", "HTTP 429"))
        if refused or time.monotonic() >= end:
            raise ValueError(f"the server did not complete a first request of one token: {outcome.error}")
        await asyncio.sleep(_LOOK_S)


async def flush_cache(client: Client, patience_s: float = ROUTE_S) -> str | None:
    """Let the server forget cached prefixes; the route that did it, None where it has none.

    A server may refuse while the last requests are being put away: it is asked again for a while.

    Raises:
        ValueError: it has such a route and goes on refusing; a run would measure the cache of another.
    """
    end = time.monotonic() + patience_s
    for path in FLUSH:
        while True:
            status, body = await call(client, "POST", path)
            if status in (200, 204):
                return path
            if status in (404, 405):
                break
            if time.monotonic() >= end:
                raise ValueError(f"POST {path} was refused for {patience_s:g} s: HTTP {status}, {str(body)[:200]} (--no-flush-cache)")
            await asyncio.sleep(_LOOK_S)
    return None


async def server_facts(client: Client) -> dict[str, Any]:
    """What /version tells of the server; {} where it has none."""
    try:
        status, body = await call(client, "GET", "/version")
    except ConnectionError:
        return {}
    return body if status == 200 and isinstance(body, dict) else {}
