"""Clients that each have one request in the system at all times, played out over measured step and copy times."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to serve requests whose prefixes are cached in host memory. Seconds."""

    name: str
    step_s: Mapping[int, float]  # measured step by batch; a straight line between them
    copy_s: float  # link time before a request's first step
    blocks: bool  # nothing is decoded while a prefix is copied
    cold_s: float  # that a request's first step takes longer
    capacity: int  # most requests at a time
    rest_s: float = 0.0  # of a step, beside attention; assumed, not measured

    def __post_init__(self) -> None:
        if not self.step_s or self.capacity < 1:
            raise ValueError(
                f"system {self.name!r} needs measured steps and room for one request, found {dict(self.step_s)}, {self.capacity}"
            )

    def step(self, batch: int) -> float:
        """Seconds of a step over ``batch`` requests; beyond the measured batches in proportion to the last."""
        sizes = sorted(self.step_s)
        if batch >= sizes[-1]:
            return self.step_s[sizes[-1]] * max(1.0, batch / sizes[-1]) + self.rest_s
        at = bisect_left(sizes, batch)
        if at == 0:
            return self.step_s[sizes[0]] + self.rest_s
        a, b = sizes[at - 1], sizes[at]
        share = (batch - a) / (b - a)
        return self.step_s[a] * (1.0 - share) + self.step_s[b] * share + self.rest_s


@dataclass(frozen=True, kw_only=True)
class Service:
    """What clients saw: means over the requests that were counted."""

    ttft_s: float  # from sending to the first token, waiting included
    tbt_s: float  # between tokens after it
    tokens_per_s: float  # of all clients


@dataclass
class _Request:
    sent: float
    left: int
    ready: float = 0.0
    first: float = -1.0


@dataclass
class _Loop:
    system: System
    output: int
    now: float = 0.0
    link_free: float = 0.0
    waiting: deque[_Request] = field(default_factory=deque)
    copying: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)

    def admit(self) -> None:
        """Start the copies of waiting requests that there is room for."""
        while self.waiting and len(self.copying) + len(self.running) < self.system.capacity:
            request = self.waiting.popleft()
            self.link_free = max(self.link_free, self.now) + self.system.copy_s
            request.ready = self.link_free
            if self.system.blocks:
                self.now = self.link_free
            self.copying.append(request)

    def join(self) -> int:
        """Take in the requests whose copies are done; how many."""
        if not self.running and self.copying:
            self.now = max(self.now, self.copying[0].ready)
        count = 0
        while self.copying and self.copying[0].ready <= self.now:
            self.running.append(self.copying.popleft())
            count += 1
        return count

    def run(self, joined: int) -> list[_Request]:
        """Decode until a request ends or another is ready; the requests that ended."""
        step = self.system.step(len(self.running))
        first = step + joined * self.system.cold_s
        fewest = min(request.left for request in self.running)
        steps = 1 if joined else fewest
        if not joined and self.copying:
            steps = min(steps, max(1, int((self.copying[0].ready - self.now) / step) + 1))
        self.now += first + (steps - 1) * step
        for request in self.running:
            request.left -= steps
            if request.first < 0.0:
                request.first = self.now - (steps - 1) * step
        ended = [request for request in self.running if request.left == 0]
        self.running = [request for request in self.running if request.left]
        return ended


def play(system: System, *, clients: int, output: int, rounds: int = 4) -> Service:
    """``clients`` that send a request as soon as the last one ended.

    The first ``clients`` requests are not counted; they are of all lengths, so that the later ones do not march in step.

    Raises:
        ValueError: no client, or nothing to write.
    """
    if clients < 1 or output < 2 or rounds < 2:
        raise ValueError(f"a closed loop needs a client, 2 tokens and 2 rounds, found {clients}, {output}, {rounds}")
    loop = _Loop(system=system, output=output)
    loop.waiting.extend(_Request(sent=0.0, left=max(1, output * (number + 1) // clients)) for number in range(clients))
    ended: list[tuple[_Request, float]] = []
    start = 0.0
    while len(ended) < rounds * clients:
        loop.admit()
        joined = loop.join()
        for request in loop.run(joined):
            ended.append((request, loop.now))
            loop.waiting.append(_Request(sent=loop.now, left=output))
            if len(ended) == clients:
                start = loop.now
    counted = ended[clients:]
    return Service(
        ttft_s=sum(request.first - request.sent for request, _ in counted) / len(counted),
        tbt_s=sum((end - request.first) / (output - 1) for request, end in counted) / len(counted),
        tokens_per_s=len(counted) * output / (loop.now - start),
    )
