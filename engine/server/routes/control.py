"""Routes that change or ask the engine: /abort, /flush_cache, /expert_load, /start_profile, /stop_profile, /server_info."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..body import decode, read_body
from ..errors import ApiError
from ..openai.prepare import dumps
from ..state import ServerState

#: prompts of one request that /abort reaches by the request's id when another HTTP process has it
MOST_NAMED = 64
#: characters of a request's id: those that a client may give, with what the routes put before and behind them
MOST_ID_CHARACTERS = 160


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of POST /abort."""

    request_id: str | list[str] | None = None
    rid: str | list[str] | None = None  # SGLang's name
    abort_all: bool | None = None


class ProfileRequest(msgspec.Struct, kw_only=True):
    """Body of POST /start_profile; may be empty."""

    num_steps: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None  # steps after which the profile ends by itself


def _json(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")


async def abort(request: Request) -> Response:
    """POST /abort: end requests by id, of this or any other HTTP process. Who waits for them gets what there is, reason "abort"."""
    state: ServerState = request.app.state.server
    asked = decode(AbortRequest, await read_body(request.headers, request.receive, state.config))
    given = asked.request_id if asked.request_id is not None else asked.rid
    names = [given] if isinstance(given, str) else list(given or ())
    if not names and not asked.abort_all:
        raise ApiError(400, "nothing to abort: give request_id (one or a list), or abort_all", param="request_id")
    if len(names) > 1000:
        raise ApiError(400, f"request_id has {len(names)} ids; at most 1000 are taken", param="request_id")
    if (longest := max(map(len, names), default=0)) > MOST_ID_CHARACTERS:
        text = f"request_id has an id of {longest} characters; ids have at most {MOST_ID_CHARACTERS}"
        raise ApiError(400, text, param="request_id")
    parts = [f"{name}-{place}" for name in names for place in range(MOST_NAMED)]
    state.client.ask_abort(names + parts, everything=bool(asked.abort_all))
    return _json({"status": "ok"})


async def flush_cache(request: Request) -> Response:
    """POST /flush_cache: forget the cached prefixes of all replicas; 409 while requests run."""
    state: ServerState = request.app.state.server
    return _json(await state.client.control("flush_cache", state.config.control_timeout))


async def expert_load(request: Request) -> Response:
    """GET /expert_load: tokens that every expert has got, by layer, over all ranks."""
    state: ServerState = request.app.state.server
    return _json(await state.client.control("expert_load", state.config.control_timeout))


async def stats(request: Request) -> Response:
    """GET /server_info: what the engine is, and the counters of every rank."""
    state: ServerState = request.app.state.server
    welcome, _ = state.ready()
    body = await state.client.control("stats", state.config.control_timeout)
    return _json({"engine": msgspec.to_builtins(welcome), "stats": body})


async def start_profile(request: Request) -> Response:
    """POST /start_profile: torch's profiler on every rank, until /stop_profile or for ``num_steps`` steps."""
    state: ServerState = request.app.state.server
    asked = ProfileRequest()
    if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
        asked = decode(ProfileRequest, await read_body(request.headers, request.receive, state.config))
    args = {} if asked.num_steps is None else {"num_steps": asked.num_steps}
    return _json(await state.client.control("start_profile", state.config.control_timeout, **args))


async def stop_profile(request: Request) -> Response:
    """POST /stop_profile: write what the profilers saw."""
    state: ServerState = request.app.state.server
    return _json(await state.client.control("stop_profile", state.config.control_timeout))
