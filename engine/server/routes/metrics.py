"""GET /metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..metrics import CONTENT_TYPE, render
from ..state import ServerState


async def metrics(request: Request) -> Response:
    """Counters in Prometheus' text format, from the latest snapshot: the engine is not asked."""
    state: ServerState = request.app.state.server
    names = state.names()
    data = render(state.client.welcome, state.client.snapshot, state.counts, model=names[0] if names else None)
    return Response(data, headers={"content-type": CONTENT_TYPE})
