"""Requests that the HTTP processes answered, by route: counted in each process, added up over all of them."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..serving.histogram import LATENCY, Histogram, merged

#: routes that are told apart; more come from paths that nobody serves, and count as "other"
_MOST_ROUTES = 64
#: seconds between two writings of this process's counts
_EVERY_S = 1.0


class _Buckets(msgspec.Struct, kw_only=True):
    """A histogram, see ``Histogram.to_wire``."""

    bounds: list[float]
    counts: list[int]
    sum: float


class _Part(msgspec.Struct, kw_only=True):
    """Counts of one process, as it writes them."""

    pid: int
    requests: list[tuple[str, str, int, int]]  # route, method, status, how many
    seconds: dict[str, _Buckets]  # by route
    in_flight: int


class HttpCounts:
    """Counts of this process. With a ``folder`` that all HTTP processes of a server share, each tells the others there.

    A process that has ended keeps its part of all sums, so that they never fall; it has nothing in flight.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        """``folder``: exists, and is private to the server; None: this is the only HTTP process."""
        self._requests: Counter[tuple[str, str, int]] = Counter()  # (route, method, status)
        self._seconds: dict[str, Histogram] = {}
        self._in_flight = 0
        self._file = None if folder is None else Path(folder) / f"http-{os.getpid()}-{os.urandom(4).hex()}.json"
        self._dirty, self._written = True, 0.0

    def _known(self, route: str) -> str:
        return route if route in self._seconds or len(self._seconds) < _MOST_ROUTES else "other"

    def begin(self) -> None:
        """A request came in."""
        self._in_flight += 1
        self._note()

    def end(self, route: str, method: str, status: int, seconds: float) -> None:
        """The last byte of the answer was sent, or the client has left before the first; ``status`` is 499 then.

        ``route``: as the application spells it, such as "/v1/completions", never a path that a client made up.
        """
        route = self._known(route)
        self._in_flight -= 1
        self._requests[route, method, status] += 1
        if route not in self._seconds:
            self._seconds[route] = Histogram(LATENCY)
        self._seconds[route].add(seconds)
        self._note()

    def _note(self) -> None:
        self._dirty = True
        if self._file is not None and time.monotonic() - self._written > _EVERY_S:
            self.publish()

    def publish(self) -> None:
        """Write this process's counts for the others, if they have changed. A full disk does no harm but to the sums."""
        self._written = time.monotonic()
        if self._file is None or not self._dirty:
            return
        self._dirty = False
        beside = self._file.with_suffix(".new")
        with suppress(OSError):
            beside.write_bytes(msgspec.json.encode(self._mine()))
            beside.replace(self._file)

    def _mine(self) -> _Part:
        return _Part(
            pid=os.getpid(),
            requests=[(*key, count) for key, count in self._requests.items()],
            seconds={route: _Buckets(**histogram.to_wire()) for route, histogram in self._seconds.items()},
            in_flight=self._in_flight,
        )

    def totals(self) -> dict[str, Any]:
        """Of all processes: ``requests`` [[route, method, status, count]], ``seconds`` histograms by route, ``in_flight`` requests,
        ``processes`` that are alive.
        """
        self.publish()
        parts = [self._mine(), *self._others()]
        alive = [part for part in parts if _alive(part.pid)]
        requests: Counter[tuple[str, str, int]] = Counter()
        for part in parts:
            for route, method, status, count in part.requests:
                requests[route, method, status] += count
        routes = sorted({route for part in parts for route in part.seconds})
        return {
            "requests": [[*key, count] for key, count in sorted(requests.items())],
            "seconds": {route: merged([msgspec.to_builtins(p.seconds[route]) for p in parts if route in p.seconds]) for route in routes},
            "in_flight": sum(part.in_flight for part in alive),
            "processes": len(alive),
        }

    def _others(self) -> list[_Part]:
        if self._file is None:
            return []
        found = []
        for path in sorted(self._file.parent.glob("http-*.json")):
            if path != self._file:
                with suppress(OSError, ValueError):  # gone, or no such file
                    found.append(msgspec.json.decode(path.read_bytes(), type=_Part))
        return found


class Counting:
    """ASGI middleware: counts every HTTP request that passes, with the route that the application found for it."""

    def __init__(self, app: Any, counts: HttpCounts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499  # nothing was answered

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = time.monotonic()
        self._counts.begin()
        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            route = getattr(scope.get("route"), "path", None) or "other"
            self._counts.end(route, method_of(scope), status, time.monotonic() - began)


def method_of(scope: Any) -> str:
    """The method of a request; "other" for those that nobody serves."""
    method = str(scope["method"])
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE") else "other"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
