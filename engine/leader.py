"""The rank that owns the requests of one replica: schedule, agree, launch, and handle results a few steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..parallel.grid import Grid
from ..parallel.mailbox import Mailbox
from .agreement import Agreed, agree, alone
from .emitter import Emitter
from .grammar.guides import Guides
from .messages import AbortRequest, AddRequest, Ask, Command, DropGrammar, KeepGrammar, Refusal, TellPrefixes
from .pending import PendingResult
from .plan import I32, StepPlan
from .records import Event
from .replica_line import ReplicaLine
from .request import Request
from .runner import Runner
from .scheduling.scheduler import Scheduler
from .text.tokenizer import Tokenizer


@dataclass(kw_only=True)
class InFlight:
    """A scheduled step whose results have not been handled."""

    plan: StepPlan
    pending: PendingResult | None  # None: no replica had anything to run
    owners: list[Request] = field(default_factory=list)  # request of every plan row, kept when log-probabilities come back


class Leader:
    """One DP rank's engine loop. ``tick`` is collective over the leaders of all replicas."""

    def __init__(
        self, *, grid: Grid, scheduler: Scheduler, runner: Runner, tokenizer: Tokenizer | None, plans: Mailbox, vocab_size: int = 0
    ) -> None:
        """``vocab_size`` is the width of the logits, for grammars."""
        self.grid = grid
        self.scheduler = scheduler
        self.runner = runner
        self.lag = scheduler.config.lag
        self.guides = Guides(tokenizer, vocab_size, scheduler.config.eos_token_ids)
        self.line = ReplicaLine(plans)
        self.emitter = Emitter(scheduler, tokenizer, self.guides)
        self.inflight: deque[InFlight] = deque()
        self._carried: I32 = np.zeros(0, dtype=np.int32)  # pages freed in plans that were never launched
        self._solo = grid.spec.dp == 1
        self.quiet = True  # no replica had anything to do or to tell at the last tick
        #: what else goes up to rank 0, asked once a tick: plain values, or None for nothing
        self.reporters: dict[str, Callable[[], Any]] = {}
        #: rank 0: gets (dp rank, name, value) of what reporters told, its own included
        self.heard: Callable[[int, str, Any], None] | None = None
        #: rank 0: gets events as soon as the next step is launched, instead of the caller of ``tick`` after it
        self.deliver: Callable[[list[Event]], None] | None = None
        #: gets the plan of every tick once its numbers are agreed
        self.on_step: Callable[[StepPlan], None] | None = None
        #: answers a question to all ranks; set by who asks
        self.answer: Callable[[Ask], None] | None = None
        #: held while the scheduler is at work, so that others with a part in its pages can be served between steps
        self.at_work: AbstractContextManager[object] = nullcontext() if scheduler.share is None else scheduler.share.lock

    # ---- requests

    def take(self, command: Command) -> None:
        """Apply one command of the front, if it is for this replica."""
        if isinstance(command, AddRequest):
            if command.dp_rank == self.grid.dp_rank:
                self._add(command)
        elif isinstance(command, AbortRequest):
            self.emitter.abort(command.request_id)
        elif isinstance(command, KeepGrammar):
            self.guides.keep(command.name, command.text)
        elif isinstance(command, DropGrammar):
            self.guides.drop(command.name)
        elif isinstance(command, TellPrefixes):
            if command.dp_rank == self.grid.dp_rank:
                self.scheduler.log_prefixes()
        elif isinstance(command, Ask):
            self._ask(command)
        else:
            raise Refusal(command.message)

    def _ask(self, ask: Ask) -> None:
        assert self.answer is not None, f"nobody is there to answer {ask.name!r}"
        self.line.ask(ask)
        self.answer(ask)

    def _add(self, command: AddRequest) -> None:
        try:
            request = command.request()
            self.guides.admit(request)
            self.guides.enter(request)
            self.scheduler.add(request)  # last of what may refuse: what is scheduled has all that belongs to it
            self.emitter.enter(request)
        except ValueError as error:  # the front has checked what it can; the request ends, not the engine
            self.guides.leave(command.request_id)
            self.emitter.refuse(command.request_id, str(error))

    # ---- the loop

    def tick(self, commands: list[Command], *, more: bool) -> tuple[list[Event], bool]:
        """One step of every replica.

        Args:
            commands: the front's news; rank 0 only, [] elsewhere.
            more: the front may still have news; rank 0's value counts.

        Returns:
            Events (rank 0 gets those of all replicas, the others none), and whether everything is done: nothing is
            waiting, running or in flight on any replica, and no more news will come.
        """
        with self.at_work:
            return self._tick(commands, more=more)

    def _tick(self, commands: list[Command], *, more: bool) -> tuple[list[Event], bool]:
        if self._solo:
            for command in commands:
                self.take(command)
        plan = self._schedule()
        agreed = self._meet(plan, commands, more=more)
        self.quiet, outbox = agreed.quiet, agreed.events
        if agreed.done:
            self._forget(plan)
            return outbox, True
        self._launch(plan)
        if self.deliver is not None and outbox:  # while the device works
            self.deliver(outbox)
            outbox = []
        self._settle(plan)
        return outbox, False

    def _schedule(self) -> StepPlan:
        """The next step of this replica, with the masks of its grammars."""
        plan = self.scheduler.schedule()
        if len(self.guides):
            for request, problem in self.guides.mask(plan, self.scheduler.requests_of(plan.step)):
                self.emitter.fail(request, problem)
        if self.scheduler.share is not None and not plan.n_rows and self.scheduler.has_work:
            self.scheduler.share.rest()
        return plan

    def _meet(self, plan: StepPlan, commands: list[Command], *, more: bool) -> Agreed:
        """Fill in the numbers of ``plan`` that all replicas agree on; news go down and events up on the way."""
        outbox, notes = self.emitter.pop(), self._notes()
        if self._solo:
            self._hear(self.grid.dp_rank, notes)
            return alone(plan, outbox, has_work=self.scheduler.has_work, more=more)
        assert self.grid.leaders is not None
        try:
            return agree(
                self.grid.leaders, plan, outbox, notes, commands, has_work=self.scheduler.has_work, more=more,
                take=self.take, hear=self._hear,
            )  # fmt: skip
        except Refusal:  # the front refused the call before anything ran
            self._forget(plan)
            raise

    def _forget(self, plan: StepPlan) -> None:
        """Close the loop: the last plan was empty; later loops start with nothing in flight."""
        while self.inflight:
            self._handle(self.inflight.popleft())
        self.scheduler.skip(plan.step)
        self._carried = np.concatenate([self._carried, plan.freed_pages])

    def _notes(self) -> dict[str, Any]:
        """What reporters have to tell."""
        if not self.reporters:
            return {}
        found = {name: reporter() for name, reporter in self.reporters.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _hear(self, dp_rank: int, notes: dict[str, Any]) -> None:
        if self.heard is not None:
            for name, value in notes.items():
                self.heard(dp_rank, name, value)

    def _launch(self, plan: StepPlan) -> None:
        """Run the plan on every rank of the replica, unless no replica has anything to run."""
        if self.on_step is not None:
            self.on_step(plan)
        if not plan.dp_tokens.any():
            self._carried = np.concatenate([self._carried, plan.freed_pages])
            self.inflight.append(InFlight(plan=plan, pending=None))
            self.line.keep()
            return
        if len(self._carried):
            plan.freed_pages = np.concatenate([self._carried, plan.freed_pages])
            self._carried = np.zeros(0, dtype=np.int32)
        if self.line.has_readers:
            self.runner.before_sharing(plan)
            self.line.run(plan)
        pending = self.runner.execute(plan)
        owners = self.scheduler.requests_of(plan.step) if pending.wanted.top >= 0 else []
        self.inflight.append(InFlight(plan=plan, pending=pending, owners=owners))

    def _settle(self, plan: StepPlan) -> None:
        """Handle results that are ``lag`` steps old; when nothing was launched, the oldest real step as well."""
        limit = plan.step - self.lag
        waiting = not plan.dp_tokens.any()
        while self.inflight and (waiting or self.inflight[0].plan.step <= limit):
            flight = self.inflight.popleft()
            self._handle(flight)
            if flight.pending is not None and flight.plan.step > limit:
                waiting = False

    # ---- results

    def _handle(self, flight: InFlight) -> None:
        if flight.pending is None:
            self.scheduler.skip(flight.plan.step)
            return
        self.emitter.take(flight.plan, flight.pending.wanted, flight.pending.wait(), flight.owners)

    def stats(self) -> dict[str, Any]:
        """Counters of the scheduler, for reports."""
        found = dict(vars(self.scheduler.stats))
        tier = self.scheduler.tier
        if tier is not None:
            found["tier"] = tier.stats()
        if self.scheduler.share is not None:
            found["directory"] = self.scheduler.share.stats()
        return found
