"""What the routes of one HTTP process share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from ..serving.wire import Welcome
from .client import EngineClient
from .config import ServerConfig
from .errors import ApiError, shorten
from .http_counts import HttpCounts
from .texts import Texts


@dataclass(kw_only=True)
class ServerState:
    """Settings, the engine, and what was made from them once the engine was ready."""

    config: ServerConfig
    client: EngineClient
    counts: HttpCounts = field(default_factory=HttpCounts)
    texts: Texts | None = None  # None until the engine is ready
    parsers: Any = None  # names of the reasoning and tool-call parsers
    structured: Any = None  # compiles grammars
    defaults: dict[str, Any] = field(default_factory=dict)  # sampling parameters of the model's generation_config.json
    failed: str | None = None  # why this process cannot serve
    open: int = 0  # generating requests in this process now
    disconnects: int = 0  # clients that left before the end
    probe: asyncio.Task[float] | None = None  # of /health_generate, while it runs

    def ready(self) -> tuple[Welcome, Texts]:
        """The engine's welcome and the texts.

        Raises:
            ApiError: 503 while the engine loads, ends or is gone.
        """
        welcome = self.client.check()
        if self.texts is None:
            raise ApiError(503, self.failed or "the tokenizer is being loaded; try again in a moment", code="loading", retry_after_s=2)
        return welcome, self.texts

    def names(self) -> tuple[str, ...]:
        """Names of the model, the first for answers."""
        if self.config.served_model_name:
            return self.config.served_model_name
        return (self.client.welcome.model,) if self.client.welcome is not None else ()

    def model(self, asked: str | None) -> str:
        """The name for the answer to a request that asked for the model ``asked``.

        Raises:
            ApiError: 404, another model.
        """
        names = self.names()
        if not asked:
            return names[0]
        if asked not in names:
            known = ", ".join(names)
            raise ApiError(404, f"the model {shorten(asked, 100)!r} is not served; known: {known}", param="model", code="model_not_found")
        return asked

    def enter(self) -> None:
        """Count one more open request.

        Raises:
            ApiError: 429, as many as allowed are open.
        """
        if self.open >= self.config.max_concurrent_requests:
            most = self.config.max_concurrent_requests
            raise ApiError(429, f"{most} requests are open (--max-concurrent-requests); try again later", retry_after_s=1)
        self.open += 1

    def leave(self) -> None:
        """One request less."""
        self.open -= 1
