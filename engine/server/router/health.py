"""Looking after the servers, and asking all of them at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .fleet import Fleet

if TYPE_CHECKING:
    import httpx

#: the server lives but has no such page
_NO_HEALTH_PAGE = (404, 405)


async def look(fleet: Fleet, client: httpx.AsyncClient, rank: int) -> None:
    """One look at a server's /health."""
    import httpx

    worker = fleet.workers[rank]
    try:
        response = await client.get(f"{worker.url}/health", timeout=fleet.config.health_timeout)
    except httpx.HTTPError as error:
        fleet.failed(rank, f"/health: {type(error).__name__} {error}".strip())
        return
    if response.status_code == 200 or response.status_code in _NO_HEALTH_PAGE:
        fleet.healthy(rank)
    else:
        fleet.failed(rank, f"/health: HTTP {response.status_code}", at_once=response.status_code == 503)


async def look_all(fleet: Fleet, client: httpx.AsyncClient) -> None:
    """One look at every server."""
    await asyncio.gather(*(look(fleet, client, rank) for rank in range(len(fleet.workers))))


async def keep_looking(fleet: Fleet, client: httpx.AsyncClient) -> None:
    """Look at all servers, again and again."""
    while True:
        await look_all(fleet, client)
        await asyncio.sleep(fleet.config.health_interval)


async def ask_all(fleet: Fleet, client: httpx.AsyncClient, path: str, body: bytes, headers: Any) -> dict[str, Any]:
    """POST to every server: its URL -> {"status", "body"} or {"error"}."""
    import httpx

    async def one(url: str) -> tuple[str, dict[str, Any]]:
        try:
            found = await client.post(url + path, content=body, headers=headers, timeout=fleet.config.connect_timeout + 60)
            return url, {"status": found.status_code, "body": found.text[:2000]}
        except httpx.HTTPError as error:
            return url, {"error": f"{type(error).__name__} {error}".strip()}

    return dict(await asyncio.gather(*(one(worker.url) for worker in fleet.workers)))
