"""Which web pages may make a browser send something here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from .errors import ApiError, shorten
from .reply import send_error

#: methods that change nothing here; what they answer is hidden from pages of other origins by the browser itself
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_PORTS = {"http": 80, "https": 443}


class OriginGuard:
    """ASGI middleware: 403 for what a browser sends for a page of another origin. A browser says whose page it is, others say nothing."""

    def __init__(self, app: Any, allowed: Sequence[str]) -> None:
        """``allowed``: origins beside the server's own; "*" stands for all."""
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the ASGI specification."""
        stranger = None if scope["type"] != "http" or scope["method"] in SAFE_METHODS else self._stranger(scope["headers"])
        if stranger is None:
            await self._app(scope, receive, send)
            return
        text = f"web pages of {stranger} may not use this server; name their origin with --allowed-origins"
        await send_error(send, ApiError(403, text, code="origin_not_allowed"))

    def _stranger(self, headers: Any) -> str | None:
        """Whose page it is, for messages; None when it may."""
        found: dict[bytes, list[str]] = {}
        for name, value in headers:
            if name in (b"origin", b"host", b"sec-fetch-site"):
                found.setdefault(name, []).append(value.decode("latin-1").strip())
        if "*" in self._allowed:
            return None
        origins, hosts = found.get(b"origin", []), found.get(b"host", [""])
        for origin in origins:
            if origin not in self._allowed and not (len(hosts) == 1 and is_own(origin, hosts[0])):
                return repr(shorten(origin, 200))
        if not origins and any(site not in ("same-origin", "none") for site in found.get(b"sec-fetch-site", [])):
            return "another site"
        return None


def is_own(origin: str, host: str) -> bool:
    """True when ``origin`` is that of the server a client knows as ``host``. A proxy may speak HTTPS for it, so the scheme is left out."""
    try:
        parts = urlsplit(origin)
        port = _PORTS.get(parts.scheme)
        if port is None or not parts.hostname:
            return False
        known = urlsplit(f"//{host}")
        return (parts.hostname, parts.port or port) == (known.hostname, known.port or port)
    except ValueError:  # no port, or a broken address
        return False
