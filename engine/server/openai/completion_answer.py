"""Answers of /v1/completions: whole, or as a stream of server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ...serving.wire import Piece
from .generation import Generation, Watch, check
from .logprobs import TextLogprobs, prompt_logprobs
from .prepare import dumps
from .stream import Tail, prefix_of, stream_events
from .usage import Usage

if TYPE_CHECKING:
    from .completions import CompletionJob


class _Choice:
    """One completion while its pieces come."""

    def __init__(self, job: CompletionJob, prompt: int) -> None:
        self.prompt = prompt
        self.text: list[str] = []
        self.ids: list[int] = []
        self.rows: list[list[list[float]]] = []
        self.prompt_rows: Any = None
        self.reason: str | None = None
        self.stop: int | str | None = None
        self._job = job

    def add(self, piece: Piece) -> None:
        """Fold a piece in; ApiError for one that tells a failure."""
        check(piece)
        self.text.append(piece.text)
        self.ids += piece.token_ids
        self.rows += piece.logprobs or ()
        self.prompt_rows = piece.prompt_logprobs or self.prompt_rows
        if piece.finish_reason is not None:
            self.reason, self.stop = piece.finish_reason, piece.stop_reason

    @property
    def score(self) -> float:
        """Mean log-probability a token: what best_of goes by."""
        return sum(row[0][1] for row in self.rows) / max(1, len(self.rows))

    def as_dict(self, index: int, prompt_rows: Any) -> dict[str, Any]:
        """The entry of ``choices``."""
        job, text, ids, rows = self._job, "".join(self.text), self.ids, self.rows
        if job.silent:
            text, ids, rows = "", [], []
        found: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": self.reason, "stop_reason": self.stop}
        tokens = job.prompts[self.prompt]
        if job.request.echo:
            found["text"] = job.shown[self.prompt] + text
        if job.top is not None:
            head = list(prompt_rows or [None]) if job.request.echo else []
            found["logprobs"] = TextLogprobs(job.top, job.spelling, job.offsets(self.prompt)).make([*head, *rows], tokens)
        if job.request.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs(prompt_rows, job.texts)
        if job.ids_too:
            found["token_ids"], found["prompt_token_ids"] = ids, tokens
        return found


async def whole_completion(generation: Generation, job: CompletionJob, receive: Any) -> Response:
    """Wait for all completions and answer with them."""
    usage = Usage(sum(map(len, job.prompts)))
    choices = [_Choice(job, place // job.made) for place in range(len(job.prompts) * job.made)]
    with generation:
        async with Watch(receive, generation):
            while not generation.taken:
                for place, piece in await generation.take():
                    choices[place].add(piece)
                    usage.completion += len(piece.token_ids)
                    if place % job.made == 0:
                        usage.cached += piece.cached_tokens
    if job.silent:
        usage.completion = 0
    found: list[dict[str, Any]] = []
    for prompt in range(len(job.prompts)):
        siblings = choices[prompt * job.made : (prompt + 1) * job.made]
        rows = next((c.prompt_rows for c in siblings if c.prompt_rows is not None), None)
        best = sorted(siblings, key=lambda c: -c.score)[: job.n] if job.made > job.n else siblings
        found += [choice.as_dict(len(found) + i, rows) for i, choice in enumerate(best)]
    answer = {
        "id": generation.name, "object": "text_completion", "created": generation.created, "model": job.model,
        "choices": found, "usage": usage.as_dict(),
    }  # fmt: skip
    return Response(dumps(answer), media_type="application/json")


def stream_completion(generation: Generation, job: CompletionJob) -> AsyncIterator[bytes]:
    """The events of a stream: an event for each piece, those that came together in one write."""
    usage = Usage(sum(map(len, job.prompts)))
    head = {"id": generation.name, "object": "text_completion", "created": generation.created, "model": job.model}
    prefix = prefix_of(head)
    writers = [_ChoiceWriter(job, place, prefix, usage).event for place in range(len(job.prompts) * job.made)]
    return stream_events(generation, head, usage, writers, include_usage=job.include_usage)


class _ChoiceWriter:
    """Writes the events of one completion."""

    def __init__(self, job: CompletionJob, place: int, prefix: bytes, usage: Usage) -> None:
        self._job, self._place, self._usage = job, place, usage
        self._prefix = prefix + str(place).encode() + b',"text":'
        self._prompt = place // job.made
        self._first = True
        self._logprobs = None if job.top is None else TextLogprobs(job.top, job.spelling, job.offsets(self._prompt))
        self._tail = Tail(usage, listed=job.include_usage, always=job.usage_always)

    def event(self, piece: Piece) -> bytes:
        """One piece as an event; ApiError for one that tells a failure."""
        check(piece)
        job, usage, text, logprobs = self._job, self._usage, piece.text, b"null"
        if job.silent:
            text = ""
        else:
            usage.completion += len(piece.token_ids)
        if self._place % job.made == 0:
            usage.cached += piece.cached_tokens
        first, self._first = self._first, False
        if first and job.request.echo:
            text = job.shown[self._prompt] + text
        if self._logprobs is not None:
            logprobs = dumps(self._rows(piece, first))
        more = b""
        if job.ids_too:
            more = b',"token_ids":' + dumps([] if job.silent else piece.token_ids)
            if first:
                more += b',"prompt_token_ids":' + dumps(job.prompts[self._prompt])
        reason = b"null" if piece.finish_reason is None else dumps(piece.finish_reason)
        stop = b"null" if piece.stop_reason is None else dumps(piece.stop_reason)
        end = (b',"finish_reason":', reason, b',"stop_reason":', stop, more, self._tail.now())
        return b"".join((self._prefix, dumps(text), b',"logprobs":', logprobs, *end))

    def _rows(self, piece: Piece, first: bool) -> dict[str, Any]:
        assert self._logprobs is not None
        rows: list[Any] = [] if self._job.silent else list(piece.logprobs or ())
        if first and self._job.request.echo:
            rows = [*(piece.prompt_logprobs or [None]), *rows]
        return self._logprobs.make(rows, self._job.prompts[self._prompt])
