"""An engine of one rank driven step by step: requests come, are aborted and lose their pages between any two steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rorqual import LLM, SamplingParams


@dataclass(kw_only=True)
class Asked:
    """One request and what has come of it."""

    place: int  # of its prompt, as the caller numbers them
    size: int  # tokens of the prompt and of the longest output
    begun: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    aborted: bool = False  # somebody asked for its end
    ended: str | None = None  # why it ended
    seconds: float = 0.0  # it took
    cached: int = 0  # prompt tokens that it found in the prefix tree


class Live:
    """Requests of one engine. ``open`` are those that have not ended, ``ended`` those that have and were not taken yet."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self._driver = llm, llm.engine.driver
        self.scheduler = llm.engine.leader.scheduler
        self.open: dict[str, Asked] = {}
        self.ended: list[Asked] = []

    @property
    def steps(self) -> int:
        """Steps run since the engine was made."""
        return self.llm.engine.runner.stats.steps

    @property
    def demand(self) -> int:
        """Tokens that the open requests have and may yet get."""
        return sum(asked.size for asked in self.open.values())

    def add(self, place: int, prompt: Sequence[int], params: SamplingParams, priority: int = 0) -> None:
        """A request that the next step can begin."""
        commands = self._driver._submit([list(prompt)], params, [priority])
        self._driver._commands += commands
        self.open[commands[0].request_id.split(".")[0]] = Asked(place=place, size=len(prompt) + params.max_tokens)

    def abort(self, name: str) -> None:
        """End an open request with the next step."""
        self._driver.abort(name)
        self.open[name].aborted = True

    def preempt(self, place: int) -> bool:
        """Take pages and slot from running request number ``place``, in rank order; False when there are not so many."""
        running = self.scheduler.running_requests()
        return place < len(running) and self.scheduler.preempt(running[place].request_id)

    def step(self) -> None:
        """One step, if there is anything to do."""
        events, _ = self._driver._tick()
        for chunk in self._driver.front.chunks(events):
            asked = self.open[chunk.request_id]
            asked.tokens += chunk.token_ids
            if chunk.output is not None:
                asked.ended, asked.cached = chunk.output.outputs[0].finish_reason, chunk.output.metrics.cached_tokens
                asked.seconds = time.monotonic() - asked.begun
                self.ended.append(self.open.pop(chunk.request_id))

    def finish(self, deadline: float) -> None:
        """Steps until every request has ended and nothing is under way.

        Raises:
            AssertionError: some have not by ``deadline`` (time.monotonic); it names them.
        """
        while self.open or self.scheduler.has_work:
            self.step()
            self.check_deadline(deadline)
        self._driver.end()

    def check_deadline(self, deadline: float) -> None:
        """AssertionError, with the open requests, once it is later than ``deadline``."""
        assert time.monotonic() < deadline, f"requests do not end: {self.open}"
