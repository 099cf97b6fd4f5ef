"""Settings that every HTTP process has, a server's and the router's: where it listens, and how much it takes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..option import check_least, check_seconds, option


@dataclass(frozen=True, kw_only=True)
class HttpSettings:
    """Where an HTTP process listens, and the limits of a request."""

    host: str = option("127.0.0.1", "Address to listen on; this machine alone can reach the default.", group="HTTP")
    port: int = option(8000, "Port to listen on; 0 takes a free one and says which.", group="HTTP")
    disable_access_log: bool = option(False, "No line in the log for each HTTP request.", "--disable-uvicorn-access-log", group="HTTP")
    max_request_bytes: int = option(
        16 << 20, "Largest body of a request, bytes; larger ones get 413. It bounds the number of values in one too.", group="HTTP limits"
    )
    max_concurrent_requests: int = option(
        4096, "Requests that one HTTP process has open at a time; more get 429 with Retry-After.", group="HTTP limits"
    )
    header_timeout: float = option(10.0, "Seconds in which the head of a request must arrive.", group="HTTP limits")
    body_timeout: float = option(30.0, "Seconds in which the body of a request must arrive; later ones get 408.", group="HTTP limits")

    def check_http(self) -> None:
        """Refuse what no HTTP process can do.

        Raises:
            ValueError: a value out of range; names the flag.
        """
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be from 0 (any free one) to 65535, found {self.port}")
        check_least(self, 1, "max_request_bytes", "max_concurrent_requests")
        check_seconds(self, "header_timeout", "body_timeout")
