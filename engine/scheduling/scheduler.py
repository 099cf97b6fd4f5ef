"""Which requests run in each step of one DP rank, and what happens when a step's tokens come back."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..offload.host_pages import HostPages
from ..offload.residency import Residency
from ..plan import StepPlan
from ..request import FinishReason, Request, RequestState
from ..serving.routing.kv_log import KvLog
from ..sharing.prefix_share import PrefixShare
from .admission import validate
from .flights import Flight, Flights
from .pool import Pool
from .running import RunningSet
from .scheduler_config import SchedulerConfig
from .scheduler_stats import SchedulerStats
from .seat import Seat
from .stepper import Stepper
from .waiting import WaitingQueue

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Continuous batching with chunked prefill, a prefix tree, preemption by recompute and late results.

    ``schedule`` makes the plans of steps 0, 1, 2, ...; every one is later completed in order (``complete``, with the
    tokens it sampled) or, if it was empty and nobody launched it, skipped (``skip``). Any number of steps may be
    under way: decisions use lengths, which are known when a step is scheduled, never a token that is not back yet.
    Not thread safe.
    """

    def __init__(self, config: SchedulerConfig, host_pages: HostPages | None = None, share: PrefixShare | None = None) -> None:
        """``host_pages``: with offloading. ``share``: with a prefix directory, whose ``pages`` are ``host_pages`` then."""
        self.config = config
        self.stats = SchedulerStats()
        assert (config.tier is None) == (host_pages is None)
        self.tier = None
        if config.tier is not None and host_pages is not None:
            self.tier = Residency(config.tier, host_pages, with_keys=share is not None)
        self.share = share
        self._pool = Pool(config, self.tier, share)
        if share is not None:
            share.relieve = self._pool.relieve
        self._running = RunningSet()
        self._waiting = WaitingQueue()
        self._stepper = Stepper(config, self._pool, self._running, self._waiting)
        self._requests: dict[str, Request] = {}  # waiting and running
        self._flights = Flights()
        self._step = 0

    # ---- requests

    def validate(self, request: Request) -> None:
        """Refuse a request that can never run.

        Raises:
            ValueError: empty prompt, prompt longer than ``max_model_len - 1``, or more pages than the pool has.
        """
        validate(request, self.config)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: as ``validate``; or the id belongs to a request that has not ended.
        """
        self.validate(request)
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id}: a request with this id has not ended yet; ids must be unique")
        assert request.state is RequestState.WAITING and request.last_step == -1, "a request is added once"
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def abort(self, request_id: str) -> bool:
        """End a request now and drop its results under way. False when it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, FinishReason.ABORT, None)
        return True

    def preempt(self, request_id: str) -> bool:
        """Take pages and slot of a running request, as if they had run out; it is recomputed. False when it does not run."""
        request = self._requests.get(request_id)
        if request is None or request.state is not RequestState.RUNNING:
            return False
        self._stepper.preempt(self._running.seat_of(request))
        self.stats.preemptions = self._stepper.preemptions
        return True

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None, keep_tokens: int | None = None) -> None:
        """End a request for a reason found by the caller, such as a stop string; its results under way are dropped.

        ``keep_tokens`` cuts its output to that many tokens. One that ended by itself with the same token gets the
        caller's reason instead.
        """
        if keep_tokens is not None:
            assert 0 <= keep_tokens <= len(request.output_ids)
            del request.output_ids[keep_tokens:]
        if request.state is RequestState.FINISHED:
            request.finish_reason, request.stop_reason = reason, stop_reason
        else:
            self._end(request, reason, stop_reason)

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        waited = request.state is RequestState.WAITING
        request.move(RequestState.FINISHED)
        request.finish_reason, request.stop_reason, request.finish_time = reason, stop_reason, time.monotonic()
        request.generation += 1
        request.n_launched = 0
        del self._requests[request.request_id]
        if self.share is not None:
            self.share.questions.forget(request)
        if waited:
            self._waiting.ended()
        else:
            seat = self._running.seat_of(request)
            self._running.remove(seat)
            self._pool.release(seat)

    # ---- steps

    def schedule(self) -> StepPlan:
        """The next step. Its plan may have no rows: nothing can run, or everything waits for results under way."""
        builder = self._stepper.fill(self._step)
        plan = builder.build(self._pool.pop_freed())
        if self.tier is not None:
            self.tier.finish(plan, builder.several())
        if self.share is not None:
            self.share.end(plan)
        rows = builder.rows()
        sampled = [(row[0], row[0].request.generation) for row in rows if row[3]]
        self._flights.push(Flight(step=self._step, seats=[row[0] for row in rows], sampled=sampled))
        self._step += 1
        self.stats.count(builder, rows)
        self.stats.preemptions, self.stats.evictions = self._stepper.preemptions, self._pool.evictions
        return plan

    def complete(self, step: int, tokens: Sequence[int]) -> list[tuple[Request, int]]:
        """Results of a launched step: ``tokens`` of its sampled rows, in plan order. Steps complete in order.

        Returns the (request, token) pairs that were appended, those that end their request included; a token of a
        request that has ended meanwhile is dropped.
        """
        flight = self._flights.pop(step, len(tokens))
        appended: list[tuple[Request, int]] = []
        now = time.monotonic()
        for (seat, generation), token in zip(flight.sampled, tokens, strict=True):
            request = seat.request
            if request.generation != generation:
                continue
            self._append(seat, int(token), now)
            appended.append((request, int(token)))
        self._pool.complete(step)
        self._pass_skipped()
        return appended

    def _append(self, seat: Seat, token: int, now: float) -> None:
        """One more token of a request, which may end with it."""
        request = seat.request
        if not request.output_ids:
            request.first_token_time = now
        request.output_ids.append(token)
        request.n_launched -= 1
        if seat.guided:
            seat.ready_step = seat.last_step + self.config.pp
        if seat.tokens is not None and seat.live:
            self._pool.store(seat)
        if len(request.output_ids) > request.params.min_tokens:
            if token in seat.eos_ids:
                return self._end(request, FinishReason.STOP, None)
            if token in seat.stop_ids:
                return self._end(request, FinishReason.STOP, token)
        if request.known_len >= seat.limit:
            self._end(request, FinishReason.LENGTH, None)

    def skip(self, step: int) -> None:
        """An empty plan that nobody launched. Its ``freed_pages`` stay the caller's to report."""
        self._flights.skip(step)
        self._pass_skipped()

    def _pass_skipped(self) -> None:
        while (step := self._flights.pop_skipped()) is not None:
            self._pool.complete(step)

    def requests_of(self, step: int) -> list[Request]:
        """Requests of a scheduled step's rows, in plan order, until it is completed; aborted ones included."""
        return self._flights.requests(step)

    def log_prefixes(self) -> KvLog:
        """Changes of the prefix tree from now on, and first what is there, for the choice of a replica by what it has."""
        return self._pool.cache.start_log()

    def flush_prefix_cache(self) -> int:
        """Forget cached prefixes that no running request reads; returns their number of pages."""
        return self._pool.flush()

    # ---- state

    @property
    def n_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        """Requests that wait for a slot or for pages, preempted ones included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Something waits, runs, or was scheduled with rows and has not come back."""
        return bool(self._requests) or self._flights.naming

    @property
    def idle(self) -> bool:
        """Nothing to do: every page is free or cached, every slot is free."""
        return not self.has_work

    @property
    def pages_in_use(self) -> int:
        """Pages that running requests (and the steps under way) read."""
        return self.config.n_pages - self._pool.available

    def running_requests(self) -> list[Request]:
        """Requests that hold a slot, in rank order."""
        return [seat.request for seat in self._running]

    def check(self) -> None:
        """AssertionError unless free + cached + in use == total for pages and slots, and at idle nothing is in use."""
        self._running.check()
        self._pool.check(self._running)
        assert len(self._requests) == len(self._running) + len(self._waiting), "requests are lost"
        if self.idle:
            assert not self._pool.leaving and self.pages_in_use == 0, f"{self.pages_in_use} pages are in use at idle"
            assert self._pool.slots.n_free == self.config.max_num_seqs, "a slot is in use at idle"
