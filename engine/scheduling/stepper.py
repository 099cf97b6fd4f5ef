"""Fills one step: the rows of those who run, then newcomers; preempts when pages run out."""

from __future__ import annotations

import time

from ..offload.stay import Stay
from ..request import RequestState
from ..sharing.prefix_share import PrefixShare
from .admission import Admission
from .plan_builder import PlanBuilder
from .pool import Pool
from .running import RunningSet
from .scheduler_config import SchedulerConfig
from .seat import Seat
from .waiting import WaitingQueue

#: waiting requests whose prompts are looked up ahead of time
_FORESEEN = 16


class Stepper:
    """One token budget: decodes take theirs first, prefills share the rest in rank order, then newcomers.

    Pages are given out in rank order whatever the kind of row, so that a preempted request never has a row in the step
    that preempts it, and the highest ranked always gets what it needs as soon as launched steps let go of it.
    """

    def __init__(self, config: SchedulerConfig, pool: Pool, running: RunningSet, waiting: WaitingQueue) -> None:
        self.preemptions = 0
        self._config = config
        self._pool = pool
        self._running = running
        self._waiting = waiting
        self._admission = Admission(config, pool)
        self._short = False  # somebody got fewer pages than wanted, or was preempted, in this step
        self._starved = False  # somebody could not go on for want of host pages, which others have

    def fill(self, step: int) -> PlanBuilder:
        """Everything that step ``step`` does."""
        builder = PlanBuilder(step, self._config)
        if self._pool.tier is not None:
            self._pool.tier.begin(step)
        if self._pool.share is not None:
            self._share(self._pool.share)
        self._short = self._starved = False
        budget = self._place_running(builder)
        if not self._short:
            self._admit(builder, budget)
        return builder

    def _share(self, share: PrefixShare) -> None:
        """What others of the prefix directory are asked for, and get."""
        share.begin()
        self._pool.lacks_host = False
        if self._starved and share.yields and len(self._running):
            self.preempt(self._running[-1])  # of two replicas that wait for each other's pages one has to give way
        if not share.yields:
            share.questions.foresee(self._waiting.near(_FORESEEN), self._admission.usable)

    def _count_decodes(self, step: int) -> int:
        """Decode rows of this step: those ready, at most an equal share of all for each pipeline stage.

        A first in rank that prefills keeps one token of the budget: decodes below it may be unable to go on before it
        does, for want of the pages that it holds.
        """
        decoding = ready = 0
        budget, first = self._config.max_num_batched_tokens, True
        for seat in self._running:
            if seat.total >= seat.limit:
                continue
            if seat.total - seat.computed == 1:
                decoding += 1
                ready += seat.ready_step <= step
            elif first:
                budget -= 1
            first = False
        return min(ready, -(-decoding // self._config.pp), budget)

    def _place_running(self, builder: PlanBuilder) -> int:
        """Rows of those who run; returns what is left of the budget."""
        step, running = builder.step, self._running
        decodes = self._count_decodes(step)
        budget = self._config.max_num_batched_tokens - decodes
        place = 0
        while place < len(running):  # it may lose its tail on the way
            seat = running[place]
            place += 1
            if seat.total >= seat.limit:
                continue  # every token it may have has been launched
            left = seat.total - seat.computed
            if left == 1:
                if decodes and seat.ready_step <= step and self._fit(builder, seat, 1):
                    decodes -= 1
                    builder.add(seat, 1, decode=True)
            elif budget and (count := self._fit(builder, seat, min(budget, left))):
                budget -= count
                builder.add(seat, count, decode=False)
        return budget

    def _fit(self, builder: PlanBuilder, seat: Seat, count: int) -> int:
        """How many of the next ``count`` positions of ``seat`` have pages, after trying to get those that are missing."""
        pool, stay = self._pool, seat.stay
        if stay is not None and (count > 1 or stay.open) and not self._ready(seat, stay, count):
            return 0
        missing = pool.count_pages(seat.computed + count) - len(seat.pages)
        if missing <= 0:
            return count
        pages = pool.grab(missing, stay)
        if len(pages) < missing:
            self._short = True
            if pool.share is not None and pool.lacks_host:
                pool.share.shortage.lack(seat.request.request_id, missing - len(pages))
        if not pages and len(seat.pages) * pool.page_size <= seat.computed:
            pages = self._make_room(seat)
        builder.assign(seat, pages)
        count = min(count, len(seat.pages) * pool.page_size - seat.computed)
        if count == 1 and pool.tier is not None and stay is not None and pool.tier.stuck(stay):
            assert not pages
            return 0
        return count

    def _ready(self, seat: Seat, stay: Stay, count: int) -> bool:
        """Whether the device has, or makes, room for what a row of ``seat`` reads; lower ranks may have to go."""
        tier = self._pool.tier
        assert tier is not None
        while not tier.ready(stay, seat.computed, count, seat.total - seat.computed):
            self._short = True
            if not self._give_way(seat, on_device=True):
                return False
        return True

    def _make_room(self, seat: Seat) -> list[int]:
        """One page for ``seat``, which cannot go on without: from lower ranks, or [] when it has to wait.

        While ended seats wait for launched steps it is enough to wait for them: each gives back at least a page that
        nobody else reads, so nobody is preempted in vain.
        """
        pool = self._pool
        while self._give_way(seat, on_device=pool.available > 0 and not pool.lacks_host):
            if pages := pool.grab(1, seat.stay):
                return pages
        self._starved |= pool.lacks_host
        return []

    def _give_way(self, seat: Seat, *, on_device: bool) -> bool:
        """Preempt the lowest ranked for ``seat``; False when that is ``seat``, or waiting is enough.

        ``on_device``: device pages are what it lacks.
        """
        tier, stay = (self._pool.tier, seat.stay) if on_device else (None, None)
        waits = self._pool.leaving or (tier is not None and stay is not None and tier.coming(stay))
        if not on_device and self._pool.share is not None:
            waits = waits or self._pool.share.pages.cooling or self._pool.share.pages.busy
        if not waits and self._running[-1] is not seat:
            self.preempt(self._running[-1])
            return True
        others = self._pool.lacks_host and not on_device  # have the pages it waits for
        assert waits or others or len(self._running) > 1, f"request {seat.request.request_id} is alone and finds no page"
        if tier is not None and stay is not None:
            tier.hold_back(stay)
        return False

    def preempt(self, seat: Seat) -> None:
        """Back to waiting. Tokens under way stay valid: they were computed before the pages can change hands."""
        request = seat.request
        self._running.remove(seat)
        request.move(RequestState.WAITING)
        request.computed = 0
        request.preemptions += 1
        self.preemptions += 1
        self._waiting.push(request)
        self._pool.release(seat)

    def _admit(self, builder: PlanBuilder, budget: int) -> None:
        """Newcomers in rank order; nobody overtakes the first one that does not fit."""
        pool = self._pool
        while budget and pool.slots.ready(builder.step):
            request = self._waiting.peek()
            # One that was preempted comes back when its tokens under way are known and its pages are in the tree.
            if request is None or request.last_step > pool.completed:
                return
            if not self._admission.prepared(request, builder.step, alone=not len(self._running)):
                return
            seat = self._admission.admit(request, budget, self._running, builder.step)
            if seat is None:
                return
            self._waiting.pop()
            if pool.share is not None:
                pool.share.questions.forget(request)
            request.move(RequestState.RUNNING)
            if request.scheduled_time is None:
                request.scheduled_time = time.monotonic()
            self._running.add(seat)
            builder.enter(seat)
            count = min(budget, seat.total - seat.computed, len(seat.pages) * pool.page_size - seat.computed)
            builder.add(seat, count, decode=False)
            budget -= count
