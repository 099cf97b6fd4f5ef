"""The web application of one HTTP process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ... import __version__
from .errors import ApiError
from .needs import need
from .reply import send_error
from .state import ServerState

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("rorqual.server")


def make_app(state: ServerState, *, lifespan: Callable[[Any], Any] | None = None) -> FastAPI:
    """The application over ``state``; whoever calls starts the client.

    Raises:
        ValueError: fastapi is not installed.
    """
    need("fastapi")
    from fastapi import FastAPI
    from starlette.exceptions import HTTPException

    from .auth import Auth
    from .dashboard import add_routes as add_dashboard
    from .http_counts import Counting
    from .origin import OriginGuard
    from .schema import document

    app = FastAPI(title="rorqual", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = state
    _add_routes(app)
    add_dashboard(app, state)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    app.add_exception_handler(ApiError, _Errors(_as_is))
    app.add_exception_handler(HTTPException, _Errors(_from_http))
    app.add_exception_handler(Exception, _Errors(_from_bug))
    if state.config.api_key:
        app.add_middleware(Auth, keys=state.config.api_key)
    app.add_middleware(OriginGuard, allowed=state.config.allowed_origins or ())
    if state.config.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(CORSMiddleware, allow_origins=list(state.config.allowed_origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(Counting, counts=state.counts)
    return app


def _add_routes(app: FastAPI) -> None:
    """Every route but the dashboard's. All read their bodies themselves: the hot path builds no pydantic objects."""
    from .openai.chat import chat_completions
    from .openai.completions import completions
    from .routes import control, health, metrics, models, tokens

    def add(method: str, path: str, endpoint: Any) -> None:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
        if method == "GET":  # load balancers ask with HEAD; uvicorn leaves the body out
            app.add_api_route(path, endpoint, methods=["HEAD"], response_model=None, include_in_schema=False)

    add("POST", "/v1/completions", completions)
    add("POST", "/v1/chat/completions", chat_completions)
    add("GET", "/v1/models", models.models)
    add("GET", "/v1/models/{name:path}", models.model)
    add("GET", "/version", models.version)
    add("POST", "/tokenize", tokens.tokenize)
    add("POST", "/detokenize", tokens.detokenize)
    add("GET", "/health", health.health)
    add("GET", "/ping", health.health)
    add("POST", "/ping", health.health)
    add("GET", "/health_generate", health.health_generate)
    add("GET", "/metrics", metrics.metrics)
    add("POST", "/abort", control.abort)
    add("POST", "/flush_cache", control.flush_cache)
    add("GET", "/expert_load", control.expert_load)
    add("GET", "/server_info", control.stats)
    add("POST", "/start_profile", control.start_profile)
    add("POST", "/stop_profile", control.stop_profile)


class _Errors:
    """An exception handler that answers in OpenAI's shape."""

    def __init__(self, translate: Callable[[Any], ApiError]) -> None:
        self._translate = translate

    async def __call__(self, request: Any, error: Exception) -> Any:
        """A response for ``error``."""
        return _ErrorResponse(self._translate(error))


class _ErrorResponse:
    """ASGI response of an error."""

    def __init__(self, error: ApiError) -> None:
        self._error = error
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._error.status == 499:
            with suppress(Exception):  # the client has gone; a log line of the status is all that is left
                await send_error(send, self._error)
            return
        await send_error(send, self._error)


def _as_is(error: ApiError) -> ApiError:
    return error


def _from_http(error: Any) -> ApiError:
    """A path or method that nobody serves."""
    text = {404: "no such path", 405: "this path does not take that method"}.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, f"{text}; /openapi.json lists what there is")


def _from_bug(error: Exception) -> ApiError:
    """Anything else is our own bug: the log has the traceback, the client none of it."""
    return ApiError(500, f"the server failed at this request ({type(error).__name__}); its log has more")
