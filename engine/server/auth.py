"""The API key: who may use the server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

from .errors import ApiError
from .reply import send_error

#: paths that need no key: probes of a load balancer, Prometheus, and the dashboard's page (not its numbers)
OPEN_PATHS = frozenset(("/health", "/ping", "/health_generate", "/metrics", "/version", "/"))


class Auth:
    """ASGI middleware: without a right key a request gets 401, before anything of it is read."""

    def __init__(self, app: Any, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._known(scope["headers"]):
            await self._app(scope, receive, send)
            return
        await send_error(send, ApiError(401, "a right API key is needed: send 'Authorization: Bearer KEY'"))

    def _known(self, headers: Any) -> bool:
        for name, value in headers:
            if name == b"authorization":
                kind, _, key = value.partition(b" ")
                found = _digest(key.strip())
                # every key is compared, in a time that does not depend on how much of it is right
                return kind.lower() == b"bearer" and sum(hmac.compare_digest(found, digest) for digest in self._digests) > 0
        return False


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
