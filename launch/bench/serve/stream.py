"""A streamed completion, chunk by chunk, into an ``Outcome``."""

from __future__ import annotations

from typing import Any

import msgspec

from .events import EventSplitter
from .outcome import Outcome

#: bytes of an error's body that are kept
ERROR_BYTES = 2000


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")  # a union with None would refuse all else


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class Chunk(msgspec.Struct):
    """What is read of a chunk; the rest is skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode
_NONE = (b"", b"null", b"[]")


def _text(choice: _Choice) -> str:
    """What a reader gets of a choice: reasoning and the text of tool calls are output as well."""
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    raw = bytes(delta.tool_calls)
    calls = "" if raw in _NONE else raw.decode("utf-8", "replace")
    return (delta.reasoning_content or delta.reasoning or "") + (delta.content or "") + calls


class StreamSink:
    """Takes the response to one streamed request.

    A chunk counts as an arrival of tokens when it brings ids, or usage says that there are more, or it has text. Without any of these
    a chunk of the completions route counts as long as it does not end the completion: its token is half a character. The chunk that
    names the role, the one that only ends the completion, the one with the final usage, and ``[DONE]`` are no tokens.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.status = 0
        self.outcome = outcome
        self._splitter = EventSplitter()
        self._told: int | None = None  # completion tokens as last told by usage
        self._with_ids = 0
        self._counts: list[int] = []
        self._wrong = bytearray()
        self._done = False

    def body(self, data: bytes, now: float) -> None:
        """A part of the response."""
        if self.status != 200:
            self._wrong += data[: ERROR_BYTES - len(self._wrong)]
            return
        for event in self._splitter.feed(data):
            if event == b"[DONE]":
                self._done = True
            else:
                self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        outcome = self.outcome
        try:
            chunk = _decode(event)
        except msgspec.MsgspecError as error:
            outcome.error = outcome.error or f"a chunk that is none ({error}): {event[:200]!r}"
            return
        if chunk.error is not None:
            outcome.error = outcome.error or f"the server says: {_message(chunk.error)}"
        fresh = self._usage(chunk.usage) if chunk.usage is not None else 0
        for choice in chunk.choices:
            self._choice(choice, fresh, now)
            fresh = 0  # usage is of all choices together

    def _usage(self, usage: _Usage) -> int:
        """Keep what usage says; how many output tokens are new in it."""
        outcome, before = self.outcome, self._told or 0
        outcome.prompt_tokens = usage.prompt_tokens or outcome.prompt_tokens
        if usage.prompt_tokens_details is not None:
            outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        if usage.completion_tokens is None:
            return 0
        self._told = usage.completion_tokens
        return max(0, self._told - before)

    def _choice(self, choice: _Choice, fresh: int, now: float) -> None:
        outcome, text = self.outcome, _text(choice)
        ids = choice.token_ids
        outcome.ended = now
        known = len(ids) if ids else fresh
        if known or text or (choice.delta is None and choice.finish_reason is None and ids is None):
            outcome.arrivals.append(now)
            self._counts.append(known)
        if ids:
            self._with_ids += len(ids)
            outcome.token_ids += ids
        if text:
            outcome.text.append(text)
        if choice.finish_reason is not None:
            outcome.finish_reason = choice.finish_reason

    def finish(self) -> None:
        """Close the books when the response is whole: counts, or what was wrong with it."""
        outcome = self.outcome
        outcome.error = outcome.error or self._fault()
        if outcome.error is not None:
            return
        if self._told is not None:
            outcome.output_tokens = self._told
        elif self._with_ids:
            outcome.output_tokens = self._with_ids
        else:  # it was stopped by its limit, so that it has as many as that
            outcome.output_tokens = outcome.wanted
        if sum(self._counts) == outcome.output_tokens:
            outcome.chunk_tokens = self._counts

    def _fault(self) -> str | None:
        """Why this is no completed request; None when it is one."""
        outcome = self.outcome
        if self.status != 200:
            return f"HTTP {self.status}: {_message_of(bytes(self._wrong))}"
        if outcome.finish_reason is None:
            return "the stream ended without a finish_reason" + ("" if self._done else " and without [DONE]")
        if outcome.finish_reason in ("abort", "error"):
            return f'the server ended it with finish_reason "{outcome.finish_reason}"'
        if self._told is not None and self._with_ids and self._told != self._with_ids:
            return f"usage counts {self._told} output tokens, but {self._with_ids} token ids came"
        if self._told is None and not self._with_ids and outcome.finish_reason != "length":
            return "the server sends neither usage nor token ids: how many tokens it made is not known (--ignore-eos makes it known)"
        if not outcome.arrivals and (self._told or self._with_ids):
            return f"{self._told or self._with_ids} tokens are counted, but no chunk brought any"
        return None


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _message_of(body: bytes) -> str:
    """The message in the body of an error, in OpenAI's or FastAPI's shape, or the body."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        return body.decode("utf-8", "replace")[:500]
    if isinstance(value, dict):
        return _message(value.get("error", value.get("detail", value)))
    return str(value)[:500]
