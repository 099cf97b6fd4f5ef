"""One request on the rank that owns it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from .sampling_params import SamplingParams


class RequestState(enum.Enum):
    """Where a request is. Allowed moves are in ``TRANSITIONS``."""

    WAITING = "waiting"  # not admitted, or preempted and waiting to be recomputed
    RUNNING = "running"  # holds a slot and pages
    FINISHED = "finished"  # has its tokens or a stated reason; may still be named by a launched step


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class FinishReason(str, enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len reached
    ABORT = "abort"  # the caller gave it up
    ERROR = "error"  # it could not go on, for a reason that is given


@dataclass(eq=False, kw_only=True)
class Request:
    """Tokens, sampling parameters and progress of one request (one of ``n`` completions).

    Host-known tokens are ``prompt_ids + output_ids``. ``n_launched`` counts tokens whose sampling has been launched
    but whose value the host has not seen; the scheduler works on ``total_len``, never on values.
    """

    request_id: str  # unique on this engine
    index: int  # arrival number over the whole engine: orders admission, seeds requests that bring no seed
    prompt_ids: list[int]  # the prompt, at least one token
    params: SamplingParams  # how to sample and when to stop
    priority: int = 0  # lower runs first; ties by index
    grammar: str | None = None  # what its output must match, a compiled grammar as JSON; None: anything
    arrival: float = 0.0  # time.monotonic() when it was accepted

    state: RequestState = RequestState.WAITING
    output_ids: list[int] = field(default_factory=list)
    n_launched: int = 0  # sampled positions launched, value not yet seen
    computed: int = 0  # leading positions whose KV rows have been launched
    cached: int = 0  # leading positions taken from the prefix cache at the last admission
    slot: int = -1  # row of the device tables, -1 when none
    pages: list[int] = field(default_factory=list)  # logical pages, in position order
    last_step: int = -1  # last launched step that names this request
    generation: int = 0  # raised whenever results still in flight must be dropped
    preemptions: int = 0  # times it lost its pages and was recomputed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    error: str | None = None  # what happened, with reason ERROR
    scheduled_time: float | None = None  # time.monotonic() when it was first admitted
    first_token_time: float | None = None  # time.monotonic() of the first token on the host
    finish_time: float | None = None

    @property
    def known_len(self) -> int:
        """Tokens the host knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def total_len(self) -> int:
        """Tokens including those sampled on the device and not yet seen by the host."""
        return self.known_len + self.n_launched

    def move(self, state: RequestState) -> None:
        """Change state; a move that the table does not allow is a bug of ours."""
        assert state in TRANSITIONS[self.state], f"request {self.request_id}: {self.state} -> {state}"
        self.state = state
