"""The servers of a router: which are well, what each has open, and whose turn it is."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from ...serving.histogram import LATENCY, Histogram
from ...serving.routing.router import Router
from .config import RouterConfig
from .guess import GuessedCache
from .prompt import Asked

log = logging.getLogger("rorqual.router")

#: tokens (of four bytes) in a block of a prompt
BLOCK_TOKENS = 64


@dataclass(kw_only=True)
class Worker:
    """One server."""

    url: str
    cache: GuessedCache
    well: bool = True
    problem: str = ""  # why it is not well
    failures: int = 0  # looks in a row that failed
    answers: Counter[int] = field(default_factory=Counter)  # answers by HTTP status
    broken: int = 0  # connections that failed, before or within an answer
    first_byte: Histogram = field(default_factory=lambda: Histogram(LATENCY))  # seconds


class Fleet:
    """Chooses servers. Not thread safe: all of it belongs to one event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.workers = [Worker(url=url, cache=GuessedCache(config.worker_cache_blocks)) for url in config.urls]
        self.router = Router(len(self.workers), config, page_size=BLOCK_TOKENS)
        self.retries = 0  # requests that went to another server
        self.refused = 0  # requests that found no server
        self._names = itertools.count()

    def well(self) -> list[int]:
        """Servers that get requests."""
        return [rank for rank, worker in enumerate(self.workers) if worker.well]

    # ---- requests

    def choose(self, asked: Asked, tried: Collection[int]) -> tuple[str, int] | None:
        """A name for this try and the server for it, none of ``tried``; None when no server is left."""
        among = [rank for rank in self.well() if rank not in tried]
        if not among:
            return None
        name = str(next(self._names))
        rank = self.router.pick(name, asked.prompt, asked.max_tokens, among=among)
        return name, rank

    def began(self, name: str, rank: int, asked: Asked, seconds: float) -> None:
        """A good answer has begun: the prompt is in the server's cache."""
        self.router.began(name)
        self.workers[rank].first_byte.add(seconds)
        if self.router.uses_kv:
            hashes = self.router.hashes(asked.prompt)
            gone = self.workers[rank].cache.use(hashes)
            self.router.index.add(rank, hashes)
            self.router.index.remove(rank, gone)

    def done(self, name: str, generated: int | None) -> None:
        """A try has ended, with ``generated`` tokens where they were counted."""
        self.router.done(name, generated)

    # ---- health

    def failed(self, rank: int, problem: str, *, at_once: bool = False) -> None:
        """A server did not answer as it should; after some failures in a row, or ``at_once``, it gets no more requests."""
        worker = self.workers[rank]
        worker.failures += 1
        worker.problem = problem
        if worker.well and (at_once or worker.failures >= self.config.health_failures):
            worker.well = False
            log.warning("%s gets no more requests: %s", worker.url, problem)

    def healthy(self, rank: int) -> None:
        """A server is well. One that was not is taken to have an empty cache."""
        worker = self.workers[rank]
        worker.failures, worker.problem = 0, ""
        if not worker.well:
            worker.well = True
            self.forget(rank)
            log.info("%s gets requests again", worker.url)

    def forget(self, rank: int) -> None:
        """A server's cache is empty."""
        self.workers[rank].cache.clear()
        self.router.index.forget(rank)
