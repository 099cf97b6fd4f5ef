"""Run the load: requests at their times, at most so many at once, conversations turn by turn."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from ....engine.collector import no_collection
from ..datasets.request import Request
from .ask import Asker
from .http import Client
from .outcome import Outcome
from .stream import StreamSink

#: bytes of requests that are made before the clock starts; the rest are made when they are sent
BODY_BYTES = 1 << 28


@dataclass(kw_only=True)
class Load:
    """A load and what came of it."""

    client: Client
    asker: Asker
    timeout_s: float
    limit: int | None = None  # requests at a time
    headers: dict[str, str] = field(default_factory=dict)
    told: Callable[[], Any] = lambda: None  # called at the end of each request
    _gate: Any = None

    def bodies(self, requests: Sequence[Request]) -> list[bytes | None]:
        """Bodies of first requests, made before the clock starts as far as they are not too much to hold."""
        room, found = BODY_BYTES, list[bytes | None]()
        for request in requests:
            body = self.asker.body(self.asker.first(request), request.output_len) if room > 0 else None
            room -= len(body or b"")
            found.append(body)
        return found

    async def run(self, requests: Sequence[Request], times: Sequence[float]) -> tuple[list[Outcome], float]:
        """Send each request at its time; outcomes in order (a conversation's turns one after the other), and the seconds of it all."""
        self._gate = nullcontext() if self.limit is None else asyncio.Semaphore(self.limit)
        bodies = self.bodies(requests)
        gc.collect()
        with no_collection():  # it would stop the clock: a run makes many small objects and no cycles
            start = time.perf_counter()
            each = zip(requests, bodies, times, strict=True)
            talks = [asyncio.create_task(self._talk(request, body, start + at)) for request, body, at in each]
            try:
                found = await asyncio.gather(*talks)
            except BaseException:
                for talk in talks:
                    talk.cancel()
                await asyncio.gather(*talks, return_exceptions=True)
                raise
        return [outcome for talk in found for outcome in talk], time.perf_counter() - start

    async def _talk(self, request: Request, body: bytes | None, at: float) -> list[Outcome]:
        wait = at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        prompt = self.asker.first(request)
        found = [await self._one(prompt, body, request.output_len, at)]
        for turn in request.then:
            last = found[-1]
            if last.success and isinstance(prompt, list) and not self.asker.chat and len(last.token_ids) < last.output_tokens:
                last.error = "the next turn needs the answer's token ids, which the server does not send (--tokenizer FOLDER sends text)"
            if not last.success:  # without an answer there is no next turn
                break
            prompt = self.asker.later(prompt, last, turn)
            found.append(await self._one(prompt, None, turn.output_len, time.perf_counter()))
        return found

    async def _one(self, prompt: Any, body: bytes | None, output_len: int, planned: float) -> Outcome:
        outcome = Outcome(planned=planned, wanted=output_len, started=time.perf_counter())
        body = body or self.asker.body(prompt, output_len)
        async with self._gate:
            await ask(self.client, self.asker.endpoint, body, outcome, timeout_s=self.timeout_s, headers=self.headers)
        if not outcome.prompt_tokens and isinstance(prompt, list) and not self.asker.chat:
            outcome.prompt_tokens = len(prompt)  # the server does not say, and ids need no counting
        self.told()
        return outcome


async def ask(client: Client, endpoint: str, body: bytes, outcome: Outcome, *, timeout_s: float, headers: dict[str, str]) -> None:
    """Send one streamed request and fill its outcome; what goes wrong becomes its error."""
    sink = StreamSink(outcome)
    outcome.sent = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            await client.send("POST", endpoint, body, sink, headers)
    except TimeoutError:
        outcome.error = f"no whole response within {timeout_s:g} s (--request-timeout-s)"
    except ConnectionError as error:
        outcome.error = str(error)
    if outcome.error is None:
        sink.finish()
    else:
        outcome.ended = time.perf_counter()


async def probe(client: Client, asker: Asker, rate: float, prompt: Any, *, timeout_s: float) -> list[Outcome]:
    """Requests of one token at ``rate`` a second until cancelled; those that ended."""
    found: list[Outcome] = []
    running: set[asyncio.Task[None]] = set()
    start, number = time.perf_counter(), 0
    try:
        while True:
            outcome = Outcome(planned=start + number / rate, started=time.perf_counter(), wanted=1)
            found.append(outcome)
            task = asyncio.create_task(ask(client, asker.endpoint, asker.body(prompt, 1), outcome, timeout_s=timeout_s, headers={}))
            running.add(task)
            task.add_done_callback(running.discard)
            number += 1
            await asyncio.sleep(max(0.0, start + number / rate - time.perf_counter()))
    except asyncio.CancelledError:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return [outcome for outcome in found if outcome.ended]
