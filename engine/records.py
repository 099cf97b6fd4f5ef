"""What the leader keeps of each of its requests beside the schedule: text, log-probabilities, and the next event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .request import Request, RequestState
from .results import HEAD_COLUMNS
from .text.detokenizer import Detokenizer

#: [token id, logprob, rank] of the position itself first, then of its alternatives
LogprobRow = list[list[float]]


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """News of one request, as it travels to the front (msgpack between ranks)."""

    request_id: str
    token_ids: list[int]  # tokens since the last event
    text: str  # text since the last event
    logprobs: list[LogprobRow] | None = None  # one row per token, when asked for
    prompt_logprobs: list[LogprobRow | None] | None = None  # with the first token, when asked for
    finish_reason: str | None = None  # set by the last event of the request
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    queued_s: float = 0.0  # with the first token: seconds from its arrival on the leader to its first step
    error: str | None = None  # what happened, with reason "error"


class Report(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a leader sends to rank 0 in one step."""

    events: list[Event] = []
    notes: dict[str, Any] = {}  # what ``Leader.reporters`` had to tell, by their names


def unpack_row(row: NDArray[np.float64], top: int, width: int) -> LogprobRow:
    """One row of a step's logprob table (results.HEAD_COLUMNS, then ``width`` ids and values), cut to ``top`` alternatives."""
    ids = row[HEAD_COLUMNS : HEAD_COLUMNS + width]
    values = row[HEAD_COLUMNS + width :]
    rows = [[int(row[0]), float(row[1]), int(row[2])]]
    for place in range(min(top, width)):
        if int(ids[place]) not in (int(row[0]), -1):
            rows.append([int(ids[place]), float(values[place]), place + 1])
    return rows


@dataclass(kw_only=True)
class Record:
    """One request on its leader."""

    request: Request
    detokenizer: Detokenizer | None
    prompt_rows: dict[int, LogprobRow] = field(default_factory=dict)  # prompt position -> its row

    def prompt_logprobs(self) -> list[LogprobRow | None] | None:
        """Rows of all prompt positions (the first has none), once the prompt is through."""
        if self.request.params.prompt_logprobs is None:
            return None
        return [None] + [self.prompt_rows[p] for p in range(1, len(self.request.prompt_ids))]

    def event(self, token: int, row: LogprobRow | None, text: str) -> Event:
        """The event of one new token, with the end of the request if it has ended."""
        request = self.request
        event = Event(request_id=request.request_id, token_ids=[token], text=text)
        if row is not None:
            event.logprobs = [row]
        if len(request.output_ids) == 1:
            event.prompt_logprobs = self.prompt_logprobs()
            event.queued_s = max(0.0, (request.scheduled_time or request.arrival) - request.arrival)
        return self.close(event) if request.state is RequestState.FINISHED else event

    def close(self, event: Event) -> Event:
        """Add the reason and the counts of a request that has ended."""
        request = self.request
        assert request.finish_reason is not None
        event.finish_reason, event.stop_reason = request.finish_reason.value, request.stop_reason
        event.error = request.error
        event.preemptions = request.preemptions
        event.cached_tokens = min(request.cached, len(request.prompt_ids))  # a preempted one finds its own output cached too
        return event


_encoder = msgspec.msgpack.Encoder()
_report = msgspec.msgpack.Decoder(Report)


def encode_report(report: Report) -> bytes:
    """A report as bytes."""
    return _encoder.encode(report)


def decode_report(data: bytes) -> Report:
    """The inverse of ``encode_report``.

    Raises:
        ValueError: bytes that are none.
    """
    return _report.decode(data)
