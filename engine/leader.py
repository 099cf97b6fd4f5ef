"""The rank that owns the requests of one replica: schedule, agree, launch, and handle results a few steps later."""

from __future__ import annotations

import json
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..parallel.grid import Grid
from ..parallel.mailbox import Mailbox
from .codec import encode_plan
from .graph_key import decode_context
from .messages import END, FAIL, PLAN, AbortRequest, AddRequest, Command, Refusal, decode_commands, encode_commands
from .pending import PendingResult
from .plan import I32, StepPlan
from .records import Event, LogprobRow, Record, from_wire, to_wire, unpack_row
from .request import FinishReason, Request, RequestState
from .results import HEAD_COLUMNS, StepResult, Wanted
from .runner import Runner
from .scheduling.scheduler import Scheduler
from .text.detokenizer import Detokenizer
from .text.tokenizer import Tokenizer


@dataclass(kw_only=True)
class InFlight:
    """A scheduled step whose results have not been handled."""

    plan: StepPlan
    pending: PendingResult | None  # None: no replica had anything to run
    owners: list[Request] = field(default_factory=list)  # request of every plan row, kept when log-probabilities come back


class Leader:
    """One DP rank's engine loop. ``tick`` is collective over the leaders of all replicas."""

    def __init__(self, *, grid: Grid, scheduler: Scheduler, runner: Runner, tokenizer: Tokenizer | None, plans: Mailbox) -> None:
        self.grid = grid
        self.scheduler = scheduler
        self.runner = runner
        self.tokenizer = tokenizer
        self.lag = scheduler.config.lag
        self.plans = plans
        self.records: dict[str, Record] = {}
        self.events: list[Event] = []  # not yet handed to the front
        self.inflight: deque[InFlight] = deque()
        self._carried: I32 = np.zeros(0, dtype=np.int32)  # pages freed in plans that were never launched
        self._solo = grid.spec.dp == 1
        #: held while the scheduler is at work, so that others with a part in its pages can be served between steps
        self.at_work: AbstractContextManager[object] = nullcontext() if scheduler.share is None else scheduler.share.lock

    # ---- requests

    def take(self, command: Command) -> None:
        """Apply one command of the front, if it is for this replica."""
        if isinstance(command, AddRequest):
            if command.dp_rank == self.grid.dp_rank:
                self._add(command)
        elif isinstance(command, AbortRequest):
            self.abort(command.request_id)
        else:
            raise Refusal(command.message)

    def _add(self, command: AddRequest) -> None:
        request = command.request()
        self.scheduler.add(request)
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, request.params, eos_ids=self.scheduler.config.eos_token_ids)
        self.records[request.request_id] = Record(request=request, detokenizer=detokenizer)

    def abort(self, request_id: str) -> None:
        """End a request now; one that is unknown or has ended is ignored."""
        record = self.records.get(request_id)
        if record is not None and self.scheduler.abort(request_id):
            text = "" if record.detokenizer is None else record.detokenizer.flush().text
            self.events.append(record.close(Event(request_id=request_id, token_ids=[], text=text)))
            del self.records[request_id]

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
        plan = self.scheduler.schedule()
        if self.scheduler.share is not None and not plan.n_rows and self.scheduler.has_work:
            self.scheduler.share.rest()
        outbox, self.events = self.events, []
        if self._solo:
            plan.dp_tokens = np.array([plan.n_tokens], dtype=np.int32)
            plan.dp_context = np.array([decode_context(plan)], dtype=np.int32)
            plan.dp_offloaded = np.array([plan.offloaded], dtype=np.int32)
            done = not more and not outbox and not self.scheduler.has_work
        else:
            try:
                outbox, done = self._agree(plan, outbox, commands, more)
            except Refusal:  # the front refused the call before anything ran
                self._forget(plan)
                raise
        if not done:
            self._launch(plan)
            self._settle(plan)
        else:
            self._forget(plan)
        return outbox, done

    def _forget(self, plan: StepPlan) -> None:
        """Close the loop: the last plan was empty; later loops start with nothing in flight."""
        while self.inflight:
            self._handle(self.inflight.popleft())
        self.scheduler.skip(plan.step)
        self._carried = np.concatenate([self._carried, plan.freed_pages])

    def _agree(self, plan: StepPlan, outbox: list[Event], commands: list[Command], more: bool) -> tuple[list[Event], bool]:
        """The leaders' only exchange: sizes first, then news down and events up where there are any."""
        leaders = self.grid.leaders
        assert leaders is not None
        front = leaders.index == 0
        news = encode_commands(commands) if front and commands else b""
        events = b"" if front or not outbox else json.dumps(to_wire(outbox)).encode()
        unfinished = [int(self.scheduler.has_work), len(news), len(events), int(more or bool(outbox and front))]
        table = leaders.gather_ints([plan.n_tokens, decode_context(plan), *unfinished, int(plan.offloaded)])
        plan.dp_tokens, plan.dp_context, plan.dp_offloaded = (table[:, i].astype(np.int32) for i in (0, 1, 6))
        if table[0, 3]:
            for command in decode_commands(leaders.broadcast_bytes(news if front else None, 0)):
                self.take(command)
        collected = outbox if front else []
        for index in range(1, leaders.size):
            if table[index, 4]:
                if front:
                    collected = collected + from_wire(json.loads(leaders.recv_bytes(index)))
                elif leaders.index == index:
                    leaders.send_bytes(events, 0)
        return collected, not table[:, 2:6].any()

    def _launch(self, plan: StepPlan) -> None:
        """Run the plan on every rank of the replica, unless no replica has anything to run."""
        if not plan.dp_tokens.any():
            self._carried = np.concatenate([self._carried, plan.freed_pages])
            self.inflight.append(InFlight(plan=plan, pending=None))
            return
        if len(self._carried):
            plan.freed_pages = np.concatenate([self._carried, plan.freed_pages])
            self._carried = np.zeros(0, dtype=np.int32)
        if self.grid.replica.size > 1:
            self.runner.before_sharing(plan)
            self.plans.post(PLAN + encode_plan(plan))
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

    def stop_followers(self, message: str | None = None) -> None:
        """Tell the other ranks of the replica that the loop is over, with an error message if there is one."""
        self.plans.post(END if message is None else FAIL + message.encode())
        self.plans.drain()

    # ---- results

    def _handle(self, flight: InFlight) -> None:
        if flight.pending is None:
            self.scheduler.skip(flight.plan.step)
            return
        result = flight.pending.wait()
        rows = self._rows(flight, flight.pending.wanted, result)
        for request, token in self.scheduler.complete(flight.plan.step, result.tokens):
            self._emit(request, token, rows.get(request.request_id))

    def _rows(self, flight: InFlight, want: Wanted, result: StepResult) -> dict[str, LogprobRow]:
        """Log-probabilities of the sampled tokens by request; those of prompt positions go to their records."""
        if result.table is None:
            return {}
        width = (result.table.shape[1] - HEAD_COLUMNS) // 2
        rows: dict[str, LogprobRow] = {}
        for i, row in enumerate(np.flatnonzero(flight.plan.samples).tolist()):
            request = flight.owners[row]
            if request.params.logprobs is not None:
                rows[request.request_id] = unpack_row(result.table[i], request.params.logprobs, width)
        for i, (row, position) in enumerate(zip(want.prompt.row.tolist(), want.prompt.position.tolist(), strict=True)):
            request = flight.owners[row]
            record = self.records.get(request.request_id)
            if record is not None:
                top = request.params.prompt_logprobs or 0
                record.prompt_rows[position] = unpack_row(result.table[want.samples + i], top, width)
        return rows

    def _emit(self, request: Request, token: int, row: LogprobRow | None) -> None:
        """Turn one new token into an event; a stop string ends the request here."""
        record = self.records[request.request_id]
        text = "" if record.detokenizer is None else self._text(record.detokenizer, request, token)
        self.events.append(record.event(token, row, text))
        if request.state is RequestState.FINISHED:
            del self.records[request.request_id]

    def _text(self, detokenizer: Detokenizer, request: Request, token: int) -> str:
        """The text one token adds, with what was held back when the request has ended."""
        piece = detokenizer.push(token)
        ended = request.state is RequestState.FINISHED
        if piece.stop is None and ended:
            rest = detokenizer.flush()
            piece = type(piece)(text=piece.text + rest.text, stop=rest.stop)
        if piece.stop is not None:  # it replaces the reason of a request that ended with this token
            self.scheduler.finish(request, FinishReason.STOP, stop_reason=piece.stop)
        return piece.text

    def stats(self) -> dict[str, Any]:
        """Counters of the scheduler, for reports."""
        found = dict(vars(self.scheduler.stats))
        tier = self.scheduler.tier
        if tier is not None:
            found["tier"] = tier.stats()
        if self.scheduler.share is not None:
            found["directory"] = self.scheduler.share.stats()
        return found
