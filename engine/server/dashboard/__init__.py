"""The live page of a server, at ``/``: one file, nothing fetched but ``/dashboard.json`` from the same server."""

from __future__ import annotations

from typing import Any

from .data import dashboard
from .history import History
from .page import headers, page

__all__ = ["History", "add_routes", "dashboard", "page"]


def add_routes(app: Any, state: Any) -> None:
    """Add ``GET /`` and ``GET /dashboard.json`` to a FastAPI ``app``.

    Args:
        app: the application.
        state: has ``client`` (an ``EngineClient``, whose snapshots are kept from now on) and ``names()`` of the model.
    """
    import msgspec
    from starlette.requests import Request
    from starlette.responses import Response

    history = History()
    state.client.on_snapshot = history.feed
    encoder = msgspec.json.Encoder()

    async def show(request: Request) -> Response:
        return Response(page(), media_type="text/html", headers=headers())

    async def data(request: Request) -> Response:
        client = state.client
        state_name = "lost" if client.lost else "ending" if client.ending else "ready" if client.welcome else "loading"
        names = state.names()
        found = dashboard(
            client.welcome, client.snapshot, history, model=names[0] if names else "", state=state_name,
            since=_number(request.query_params.get("since")),
        )  # fmt: skip
        return Response(encoder.encode(found), media_type="application/json", headers={"Cache-Control": "no-store"})

    app.add_route("/", show, methods=["GET"], include_in_schema=False)
    app.add_route("/dashboard.json", data, methods=["GET"], include_in_schema=False)


def _number(text: str | None) -> float:
    """A time from a query; 0 for none, or what is no number."""
    try:
        return float(text or 0)
    except ValueError:
        return 0.0
