"""Rank 0's side of served requests: what HTTP processes submit becomes requests of DP ranks, events become pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..messages import AbortRequest, AddRequest, Command
from ..records import Event
from ..request import Request
from ..sampling.noise import request_seed
from ..sampling_params import SamplingParams
from .limits import QueueLimit
from .meter import Meter
from .routing.router import Router
from .wire import Piece, Refused, Submit


class _Open:
    """A request some completions of which have not ended."""

    __slots__ = ("children", "ending", "peer", "request_id")

    def __init__(self, request_id: str, peer: bytes) -> None:
        self.request_id = request_id
        self.peer = peer
        self.children: set[str] = set()  # names of the completions that have not ended
        self.ending: str | None = None  # why it is aborted, where there is more to say than that its client wanted it


class _Child:
    """One completion that has not ended."""

    __slots__ = ("dp_rank", "index", "n_tokens", "owner", "started", "taken")

    def __init__(self, owner: _Open, index: int, dp_rank: int, taken: float) -> None:
        self.owner = owner
        self.index = index
        self.dp_rank = dp_rank
        self.n_tokens = 0  # that have come
        self.started = False  # its first piece has left
        self.taken = taken  # time.monotonic() when it was given to its replica


class ServeFront:
    """Requests that have not ended. It keeps nothing of their output: that is the HTTP process's."""

    def __init__(self, *, router: Router, vocab_size: int, validate: Callable[[Request], None], limit: QueueLimit, meter: Meter) -> None:
        """``validate`` raises ValueError for a request that can never run."""
        self.router = router
        self._vocab_size = vocab_size
        self._validate = validate
        self._limit = limit
        self._meter = meter
        self._requests: dict[str, _Open] = {}
        self._children: dict[str, _Child] = {}
        self._arrivals = 0  # completions so far

    @property
    def open(self) -> bool:
        """True while some completion has not ended."""
        return bool(self._children)

    @property
    def n_open(self) -> int:
        """Completions that have not ended."""
        return len(self._children)

    # ---- in

    def submit(self, submit: Submit, peer: bytes) -> list[Command] | Refused:
        """Register a request: commands that start it, or why not. Nothing is registered when it is refused."""
        try:
            params, ids = self._checked(submit)
        except ValueError as error:
            return Refused(request_id=submit.request_id, status=400, error=str(error))
        late = self._limit.refuses(self.n_open, params.n)
        if late is not None:
            return Refused(request_id=submit.request_id, status=429, error=late.text, retry_after_s=late.retry_after_s)
        owner = self._requests[submit.request_id] = _Open(submit.request_id, peer)
        wire = dict(submit.params)
        wire.pop("n", None)
        return [self._child(owner, index, submit, params, ids, wire) for index in range(params.n)]

    def _checked(self, submit: Submit) -> tuple[SamplingParams, list[int]]:
        """Parameters and prompt of a request that can run.

        Raises:
            ValueError: what is wrong with it.
        """
        if submit.request_id in self._requests:
            raise ValueError(f"request {submit.request_id}: a request with this id has not ended yet; ids must be unique")
        params = SamplingParams.from_wire(submit.params)
        if params.n > self._limit.most:
            raise ValueError(f"n is {params.n}, but at most {self._limit.most} completions may be open; ask for fewer")
        if len(submit.prompt) % 4:
            raise ValueError(f"a prompt is int32 token ids, found {len(submit.prompt)} bytes")
        ids = np.frombuffer(submit.prompt, "<i4")
        bad = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(bad):
            raise ValueError(f"prompt has token id {bad[0]}; the vocabulary has ids 0 to {self._vocab_size - 1}")
        params.check_vocabulary(self._vocab_size)
        self.router.check(submit.dp_rank)
        prompt: list[int] = ids.tolist()
        self._validate(Request(request_id=submit.request_id, index=0, prompt_ids=prompt, params=params, grammar=submit.grammar))
        return params, prompt

    def _child(self, owner: _Open, place: int, submit: Submit, params: SamplingParams, ids: list[int], wire: dict[str, Any]) -> Command:
        index, self._arrivals = self._arrivals, self._arrivals + 1
        name = str(index)
        dp_rank = self.router.pick(name, submit.prompt, params.max_tokens, dp_rank=submit.dp_rank, sure=params.ignore_eos)
        now = time.monotonic()
        self._children[name] = _Child(owner, place, dp_rank, now)
        owner.children.add(name)
        self._meter.arrived(name, len(ids), now - max(0.0, time.time() - submit.at) if submit.at else now, dp_rank)
        if params.seed is not None and place:
            wire = wire | {"seed": request_seed(params.seed, 0, 0, place)}  # siblings draw their own noise
        return AddRequest(
            request_id=name, index=index, dp_rank=dp_rank, prompt_ids=ids, params=wire, priority=submit.priority, grammar=submit.grammar
        )  # fmt: skip

    def aborts(self, request_ids: Iterable[str]) -> list[Command]:
        """Commands that end these requests; unknown ids are ignored."""
        found = (self._requests.get(request_id) for request_id in request_ids)
        return [AbortRequest(request_id=name) for owner in found if owner is not None for name in owner.children]

    def aborts_of(self, peer: bytes | None, why: str | None = None) -> list[Command]:
        """Commands that end all requests of a peer, or of everybody; their last pieces say ``why``."""
        names = [name for name, owner in self._requests.items() if peer is None or owner.peer == peer]
        for name in names:
            self._requests[name].ending = why
        return self.aborts(names)

    # ---- out

    def pieces(self, events: Iterable[Event]) -> dict[bytes, list[Piece]]:
        """What to tell every peer; events of unknown completions are ignored."""
        found: dict[bytes, list[Piece]] = {}
        now = time.monotonic()
        for event in events:
            child = self._children.get(event.request_id)
            if child is None:
                continue
            owner = child.owner
            error = event.error or (owner.ending if event.finish_reason == "abort" else None)
            piece = Piece(
                request_id=owner.request_id, index=child.index, text=event.text, token_ids=event.token_ids, logprobs=event.logprobs,
                prompt_logprobs=event.prompt_logprobs, finish_reason=event.finish_reason, stop_reason=event.stop_reason,
                error=error, cached_tokens=event.cached_tokens, dp_rank=0 if child.started else child.dp_rank,
            )  # fmt: skip
            child.started = True
            if event.token_ids:
                if not child.n_tokens:
                    self.router.began(event.request_id)
                    self._meter.scheduled(event.request_id, child.taken + event.queued_s)
                child.n_tokens += len(event.token_ids)
                self._meter.tokens(event.request_id, len(event.token_ids), now)
            if event.finish_reason is not None:
                self._meter.ended(event.request_id, event.finish_reason, now, event.cached_tokens)
                self.router.done(event.request_id, child.n_tokens if event.finish_reason in ("stop", "length") else None)
                self._ended(event.request_id, child, now)
            bucket = found.get(owner.peer)
            if bucket is None:
                found[owner.peer] = [piece]
            else:
                bucket.append(piece)
        return found

    def _ended(self, name: str, child: _Child, now: float) -> None:
        owner = child.owner
        del self._children[name]
        owner.children.discard(name)
        if not owner.children:
            del self._requests[owner.request_id]
        self._limit.ended(now)
