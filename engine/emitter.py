"""From sampled tokens to events: text, log-probabilities, grammars, and the end of requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .grammar.guides import Guides
from .plan import StepPlan
from .records import Event, LogprobRow, Record, unpack_row
from .request import FinishReason, Request, RequestState
from .results import HEAD_COLUMNS, StepResult, Wanted
from .scheduling.scheduler import Scheduler
from .text.detokenizer import Detokenizer
from .text.tokenizer import Tokenizer


class Emitter:
    """What a leader knows of its replica's requests beside the schedule. News gather in ``events`` until they are taken."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None, guides: Guides) -> None:
        self.events: list[Event] = []  # not yet handed to the front
        self.records: dict[str, Record] = {}
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._guides = guides

    def pop(self) -> list[Event]:
        """Events since the last call."""
        found, self.events = self.events, []
        return found

    # ---- requests come and go

    def enter(self, request: Request) -> None:
        """A request was given to the scheduler."""
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, request.params, eos_ids=self._scheduler.config.eos_token_ids)
        self.records[request.request_id] = Record(request=request, detokenizer=detokenizer)

    def refuse(self, request_id: str, problem: str) -> None:
        """A request was not even begun."""
        self.events.append(Event(request_id=request_id, token_ids=[], text="", finish_reason="error", error=problem))

    def abort(self, request_id: str) -> None:
        """End a request now; one that is unknown or has ended is ignored."""
        record = self.records.get(request_id)
        if record is not None and self._scheduler.abort(request_id):
            self._last(record)

    def fail(self, request: Request, problem: str, keep_tokens: int | None = None) -> None:
        """End a request that cannot go on."""
        request.error = problem
        self._scheduler.finish(request, FinishReason.ERROR, keep_tokens=keep_tokens)
        self._last(self.records[request.request_id])

    def _last(self, record: Record) -> None:
        """The event of a request that has ended without a token."""
        request_id = record.request.request_id
        text = "" if record.detokenizer is None else record.detokenizer.flush().text
        self.events.append(record.close(Event(request_id=request_id, token_ids=[], text=text)))
        self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self.records[request_id]
        self._guides.leave(request_id)

    # ---- results of a step

    def take(self, plan: StepPlan, want: Wanted, result: StepResult, owners: Sequence[Request]) -> None:
        """Results of a launched step. ``owners``: the request of every plan row, where log-probabilities come back."""
        rows = self._rows(plan, want, result, owners)
        for request, token in self._scheduler.complete(plan.step, result.tokens):
            self._emit(request, token, rows.get(request.request_id) if rows else None)

    def _rows(self, plan: StepPlan, want: Wanted, result: StepResult, owners: Sequence[Request]) -> dict[str, LogprobRow]:
        """Log-probabilities of the sampled tokens by request; those of prompt positions go to their records."""
        if result.table is None:
            return {}
        width = (result.table.shape[1] - HEAD_COLUMNS) // 2
        rows: dict[str, LogprobRow] = {}
        for i, row in enumerate(np.flatnonzero(plan.samples).tolist()):
            request = owners[row]
            if request.params.logprobs is not None:
                rows[request.request_id] = unpack_row(result.table[i], request.params.logprobs, width)
        for i, (row, position) in enumerate(zip(want.prompt.row.tolist(), want.prompt.position.tolist(), strict=True)):
            request = owners[row]
            record = self.records.get(request.request_id)
            if record is not None:
                top = request.params.prompt_logprobs or 0
                record.prompt_rows[position] = unpack_row(result.table[want.samples + i], top, width)
        return rows

    def _emit(self, request: Request, token: int, row: LogprobRow | None) -> None:
        """Turn one new token into an event; a stop string ends the request here."""
        if request.grammar is not None:
            problem = self._follow(request, token)
            if problem is not None:
                return self.fail(request, problem, keep_tokens=len(request.output_ids) - 1)
        record = self.records[request.request_id]
        text = "" if record.detokenizer is None else self._text(record.detokenizer, request, token)
        self.events.append(record.event(token, row, text))
        if request.state is RequestState.FINISHED:
            self._drop(request.request_id)

    def _follow(self, request: Request, token: int) -> str | None:
        """Go on in the request's grammar, whose end ends the request; what is wrong if the token does not fit."""
        ended, problem = self._guides.accept(request, token)
        if ended and request.finish_reason is not FinishReason.STOP:
            self._scheduler.finish(request, FinishReason.STOP, stop_reason=token if token in request.params.stop_ids else None)
        return problem

    def _text(self, detokenizer: Detokenizer, request: Request, token: int) -> str:
        """The text one token adds, with what was held back when the request has ended."""
        piece = detokenizer.push(token)
        ended = request.state is RequestState.FINISHED
        if piece.stop is None and ended:
            rest = detokenizer.flush()
            piece = type(piece)(text=piece.text + rest.text, stop=rest.stop)
        if piece.stop is not None:  # it replaces the reason of a request that ended with this token
            self._scheduler.finish(request, FinishReason.STOP, stop_reason=piece.stop)
        return piece.text
