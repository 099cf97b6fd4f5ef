"""Settings of the serving loop. Flags are generated from them."""

from __future__ import annotations

from dataclasses import dataclass

from ..option import check_least, option
from .routing.settings import RoutingSettings
from .wire import ALIVE_EVERY_S


@dataclass(frozen=True, kw_only=True)
class ServeSettings(RoutingSettings):
    """How rank 0 takes requests, spreads them over replicas, and how it ends."""

    max_queued_requests: int = option(
        4096, "Completions that may wait beyond those that run; more are refused with 429 and Retry-After.", group="serving"
    )
    drain_timeout: float = option(
        20.0, "Seconds that open requests get to end after SIGTERM; torchrun kills its processes after 30.", group="serving"
    )
    http_process_timeout: float = option(
        30.0, "Seconds without a sign of life after which an HTTP process is killed and started again.", group="serving"
    )
    skip_server_warmup: bool = option(
        False, "Compile kernels of prompts when the first of them come, not by steps on padding before that.", group="serving"
    )
    profile_dir: str | None = option(
        None, "Folder for traces of torch's profiler, one of each rank; start and stop it over HTTP.", group="serving"
    )

    def __post_init__(self) -> None:
        """ValueError for a value out of its range."""
        super().__post_init__()
        check_least(self, 0, "max_queued_requests")
        if not self.drain_timeout >= 0:
            raise ValueError(f"drain_timeout must be 0 seconds or more, found {self.drain_timeout}")
        if not self.http_process_timeout >= 2 * ALIVE_EVERY_S:
            raise ValueError(f"http_process_timeout must be {2 * ALIVE_EVERY_S:g} seconds or more, found {self.http_process_timeout}")
