"""Settings of the stand-alone router. The flags of ``rorqual router`` are generated from these fields."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from ...option import check_least, check_seconds, option
from ...serving.routing.settings import POLICIES, RoutingSettings
from ..http_settings import HttpSettings


@dataclass(frozen=True, kw_only=True)
class RouterConfig(HttpSettings, RoutingSettings):
    """Where the router listens, which servers it has, and what it takes. ValueError names what is wrong."""

    worker_urls: tuple[str, ...] | None = option(None, "Servers to spread requests over, such as http://10.0.0.1:8000.", group="router")
    port: int = option(8080, "Port to listen on; 0 takes a free one and says which.", group="HTTP")
    dp_routing: str = option(
        "kv", "Server of a request: by turns, fewest open requests, fewest open tokens, or least work given what it has cached (kv).",
        "--policy", choices=POLICIES, group="routing",
    )  # fmt: skip
    worker_cache_blocks: int = option(
        32_768, "kv: blocks of 256 bytes of prompts that a server is taken to have cached; the oldest are forgotten.", group="routing"
    )
    health_interval: float = option(2.0, "Seconds from one look at a server's /health to the next.", group="router")
    health_timeout: float = option(5.0, "Seconds in which /health must answer.", group="router")
    health_failures: int = option(2, "Looks in a row that must fail before a server gets no more requests.", group="router")
    retries: int = option(2, "Other servers that are tried when one fails before the first byte of its answer.", group="router")
    connect_timeout: float = option(5.0, "Seconds in which a server must take a connection.", group="router")
    answer_timeout: float = option(
        600.0, "Seconds for which a server may say nothing: before its answer begins, and within it.", group="router"
    )

    def __post_init__(self) -> None:
        """Check the servers and the ranges."""
        super().__post_init__()
        if not self.worker_urls:
            raise ValueError("a router needs servers; give --worker-urls http://HOST:PORT ...")
        for url in self.urls:
            _check_url(url)
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"--worker-urls names a server twice: {' '.join(self.urls)}")
        self.check_http()
        check_least(self, 0, "retries")
        check_least(self, 1, "worker_cache_blocks", "health_failures")
        check_seconds(self, "health_interval", "health_timeout", "connect_timeout", "answer_timeout")

    @property
    def urls(self) -> list[str]:
        """The servers, without a slash at the end."""
        return [url.rstrip("/") for url in self.worker_urls or ()]


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"--worker-urls has {url!r}: {error}; write http://HOST:PORT") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ValueError(f"--worker-urls has {url!r}; write http://HOST:PORT")
    if parts.username is not None:
        raise ValueError("--worker-urls has a user name or password in it; clients send their own Authorization")
