"""What is served: /v1/models, /version."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .... import __version__
from ..errors import ApiError
from ..openai.prepare import dumps
from ..state import ServerState


def _entry(state: ServerState, name: str, root: str) -> dict[str, Any]:
    welcome = state.client.welcome
    assert welcome is not None
    return {
        "id": name, "object": "model", "created": int(welcome.started), "owned_by": "rorqual", "root": root, "parent": None,
        "max_model_len": welcome.max_model_len, "vocab_size": welcome.vocab_size, "model_type": welcome.model_type,
        "layout": welcome.layout, "dp_size": welcome.dp_size,
    }  # fmt: skip


async def models(request: Request) -> Response:
    """GET /v1/models."""
    state: ServerState = request.app.state.server
    state.client.check_alive()
    names = state.names()
    data = [_entry(state, name, state.client.welcome.model if state.client.welcome else "") for name in names]
    return Response(dumps({"object": "list", "data": data}), media_type="application/json")


async def model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    state: ServerState = request.app.state.server
    state.client.check_alive()
    name = request.path_params["name"]
    if name not in state.names():
        raise ApiError(404, f"the model {name[:100]!r} is not served", param="model", code="model_not_found")
    root = state.client.welcome.model if state.client.welcome else ""
    return Response(dumps(_entry(state, name, root)), media_type="application/json")


async def version(request: Request) -> Response:
    """GET /version."""
    state: ServerState = request.app.state.server
    welcome = state.client.welcome
    about = {"layout": welcome.layout, "device": welcome.device} if welcome is not None else {"layout": None, "device": None}
    return Response(dumps({"version": __version__, **about}), media_type="application/json")
